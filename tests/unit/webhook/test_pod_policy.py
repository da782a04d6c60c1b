"""The table of admission cases: what a pod may set, and which containers see devices."""

from typing import Any

import pytest

from services.webhook.admission import UPDATE_STAGES, AdmissionDecision, decide
from services.webhook.pod_admission import AdmissionPolicy, PodAdmission
from shared.dialects.reserved import CAPABILITIES, EXEMPT, VISIBLE
from shared.model.names import ISOLATION
from tests.support.webhook.reviews import Obj, applied, container, decided, env, gpu, pod, reviewed

CUDA = "nvcr.io/nvidia/pytorch:24.05"


def mounted(path: str) -> Obj:
    return {"volumeMounts": [{"name": "v", "mountPath": path}]}


def host_path(path: str) -> list[Obj]:
    return [{"name": "v", "hostPath": {"path": path}}]


def updated(new: Obj, old: Obj, **policy: Any) -> AdmissionDecision:
    before = reviewed(old)
    made = AdmissionPolicy(**policy)
    return decide(PodAdmission(pod=reviewed(new), old=before, policy=made), UPDATE_STAGES)


def visible(shown: Obj) -> str | None:
    """The value that takes effect: that of the last variable with the name."""
    values = [each.get("value") for each in shown.get("env", ()) if each["name"] == VISIBLE]
    return values[-1] if values else None


SEEING = (
    env(VISIBLE, "all"),
    env(VISIBLE, "GPU-of-another-tenant"),
    env(VISIBLE),
    {"env": [{"name": VISIBLE, "value": "void"}, {"name": VISIBLE, "value": "all"}]},
    env("CUDA_VERSION", "12.4"),
    {"envFrom": [{"configMapRef": {"name": "settings"}}]},
    {"envFrom": [{"secretRef": {"name": "settings"}}]},
    {"image": CUDA},
    {"image": "docker.io/nvidia/cuda:12.4.1-base"},
    {"image": "registry/team/cuda-tools"},
)


@pytest.mark.parametrize("fields", SEEING)
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
@pytest.mark.parametrize("in_gpu_pod", [True, False])
def test_a_container_without_a_request_sees_no_device(
    fields: Obj, kind: str, *, in_gpu_pod: bool
) -> None:
    obj = pod(gpu() if in_gpu_pod else container("main"))
    obj["spec"][kind] = [*obj["spec"].get(kind, ()), container() | fields]

    shown = applied(obj, decided(obj))["spec"][kind][-1]

    assert visible(shown) == "void"
    assert [each["name"] for each in shown["env"]].count(VISIBLE) == max(
        1, [each["name"] for each in fields.get("env", ())].count(VISIBLE)
    )


NONE = {"resources": {"limits": {"nvidia.com/gpu": "0"}}} | env(VISIBLE, "all")


@pytest.mark.parametrize(
    "obj",
    [
        pod(container("main") | NONE, schedulerName="theirs"),
        pod(container(), runtimeClassName="nvidia-cdi"),
    ],
)
def test_neither_a_request_for_no_device_nor_a_runtime_class_shows_any(obj: Obj) -> None:
    assert visible(applied(obj, decided(obj))["spec"]["containers"][0]) == "void"


def test_a_second_review_changes_nothing() -> None:
    obj = pod(gpu(), container(**env(VISIBLE)))
    once = applied(obj, decided(obj))

    assert once["spec"]["containers"] == applied(once, decided(once))["spec"]["containers"]


@pytest.mark.parametrize(
    ("path", "conflict"),
    [
        ("/etc/ld.so.preload", "/etc/ld.so.preload"),
        ("/etc", "/etc/ld.so.preload"),
        ("/etc/ld.so.preload/x", "/etc/ld.so.preload"),
        ("//etc/./", "/etc/ld.so.preload"),
        ("/data/../etc", "/etc/ld.so.preload"),
        ("/usr/local/vgpu", "/usr/local/vgpu"),
        ("/usr/local/vgpu/libvgpu.so", "/usr/local/vgpu"),
        ("/usr", "/usr/local/vgpu"),
        ("/", "/etc/ld.so.preload"),
        ("/tmp/vgpu", "/tmp/vgpu"),
        ("/tmp/vgpulock", "/tmp/vgpulock"),
        ("/tmp/cudevshr.cache", "/tmp/cudevshr.cache"),
        ("/tmp", "/tmp/vgpu"),
        ("/overrideEnv", "/overrideEnv"),
        ("/x/y/ld.so.preload", "ld.so.preload"),
        ("x/ld.so.preload/", "ld.so.preload"),
        ("/opt/lib/libvgpu.so", "libvgpu.so"),
        ("/var/tmp/vgpu", "vgpu"),
    ],
)
def test_a_mount_at_above_or_below_a_path_of_the_lease_is_denied(path: str, conflict: str) -> None:
    for fields, what in (
        (mounted(path), "a volume mounted at"),
        ({"volumeDevices": [{"name": "v", "devicePath": path}]}, "a volume mounted at"),
        ({"terminationMessagePath": path}, "terminationMessagePath"),
    ):
        decision = decided(pod(gpu(**fields)))

        assert not decision.allowed
        assert f"container main: {what} {path} could replace" in decision.message
        assert conflict in decision.message


HOST_PATHS = (
    *("/", "/dev", "/dev/nvidia0", "/dev/nvidia-caps", "/etc", "/etc/cdi", "/proc", "/run", "/var"),
    *("/var/lib/kubelet/device-plugins", "/var/lib/leasehold", "/var/run/containerd", "/var/lib"),
    *("/usr/local/vgpu", "/sys/fs/cgroup", "/data/../etc", "/run/../proc/1", "/usr/bin", "/boot"),
    *("/dev/char", "/dev/mem", "/dev/shm/../mem", "/dev/infinibandx", "/sys/bus/pci", "", "/root"),
    *("/sys/kernel/debug", "/etc/kubernetes", "/opt/cni/bin", "/tmp", "/home", "/system", "/datax"),
)


SETTERS = (
    pod(gpu(securityContext={"privileged": True})),
    pod(gpu(), container(securityContext={"capabilities": {"add": ["CAP_SYS_ADMIN"]}})),
    *(
        pod(gpu(), volumes=host_path(path))
        for path in (
            *(
                "/sys/fs/cgroup",
                "/sys/fs/cgroup/kubepods.slice",
                "/sys/fs",
                "/run/leasehold-limits",
            ),
            *("/var/lib/leasehold/limits.sock", "/var/lib/leasehold/mps/0/pipe", "/run/leasehold"),
            *("/tmp/nvidia-mps", "/run/nvidia-mps/control", "/run/nvidia/mps/x"),
        )
    ),
)


@pytest.mark.parametrize("isolation", ["", "driver", "mps", "memory=driver,compute=mps"])
@pytest.mark.parametrize("obj", SETTERS)
def test_no_pod_with_gpus_reaches_what_sets_limits(obj: Obj, isolation: str) -> None:
    """The host's cgroup namespace is no field of a pod: runtimes give it to privileged ones."""
    notes = {"annotations": {ISOLATION: isolation}} if isolation else {}

    decision = decided(obj | {"metadata": obj["metadata"] | notes})

    assert (decision.allowed, decision.code) == (False, 403)


def test_no_administrator_can_name_the_pipes_of_mps_as_data() -> None:
    """They would serve pods without a lease."""
    piped = pod(gpu(), volumes=host_path("/run/nvidia-mps/control"))

    assert "leads to a server of MPS" in decided(piped, host_paths=("/run", "/data")).message


def test_an_administrator_names_the_directories_with_data() -> None:
    models = pod(gpu(), volumes=host_path("/models/a"))

    assert decided(models, host_paths=("/models",)).allowed
    assert not decided(models, host_paths=("/data",)).allowed
    assert "--host-paths" in decided(models).message


SCRATCH = [{"name": "v", "emptyDir": {}}]
OTHER = [{"name": "w", "emptyDir": {}}]


def test_an_ephemeral_container_may_not_mount_the_tmp_of_a_container_with_gpus() -> None:
    old = pod(gpu(**mounted("/tmp")), volumes=[*SCRATCH, *OTHER], nodeName="n1")
    free = {"volumeMounts": [{"name": "w", "mountPath": "/tmp"}]}

    assert "container debug: volume v is /tmp" in updated(
        debugged(old, **mounted("/x")), old
    ).message  # fmt: skip
    assert updated(debugged(old, **free), old).allowed


def test_processes_of_a_container_with_gpus_are_shown_to_no_other_container() -> None:
    """Seen on a real kubelet: `rmdir /proc/PID/root/tmp/vgpu` unmounts the lease's mount."""
    shared = decided(pod(gpu(), container(), shareProcessNamespace=True))
    old = pod(gpu(), container(), nodeName="n1")

    assert "shareProcessNamespace lets other containers remove" in shared.message
    assert (
        "container debug: targetContainerName main has GPUs"
        in updated(debugged(old, targetContainerName="main"), old).message
    )
    assert updated(debugged(old, targetContainerName="side"), old).allowed
    assert decided(pod(gpu(), shareProcessNamespace=False)).allowed
    assert decided(pod(container(), shareProcessNamespace=True)).allowed


def adding(capability: str) -> Obj:
    return {"securityContext": {"capabilities": {"add": [capability]}}}


def sources(prefix: str | None, kind: str = "configMapRef") -> Obj:
    source: Obj = {kind: {"name": "later"}}
    return {"envFrom": [source if prefix is None else source | {"prefix": prefix}]}


def placed(kind: str, made: Obj) -> Obj:
    obj = pod(container())
    obj["spec"][kind] = [*obj["spec"].get(kind, ()), made]
    return obj


RESERVED = (
    *("NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES", "NVIDIA_IMEX_CHANNELS"),
    *("NVIDIA_GDS", "NVIDIA_NVSWITCH", "CUDA_OVERSUBSCRIBE", "CUDA_TASK_PRIORITY", "LD_AUDIT"),
    *("CUDA_DEVICE_SM_LIMIT_3", "RECORD_KERNEL_INTERVAL", "DOCKER_RESOURCE_GPU", "LD_PRELOAD"),
    *("CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_DISABLE_CONTROL", VISIBLE),
    *("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_SM_PARTITION"),
)
OTHER_VOLUMES: tuple[Obj, ...] = (
    {"hostPath": {"path": "/data"}},
    {"persistentVolumeClaim": {"claimName": "data"}},
    {"ephemeral": {"volumeClaimTemplate": {}}},
    {"configMap": {"name": "data"}},
    {"emptyDir": None},
)
REPLACES_TMP = "a volume mounted at /tmp could replace"
NAMING = mounted("/var/run/nvidia-container-devices/all")
TMP = mounted("/tmp")


def beside_tmp(kind: str) -> Obj:
    """Seen on a real kubelet: `rmdir` of the directory there unmounts the lease's mount here."""
    obj = pod(gpu(**TMP), volumes=SCRATCH)
    obj["spec"][kind] = [*obj["spec"].get(kind, ()), container() | mounted("/shared")]
    return obj


def tmp_mounts(*mounts: Obj) -> Obj:
    return pod(gpu(volumeMounts=[{"name": "v", **each} for each in mounts]), volumes=SCRATCH)


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        *(
            (pod(gpu(**env(name, value))), f"main: variable {name} may be set by Leasehold only")
            for name in RESERVED
            for value in ("all", "", None)
        ),
        (pod(gpu(**env("CUDA_DEVICE_ORDER", "FASTEST_FIRST"))), "variable CUDA_DEVICE_ORDER"),
        (pod(gpu("a"), gpu("b", **env("LD_AUDIT", "x"))), "container b: variable LD_AUDIT"),
        *(
            (pod(gpu(**env("LD_LIBRARY_PATH", value))), f"main: LD_LIBRARY_PATH {fault}")
            for value, fault in (
                ("/a:/usr/local/vgpu", "contains /usr/local/vgpu"),
                ("/lib:/usr/local/./vgpu", "contains /usr/local/vgpu"),
                ("$(BASE)/vgpu", "refers to another variable"),
                (":" * 40_000, "has 40000 characters"),
                (None, "uses valueFrom"),
            )
        ),
        *(
            (
                placed(kind, gpu("first", **sources(prefix), **more)),
                "first: envFrom",
            )
            for prefix in (None, "", "NVIDIA_", "NV", "CUDA_DEVICE_MEMORY_", "LD", "LD_")
            for kind, more in (
                ("containers", {}),
                ("initContainers", {}),
                ("initContainers", {"restartPolicy": "Always"}),
            )
        ),
        (pod(gpu(**sources(None, "secretRef"))), "envFrom without a prefix could set variables"),
        (pod(gpu(), nodeName="n1"), "nodeName is set to n1"),
        (pod(gpu(), runtimeClassName="gVisor"), "could be neither limited nor measured"),
        (pod(gpu(), hostPID=True), "hostPID gives access to processes of other pods: remove it"),
        (pod(gpu(), hostIPC=True), "hostIPC gives access to processes of other pods: remove it"),
        (pod(gpu(), container(securityContext={"privileged": True})), "side is privileged"),
        *(
            (pod(gpu(), container(**adding(name))), f"container side: capability {name}")
            for name in (*sorted(CAPABILITIES), "CAP_SYS_PTRACE", "sys_admin")
        ),
        (pod(gpu(), container(**NAMING)), "container side: a mount at /var/run/nvidia-con"),
        (pod(container(**NAMING)), "would select devices in the container runtime"),
        *(
            (pod(gpu(), volumes=host_path(path)), f"volume v: hostPath {path} ")
            for path in HOST_PATHS
        ),
        *(
            (pod(gpu(**TMP), volumes=[{"name": "v", **volume}]), f"{REPLACES_TMP} /tmp/vgpu")
            for volume in OTHER_VOLUMES
        ),
        *(
            (tmp_mounts({"mountPath": "/tmp"} | part), REPLACES_TMP)
            for part in ({"subPath": "a"}, {"subPathExpr": "$(A)"}, {"readOnly": True})
        ),
        *(
            (beside_tmp(kind), "container side: volume v is /tmp of container main")
            for kind in ("containers", "initContainers")
        ),
        (
            tmp_mounts({"mountPath": "/tmp"}, {"mountPath": "/again"}),
            "container main: volume v is /tmp of container main",
        ),
    ],
)
def test_what_would_let_a_pod_exceed_its_limits_is_denied(obj: Obj, message: str) -> None:
    decision = decided(obj)

    assert (decision.allowed, decision.code) == (False, 403)
    assert message in decision.message


@pytest.mark.parametrize(
    "obj",
    [
        pod(gpu(**mounted("/data"))),
        pod(gpu(terminationMessagePath="/dev/termination-log"), volumes=SCRATCH),
        pod(gpu(**mounted("/usr/local/share"))),
        pod(gpu(**mounted("/tmp/cache"))),
        pod(gpu(), container() | mounted("/etc")),
        pod(gpu(), volumes=host_path("/dev/shm")),
        pod(gpu(), volumes=host_path("/dev/infiniband")),
        pod(gpu(), volumes=host_path("/etc/localtime")),
        pod(gpu(), volumes=host_path("/mnt/models//a")),
        pod(gpu(securityContext={"capabilities": {"add": ["IPC_LOCK"], "drop": ["SYS_ADMIN"]}})),
        pod(gpu(**env("LD_LIBRARY_PATH", "/opt/lib:/usr/local/vgpux"))),
        pod(gpu(**env("CUDA_VISIBLE_DEVICES", "0"))),
        pod(gpu(**env("CUDA_DEVICE_ORDER", "PCI_BUS_ID"))),
        pod(gpu(**env("CUDA_DEVICE_MAX_CONNECTIONS", "1"))),
        pod(gpu(**env("NVIDIA_API_KEY"))),
        pod(gpu(**sources("APP_"))),
        pod(gpu(**sources("APP_", "secretRef"))),
        pod(container(**env("LD_PRELOAD", "x.so")), nodeName="n1"),
        pod(container(), hostPID=True, volumes=host_path("/")),
        *(
            pod(
                gpu(**mounted(path)),
                container(volumeMounts=[{"name": "w", "mountPath": "/tmp"}]),
                volumes=[{"name": "v", "emptyDir": source}, *OTHER],
            )
            for path in ("/tmp", "/tmp/", "//tmp/./")
            for source in ({}, {"medium": "Memory", "sizeLimit": "1Gi"})
        ),
    ],
)
def test_what_lifts_no_limit_is_admitted(obj: Obj) -> None:
    assert decided(obj).allowed
    assert decided(pod(gpu(**sources(None, "secretRef"))), allow_env_from=True).allowed


def test_devices_are_hidden_once_and_where_the_author_has_not() -> None:
    own = env("A", "b")
    shown = applied(obj := pod(gpu(), container(**own), container("other")), decided(obj))
    first, second, third = shown["spec"]["containers"]
    alone = pod(container("one"), container(**env(VISIBLE, "none")), container(image="nginx"))

    assert "env" not in first
    assert second["env"] == [*own["env"], *env(VISIBLE, "void")["env"]]
    assert third["env"] == env(VISIBLE, "void")["env"]
    assert applied(alone, decided(alone)) == alone


@pytest.mark.parametrize("vendor", ["nvidia.com/gpu=all", "leasehold.dev/gpu=GPU-a"])
def test_an_annotation_that_names_devices_for_the_runtime_is_denied(vendor: str) -> None:
    notes = {"cdi.k8s.io/any": vendor}

    assert "would select devices" in decided(pod(container(), notes=notes)).message
    assert decided(pod(container(), notes=notes), exempt=True).allowed
    assert decided(pod(container(), notes={"cdi.k8s.io/any": "example.org/nic=0"})).allowed


def test_an_exempt_namespace_keeps_the_rules_on_variables_only() -> None:
    free = pod(gpu(**mounted("/etc")), container() | env(VISIBLE, "all"), hostPID=True)
    preload = pod(gpu(**env("LD_PRELOAD", "x.so")))

    shown = applied(free, decided(free, exempt=True))

    assert shown["metadata"]["annotations"][EXEMPT] == "true"
    assert visible(shown["spec"]["containers"][1]) == "all"
    assert not decided(preload, exempt=True).allowed
    other = pod(gpu(), notes={EXEMPT: "true"})
    assert EXEMPT not in applied(other, decided(other))["metadata"]["annotations"]


def test_an_image_that_shows_devices_is_denied_after_admission() -> None:
    old, new = pod(container()), pod(container(image=CUDA))

    decision = updated(new, old)

    assert not decision.allowed
    assert f"container side would see every GPU with image {CUDA}" in decision.message
    hidden = env(VISIBLE, "void")
    assert updated(pod(container(image=CUDA) | hidden), pod(container() | hidden)).allowed
    assert updated(pod(gpu(image=CUDA)), pod(gpu())).allowed
    assert updated(pod(container(image="app:2")), old).allowed


def debugged(obj: Obj, **fields: Any) -> Obj:
    kinds = {"ephemeralContainers": [container("debug") | fields]}
    return {**obj, "spec": {**obj["spec"], **kinds}}


@pytest.mark.parametrize("fields", [{}, *SEEING])
def test_an_ephemeral_container_of_a_gpu_pod_sees_no_device(fields: Obj) -> None:
    old = pod(gpu(), nodeName="n1")
    new = debugged(old, **fields)

    shown = applied(new, updated(new, old))["spec"]["ephemeralContainers"]

    assert visible(shown[0]) == "void"
    assert updated(new, new).patches == (), "one that runs cannot change"


def test_an_ephemeral_container_gets_no_privileges_in_a_gpu_pod() -> None:
    old = pod(gpu(), nodeName="n1")
    traces = {"securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}

    assert "container debug: capability SYS_PTRACE" in updated(debugged(old, **traces), old).message
    plain = pod(container())
    assert updated(debugged(plain, **traces), plain).allowed


CLAIM = {"resources": {"claims": [{"name": "gpu"}]}}
WHOLE = {"resources": {"limits": {"leasehold.dev/whole-gpu": "1"}}}
BY_CLASS = {"resources": {"limits": {"deviceclass.resource.kubernetes.io/any": "1"}}}
CLAIMS = [{"name": "gpu", "resourceClaimName": "gpu"}]
ROOTED: Obj = {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}


def claiming(*others: Obj, own: Obj | None = None, **spec: Any) -> Obj:
    return pod(container("main") | CLAIM | (own or {}), *others, resourceClaims=CLAIMS, **spec)


DENIED = (
    (claiming(own=mounted("/etc/ld.so.preload")), "could replace /etc/ld.so.preload"),
    (claiming(own=env("LD_PRELOAD", "")), "variable LD_PRELOAD may be set by Leasehold only"),
    (claiming(own=env("CUDA_DEVICE_MEMORY_LIMIT_0", "9g")), "may be set by Leasehold only"),
    (claiming(own={"envFrom": [{"configMapRef": {"name": "a"}}]}), "envFrom without a prefix"),
    (claiming(container() | ROOTED), "capability SYS_ADMIN"),
    (claiming(container(securityContext={"privileged": True})), "is privileged"),
    (claiming(volumes=host_path("/dev")), "hostPath /dev gives access"),
    (claiming(hostPID=True), "hostPID"),
    (claiming(shareProcessNamespace=True), "shareProcessNamespace"),
    (claiming(nodeName="n0"), "nodeName"),
    (pod(container("main") | WHOLE | ROOTED), "capability SYS_ADMIN"),
    (pod(container("main") | BY_CLASS | ROOTED), "capability SYS_ADMIN"),
)


@pytest.mark.parametrize("scheduler", ["", "default-scheduler", "leasehold-full", "theirs"])
@pytest.mark.parametrize(("obj", "message"), DENIED)
def test_what_would_lift_limits_is_denied_under_any_scheduler(
    obj: Obj, message: str, scheduler: str
) -> None:
    decision = decided(obj | {"spec": obj["spec"] | {"schedulerName": scheduler}}, claims=True)

    assert not decision.allowed
    assert message in decision.message


def test_a_pod_with_claims_is_admitted_without_a_request_of_its_own() -> None:
    decision = decided(claiming(), claims=True)

    assert decision.allowed
    assert not decision.requests_gpu


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
@pytest.mark.parametrize("fields", [{}, env("NVIDIA_VISIBLE_DEVICES", "all"), {"image": CUDA}])
def test_only_the_claim_gives_its_pod_a_device(kind: str, fields: Obj) -> None:
    obj = claiming()
    obj["spec"][kind] = [*obj["spec"].get(kind, ()), container() | fields]

    shown = applied(obj, decided(obj, claims=True))["spec"]

    assert visible(shown[kind][-1]) == "void"
    assert visible(shown["containers"][0]) == "void"


@pytest.mark.parametrize("own", [{}, {"image": CUDA}, CLAIM | {"image": CUDA}])
def test_what_a_webhook_has_completed_is_admitted_by_the_next(own: Obj) -> None:
    """API servers call the one that hides devices first, and some again after other webhooks."""
    obj = claiming(own=own)

    again = applied(obj, decided(obj, claims=True))

    assert decided(again, claims=True).allowed
    assert visible(again["spec"]["containers"][0]) == "void"


def test_an_exempt_namespace_and_a_cluster_without_claims_have_no_such_rules() -> None:
    obj = claiming(container() | ROOTED)

    assert decided(obj, claims=True, exempt=True).allowed
    assert decided(obj, claims=False).allowed
    assert not decided(obj, claims=True).allowed


def test_an_ephemeral_container_of_a_pod_with_claims_is_reviewed() -> None:
    old = claiming()
    debug = container("debug", targetContainerName="main") | ROOTED
    new = old | {"spec": old["spec"] | {"ephemeralContainers": [debug]}}

    decision = updated(new, old, claims=True)

    assert not decision.allowed
    assert "capability SYS_ADMIN" in decision.message
    assert "targetContainerName main has GPUs" in decision.message
