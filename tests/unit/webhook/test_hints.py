"""What a hint says is done by a program: the pod runs, or the next hint names another thing."""

from collections.abc import Iterator
from typing import Any

import jsonpatch
import msgspec
import pytest

from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.vocabulary import find_unread
from shared.model.budgets.quota import Quota
from shared.model.devices.node import Taint
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.pods.manifest_patches import json_patch
from shared.pods.pod_view import PodView
from tests.support.webhook.hints import (
    KOORDINATOR,
    NVIDIA,
    RIGHT,
    TENCENT,
    VGPU,
    Limits,
    Pod,
    added_names,
    domains,
    follow,
    serving,
)
from tests.support.webhook.reviews import container, decided, env, pod, reviewed

WORDS = {
    "gpu": ("GPU", "gpus", "gpu-count", "num-gpus"),
    "gpumem": ("gpuMem", "gpu-mem", "gpu-memory", "gpumemory", "gpu_mem"),
    "gpucores": ("gpucore", "gpu-cores", "GPUCores"),
    "gpumem-percentage": ("gpumem-percent", "gpu-memory-percentage", "gpumem_percentage"),
    "vgpu-number": ("vgpu-num", "vgpu", "vgpus", "vgpu-count"),
    "vgpu-memory": ("vgpu-mem", "vgpumem", "vGPU-memory"),
    "vgpu-cores": ("vgpu-core", "vgpucores"),
    "vgpu-memory-percentage": ("vgpu-memory-percent", "vgpu-mem-percentage"),
    "gpu-memory": ("gpu-mem", "gpumemory", "gpu_memory"),
    "gpu-number": ("gpu-num", "gpu-count", "gpus"),
    "gpu.shared": ("gpu-shared",),
    "gpu-core": ("gpu-cores", "gpucore"),
    "gpu-memory-ratio": ("gpu-memory-percentage", "gpu-mem-ratio", "gpu-memory-percent"),
    "vcuda-core": ("vcuda-cores", "vcuda", "vCuda-core"),
    "vcuda-memory": ("vcuda-mem", "vcudamemory"),
}
"""How the ends of names are written wrongly."""


def of(limits: Limits, **fields: Any) -> Pod:
    return pod(container("main", limits), **fields)


def written(limits: Limits, requests: Limits) -> Pod:
    main = container("main") | {"resources": {"limits": limits, "requests": requests}}
    return pod(main)


def without(limits: Limits, *names: str) -> Limits:
    return {name: amount for name, amount in limits.items() if name not in names}


def misspelt() -> Iterator[Any]:
    for limits in RIGHT:
        for name, amount in limits.items():
            prefix, _, ending = name.rpartition("/")
            for wrong in WORDS.get(ending, ()):
                other = without(limits, name) | {f"{prefix}/{wrong}": amount}
                yield pytest.param(of(other), limits, id=f"{prefix}/{wrong} {len(limits)}")


def misplaced() -> Iterator[Any]:
    for limits in RIGHT:
        for name, amount in limits.items():
            rest = without(limits, name)
            for place in ("notes", "labels"):
                yield pytest.param(
                    of(rest, **{place: {name: amount}}), limits, id=f"{name} in {place}"
                )
            yield pytest.param(written(rest, limits), limits, id=f"{name} in requests")


@pytest.mark.parametrize(("wrong", "right"), [*misspelt(), *misplaced()])
def test_a_wrong_word_leads_to_the_pod_that_was_meant(wrong: Pod, right: Limits) -> None:
    followed = follow(wrong)

    assert followed.hints
    assert domains(dict.fromkeys(added_names(followed.hints))) <= domains(right)
    meant = follow(of(right))
    if len(right) == len(set(_names(wrong))):
        assert followed.request.containers == meant.request.containers


def _names(wrong: Pod) -> list[str]:
    """Every name that stands for an amount, wherever it stands."""
    main = wrong["spec"]["containers"][0]["resources"]
    names = {**main.get("limits", {}), **main.get("requests", {})}
    meta = wrong["metadata"]
    return [*names, *meta.get("annotations", {}), *meta.get("labels", {})]


def amounts() -> Iterator[Any]:
    for limits in RIGHT:
        for name in limits:
            for amount in ("0.5", "25%", "500m", "1.5", "130", "8", "3Gi", "99999", "0"):
                yield pytest.param(of(limits | {name: amount}), id=f"{name}: {amount}")
            if len(limits) > 1:
                yield pytest.param(of(without(limits, name)), id=f"without {name} {len(limits)}")


@pytest.mark.parametrize("wrong", [*amounts()])
def test_a_wrong_amount_leads_to_a_pod_that_runs_with_the_words_of_its_system(wrong: Pod) -> None:
    followed = follow(wrong)

    limits = wrong["spec"]["containers"][0]["resources"]["limits"]
    assert domains(dict.fromkeys(added_names(followed.hints))) <= domains(limits)


def mixtures() -> Iterator[Any]:
    systems = (NVIDIA, VGPU, {"volcano.sh/gpu-memory": "3000"}, KOORDINATOR, TENCENT)
    for at, system in enumerate(systems):
        for other in systems[at + 1 :]:
            names = f"{next(iter(system))} {next(iter(other))}"
            yield pytest.param(of(system | other), id=f"{names} together")
            first = dict([next(iter(system.items()))])
            yield pytest.param(of(first | without(other, next(iter(other)))), id=f"{names} parts")
            two = container("main", system), container("side", other)
            yield pytest.param(pod(*two), id=f"{names} in two")


@pytest.mark.parametrize("wrong", [*mixtures()])
def test_systems_that_are_mixed_are_said_before_what_is_missing(wrong: Pod) -> None:
    followed = follow(wrong)

    assert not followed.hints or "mixes" in followed.hints[0].text


T4 = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}


def annotated(key: str, value: str, limits: Limits = T4) -> Any:
    return pytest.param(of(limits, notes={key: value}), id=f"{key}: {value}")


GANG = "gang.scheduling.koordinator.sh/"
LIGHTWEIGHT = "pod-group.scheduling.sigs.k8s.io/"


def gang(name: str, size: str, **notes: str) -> Any:
    notes |= {f"{GANG}name": name, f"{GANG}min-available": size}
    return pytest.param(of(T4, notes=notes), id=f"gang {notes}"[:80])


ANNOTATIONS = (
    *(annotated("nvidia.com/vgpu-mode", value) for value in ("MIG", "mps", "hami", "hami_core")),
    *(annotated("nvidia.com/numa-bind", value) for value in ("yes", "no", "enabled", "numa")),
    *(
        annotated("hami.io/gpu-scheduler-policy", value)
        for value in ("pack", "bin-pack", "spreading", "numa,pack", "best")
    ),
    *(annotated("hami.io/node-scheduler-policy", value) for value in ("bin-pack", "random")),
    *(
        annotated("leasehold.dev/isolation", value)
        for value in (
            *("strong", "Strict", "hami", "memory=mig", "compute=mps,memory=hami-core", "x"),
            *("mps_shared", "mps-shared", "compute=mps-shared,memory=mps"),
            *("memory:driver", "memory=hami;cores=none", "memory=driver compute=none"),
        )
    ),
    annotated("leasehold.dev/isolation", "mps-shared", T4 | {"nvidia.com/gpu": "2"}),
    *(
        annotated(f"leasehold.dev/{key}", value)
        for key in ("max-run-time", "expected-run-time")
        for value in ("1 hour", "3600", "90 minutes", "2H", "1d", "1w", "1.5h", "PT2H", "1h 30m")
    ),
    *(annotated(key, "1h") for key in ("leasehold.dev/max-run-times", "leasehold.dev/max-runtime")),
    annotated("tencent.com/vcuda-core-limit", "80", TENCENT),
    annotated("tencent.com/vcuda-core-limit", "20", TENCENT),
    annotated("nvidia.com/use-gputype", "A100-PCIE"),
    annotated("nvidia.com/use-gputype", "H100"),
    annotated("nvidia.com/nouse-gputype", "T4,A100"),
    annotated("nvidia.com/use-gpuuuid", "GPU-of-another-cluster"),
    annotated("volcano.sh/vgpu-use-gpuuuid", "GPU-a-0"),
    annotated("volcano.sh/vgpu-mode", "mig"),
    annotated("nvidia.com/vgpu-mode", "mig", VGPU | {"volcano.sh/vgpu-cores": "0"}),
    annotated("nvidia.com/use-GPUtype", "T4"),
    annotated("nvidia.com/use-gputype", "H100; T4"),
    annotated("volcano.sh/vgpu-nouse-gpuuuid", "GPU-a-0|GPU-a-1", VGPU),
    annotated("nvidia/use-gputype", "T4"),
    annotated("volcano.io/vgpu-mode", "mig", VGPU | {"volcano.sh/vgpu-cores": "0"}),
    *(annotated(f"{domain}/max-run-time", "1h") for domain in ("leasehold", "leasehold.io")),
    annotated("kueue.x-k8s.io/podset-require-topology", "kubernetes.io/hostname"),
    annotated("nvidia.com/use-gputypes", "T4"),
    *(
        annotated(f"leasehold.dev/{key}", value)
        for key in ("max-run-time", "expected-run-time")
        for value in ("0", "0s", "-1h", "", "none", "infinite", "999999h")
    ),
    *(gang(name, "2") for name in ("My Gang", "A_B", "team/train", "", "!", "x" * 300)),
    *(gang("g", size) for size in ("0", "-1", "two", "2.5", "2 pods", "", "10000000")),
    annotated(f"{GANG}name", "g"),
    annotated(f"{GANG}min-available", "2"),
    annotated("scheduling.k8s.io/group-name", "My_Gang"),
    *(
        gang("g", "2", **{f"{GANG}{key}": value})
        for key, value in (("total-number", "1"), ("total-number", "all"), ("waiting-time", "10"))
    ),
    annotated(f"{GANG}mode", "NonStrict"),
    annotated(f"{GANG}mode", "strict"),
    annotated(f"{GANG}match-policy", "waiting-and-runing"),
    annotated("leasehold.dev/isolation", "exclusive"),
    annotated("leasehold.dev/preemptible", "false"),
    *(
        annotated("leasehold.dev/isolation", demand, limits)
        for demand, limits in (
            *(
                (demand, limits)
                for demand in ("strict", "exclusive", "mig")
                for limits in (KOORDINATOR, TENCENT, {"volcano.sh/gpu-memory": "3000"})
            ),
            ("exclusive", VGPU),
            ("mig", {"nvidia.com/gpu": "1"}),
        )
    ),
    *(
        pytest.param(
            of(T4, labels={f"{LIGHTWEIGHT}name": name, f"{LIGHTWEIGHT}min-available": size}),
            id=f"labels of a gang {name} {size}",
        )
        for name, size in (("My_Gang", "2"), ("g", "0"))
    ),
    *(
        pytest.param(of(limits, labels={key: value}), id=f"label {key}")
        for key, value, limits in (
            ("nvidia.com/use-gputype", "T4", T4),
            ("nvidia.com/vgpu-mode", "mig", T4),
            ("volcano.sh/vgpu-mode", "mig", VGPU),
            ("leasehold.dev/max-run-time", "1h", T4),
            ("hami.io/webhook", "ignore", T4),
        )
    ),
)


@pytest.mark.parametrize("wrong", ANNOTATIONS)
def test_a_wrong_annotation_or_label_is_mended_by_its_hints(wrong: Pod) -> None:
    followed = follow(wrong)

    assert followed.hints


RUN_TIME = "leasehold.dev/max-run-time"
LIMITED = Quota(namespace=Namespace("team-a"), max_run_s=5400)
LONGER = {
    "annotation": of(T4, notes={RUN_TIME: "2h"}),
    "spec": of(T4, activeDeadlineSeconds=7200),
    "both": of(T4, notes={RUN_TIME: "3h"}, activeDeadlineSeconds=7200),
}


@pytest.mark.parametrize("wrong", LONGER.values(), ids=LONGER.keys())
def test_a_pod_that_may_run_for_longer_than_its_quota_allows_gets_as_long_as_it_allows(
    wrong: Pod,
) -> None:
    followed = follow(wrong, quota=LIMITED)

    assert len(followed.hints) == 1
    assert followed.request.term.max_run_s == 5400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("1h30", 5400), ("01:30:00", 5400), ("1-00:00:30", 86_430), ("90 minutes", 5400)),
        *(("1w", 604_800), ("1.5h", 5400), ("PT2H30M", 9000), ("1h 30m", 5400)),
    ],
)
def test_a_run_time_as_people_write_it_is_as_long(text: str, seconds: int) -> None:
    followed = follow(of(T4, notes={RUN_TIME: text}))

    assert followed.request.term.max_run_s == seconds


TAINTS = (
    Taint(key="nvidia.com/gpu", effect="NoSchedule", value="present"),
    Taint(key="team", effect="NoExecute"),
)


@pytest.mark.parametrize("wrong", [of(T4), of(T4, nodeSelector={"gpu": "yes"}), of(VGPU)])
def test_the_taints_of_all_nodes_are_tolerated_by_their_hint(wrong: Pod) -> None:
    followed = follow(wrong, *TAINTS)

    keys = [toleration.key for toleration in followed.request.node_requirements.tolerations]
    assert keys == ["nvidia.com/gpu", "team"]


def mounted(path: str, **fields: Any) -> Pod:
    mount = {"name": "work", "mountPath": path, **fields}
    main = container("main", T4, volumeMounts=[mount])
    return pod(main, volumes=[{"name": "work", "emptyDir": {}}])


def hosted(path: str) -> Pod:
    mount = {"name": "driver", "mountPath": path}
    volume = {"name": "driver", "hostPath": {"path": path}}
    return pod(container("main", T4, volumeMounts=[mount]), volumes=[volume])


def secured(**context: Any) -> Pod:
    return pod(container("main", T4, securityContext=context))


def demanding_server(**context: Any) -> Pod:
    main = container("main", T4, securityContext=context)
    return pod(main, notes={"leasehold.dev/isolation": "mps-shared"})


@pytest.mark.parametrize(
    "word", ["driver", "mps", "mps-shared", "time", "memory=driver,compute=time"]
)
@pytest.mark.parametrize("limits", [KOORDINATOR, TENCENT])
def test_an_isolation_that_no_node_offers_leads_to_one_that_is_offered(
    word: str, limits: Limits
) -> None:
    followed = follow(of(limits, notes={"leasehold.dev/isolation": word}))

    assert followed.pod["metadata"]["annotations"] == {"leasehold.dev/isolation": "hami-core"}
    assert f"no node offers the isolation {word}, only hami-core" in followed.hints[-1].text


FIELDS = {
    "nodeName": of(T4, nodeName="a"),
    "hostPID": of(T4, hostPID=True),
    "hostIPC": of(T4, hostIPC=True),
    "both host namespaces": of(T4, hostIPC=True, hostPID=True),
    "shareProcessNamespace": of(T4, shareProcessNamespace=True),
    "gvisor": of(T4, runtimeClassName="gvisor"),
    "privileged": secured(privileged=True),
    "capability": secured(capabilities={"add": ["NET_ADMIN", "SYS_ADMIN"]}),
    "two capabilities": secured(capabilities={"add": ["CAP_SYS_PTRACE", "ALL"]}),
    "user 0 at a shared server of MPS": demanding_server(runAsUser=0),
    "an unknown user at a shared server of MPS": demanding_server(),
    "setuid at a shared server of MPS": demanding_server(runAsUser=1000),
    "tmp with subPath": mounted("/tmp", subPath="tmp"),
    "tmp read only": mounted("/tmp", readOnly=True),
    "etc": mounted("/etc"),
    "usr/local": mounted("/usr/local"),
    "message in the lease": pod(
        container("main", T4, terminationMessagePath="/tmp/vgpu/message")
    ),
    "limit of memory": pod(container("main", T4, **env("CUDA_DEVICE_MEMORY_LIMIT_0", "99g"))),
    "visible devices": pod(container("main", T4, **env("NVIDIA_VISIBLE_DEVICES", "all"))),
    "visible devices, twice": pod(
        container("main", T4, env=2 * env("NVIDIA_VISIBLE_DEVICES", "all")["env"])
    ),
    "preload": pod(container("main", T4, **env("LD_PRELOAD", "/x.so"))),
    "a GPU that it does not see": pod(container("main", T4, **env("CUDA_VISIBLE_DEVICES", "3"))),
    "a number of many digits": pod(
        container("main", T4, **env("CUDA_VISIBLE_DEVICES", "9" * 5_000))
    ),
    "one of two": pod(
        container("main", {"nvidia.com/gpu": "2"}, **env("CUDA_VISIBLE_DEVICES", "1,2"))
    ),
    "envFrom": pod(container("main", T4, envFrom=[{"configMapRef": {"name": "app"}}])),
    "envFrom with a prefix": pod(
        container("main", T4, envFrom=[{"prefix": "NV", "secretRef": {"name": "app"}}])
    ),
    "runtime's devices": of(T4, notes={"cdi.k8s.io/x": "nvidia.com/gpu=all"}),
    "device mount": mounted("/var/run/nvidia-container-devices/0"),
    "a disk": of(T4, volumes=[{"name": "d", "gcePersistentDisk": {"pdName": "d"}}]),
    "another scheduler": of(T4, schedulerName="kube-scheduler"),
    "a node that is not there": of(T4, nodeSelector={"kubernetes.io/hostname": "z"}),
    "a label that no node has": of(T4, nodeSelector={"gpu": "yes"}),
    "no request": of({}),
    "0": of({"nvidia.com/gpu": "0"}),
    "an annotation of KAI alone": of({}, notes={"gpu-fraction": "0.5"}),
    "another vendor": of({"habana.ai/gaudi": "1"}),
    "too many GPUs": of({"nvidia.com/gpu": "8"}),
    "a label of its GPU's model": of(T4, nodeSelector={"nvidia.com/gpu.product": "T4"}),
    "more CPUs than a node has": of(T4 | {"cpu": "500"}),
    "the driver's libraries": hosted("/usr/local/nvidia"),
    "a device of the driver": hosted("/dev/nvidia0"),
    "our own resource": of({"leasehold.dev/share": "1"}),
    "a resource by another name": of({"cuda": "1"}),
    "a resource that no node has": of(T4 | {"rdma/hca": "1"}),
    "two of them": of(KOORDINATOR | {"kubernetes.io/batch-cpu": "1000", "example.com/foo": "1"}),
    "huge pages that no node has": of(T4 | {"hugepages-2Mi": "1Gi"}),
    "replicas that no node has": of({"nvidia.com/gpu.shared": "1"}),
    "memory and a percentage": of(NVIDIA | {"nvidia.com/gpumem-percentage": "20"}),
    "a percentage and memory": of(VGPU | {"volcano.sh/vgpu-memory-percentage": "20"}),
    "visible devices without a request": pod(
        container("main", **env("NVIDIA_VISIBLE_DEVICES", "all"))
    ),
    "visible devices beside a GPU": pod(
        container("main", T4), container("side", **env("NVIDIA_VISIBLE_DEVICES", "0"))
    ),
    **{
        f"an init container with {name}": pod(
            container("main", dict(limits)), initContainers=[container("first", dict(limits))]
        )
        for name, limits in (("vgpu", VGPU), ("whole GPUs", {"volcano.sh/gpu-number": "1"}))
    },
    "unequal requests": written(T4, T4 | {"nvidia.com/gpumem": "2000"}),
    "a label with another value": of(T4, labels={"leasehold.dev/preemptible": "no"}),
    "more than its devices have": of(T4 | {"nvidia.com/gpu": "4", "nvidia.com/gpumem": "30000"}),
}  # fmt: skip


@pytest.mark.parametrize("wrong", FIELDS.values(), ids=FIELDS.keys())
def test_what_is_denied_or_waits_for_ever_is_mended_by_its_hints(wrong: Pod) -> None:
    followed = follow(wrong)

    assert followed.hints


KAI = "kai-scheduler"


@pytest.mark.parametrize(
    ("notes", "limits", "right"),
    [
        ({"gpu-fraction": "50%"}, {}, {"gpu-fraction": "0.5"}),
        ({"gpu-memory": "4Gi"}, {}, {"gpu-memory": "4096"}),
        ({"gpu-fraction": "0.5", "gpu-memory": "3000"}, {}, {"gpu-fraction": "0.5"}),
        ({"gpu-fraction": "0.5"}, {"nvidia.com/gpu": "1"}, {"gpu-fraction": "0.5"}),
    ],
)
def test_a_wrong_annotation_of_kai_is_mended_where_it_is_served(
    notes: dict[str, str], limits: Limits, right: dict[str, str]
) -> None:
    wrong = of(limits, notes=notes, schedulerName=KAI)

    with pytest.raises(RequestError) as refused:
        parse_pod_request(reviewed(wrong), Rules())

    patch = msgspec.to_builtins(json_patch(wrong, refused.value.changes))
    mended = jsonpatch.apply_patch(wrong, patch)
    assert mended["metadata"]["annotations"] == right
    assert parse_pod_request(share_added(mended), Rules()).containers[0].gpus == 1


def share_added(wrong: Pod) -> PodView:
    """What admission adds to such a pod."""
    wrong["spec"]["containers"][0]["resources"] = {"limits": {"leasehold.dev/share": "1"}}
    return reviewed(wrong)


SIZES = {
    ("nvidia.com/gpumem", "8GB"): 7630,
    ("nvidia.com/gpumem", "8 GiB"): 8192,
    ("nvidia.com/gpumem", "8192MiB"): 8192,
    ("nvidia.com/gpumem", "3g"): 3072,
    ("nvidia.com/gpumem", "4,000"): 4000,
    ("nvidia.com/gpumem", "4_000"): 4000,
    ("volcano.sh/vgpu-memory", "2.5 gb"): 2385,
    ("koordinator.sh/gpu-memory", "4GiB"): 4096,
}
"""Amounts as people write them, and MiB."""


@pytest.mark.parametrize(("name", "text", "mib"), [(*key, mib) for key, mib in SIZES.items()])
def test_a_size_as_people_write_it_leads_to_as_much_memory(name: str, text: str, mib: int) -> None:
    rest = next(without(limits, name) for limits in RIGHT if name in limits)

    followed = follow(of(rest | {name: text}))

    [part] = followed.request.containers
    assert (part.memory_units or (part.memory_bytes or 0) // 2**20) == mib


@pytest.mark.parametrize("text", ["one", "all", "1/2", "-1", "", "GPU-a-0"])
@pytest.mark.parametrize(
    "name", ["nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores", "nvidia.com/priority"]
)
def test_what_is_no_amount_leads_to_one(name: str, text: str) -> None:
    followed = follow(of(NVIDIA | {name: text}))

    assert followed.hints


def test_one_hundredth_of_a_gpu_is_warned_of_as_a_mistake() -> None:
    followed = follow(of({"koordinator.sh/gpu": "1"}))

    assert followed.request.containers[0].wants_all_memory
    assert (
        "koordinator.sh/gpu: 1 is 1 % of a GPU: for all of it write 100" in followed.hints[0].text
    )


def test_a_number_of_mib_where_blocks_are_counted_leads_to_as_many_mib() -> None:
    followed = follow(of({"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "4096"}))

    assert followed.request.containers[0].memory_bytes == 4096 << 20


def test_a_profile_of_mig_in_an_annotation_has_its_remedy_and_no_patch() -> None:
    wrong = of(T4, notes={"nvidia.com/mig-profile": "1g.5gb"})

    [warning] = decided(wrong).warnings

    assert "request nvidia.com/gpumem with the annotation nvidia.com/vgpu-mode: mig" in warning
    assert decided(wrong).changes == ()


NV = "nvidia.com/container.main."
ANNOTATED: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    **{
        f"{prefix}gpu-fraction: {value}": ({f"{prefix}gpu-fraction": value}, {"memory_percent": 50})
        for prefix in ("", "run.ai/", "runai/", "kai.scheduler/")
        for value in ("0.5", "50%")
    },
    "all of a GPU": ({"run.ai/gpu-fraction": "1.0"}, {"memory_percent": 100}),
    "two GPUs": ({"gpu-fraction": "2"}, {"gpus": 2}),
    "an eighth": ({"gpu-fraction": "0.125"}, {"memory_percent": 13}),
    "a memory": ({"gpu-memory": "2000"}, {"memory_units": 2000}),
    "a memory with a prefix": ({"run.ai/gpu-memory": "2000"}, {"memory_units": 2000}),
    "a quantity": ({"run.ai/gpu-memory": "4Gi"}, {"memory_units": 4096}),
    "a decimal quantity": ({"run.ai/gpu-memory": "4200M"}, {"memory_units": 4006}),
    "of two GPUs": (
        {"run.ai/gpu-fraction": "0.5", "run.ai/gpu-fraction-num-devices": "2"},
        {"gpus": 2, "memory_percent": 50},
    ),
    "of a container": (
        {f"{NV}gpu-memory.request": "2Gi", f"{NV}gpu-compute.request": "0.3"},
        {"memory_units": 2048, "cores_percent": 30},
    ),
}
"""Annotations of KAI and Run:ai, and what they stand for, in pods for other schedulers."""


@pytest.mark.parametrize(("notes", "part"), ANNOTATED.values(), ids=ANNOTATED.keys())
def test_annotations_for_another_scheduler_lead_to_the_same_part_of_a_gpu(
    notes: dict[str, str], part: dict[str, int]
) -> None:
    followed = follow(of({}, notes=notes))

    [container] = followed.request.containers
    assert {name: getattr(container, name) for name in part} == part
    assert container.gpus == part.get("gpus", 1)
    assert len(followed.hints) == 1


@pytest.mark.parametrize("case", ["run.ai/gpu-fraction: 0.5", "a memory", "of a container"])
def test_annotations_beside_a_whole_gpu_lead_to_the_part_of_it(case: str) -> None:
    notes, part = ANNOTATED[case]

    followed = follow(of({"nvidia.com/gpu": "1"}, notes=notes))

    [container] = followed.request.containers
    assert {name: getattr(container, name) for name in part} == part


def test_a_label_of_run_ai_leads_to_the_same_part_of_a_gpu() -> None:
    followed = follow(of({}, labels={"run.ai/gpu-fraction": "0.5"}))

    assert [part.memory_percent for part in followed.request.containers] == [50]


@pytest.mark.parametrize("key", ["run.ai/gpu-fraction", "runai/gpu-fraction"])
def test_a_prefix_is_removed_where_the_annotation_is_read(key: str) -> None:
    written = of({}, notes={key: "0.5"}, schedulerName="kai-scheduler")

    [hint] = find_unread(reviewed(written), "")

    assert hint.text == f"annotation {key} has no effect: write gpu-fraction"
    patched = jsonpatch.apply_patch(written, msgspec.to_builtins(json_patch(written, hint.changes)))
    assert patched["metadata"]["annotations"] == {"gpu-fraction": "0.5"}


def test_pods_for_run_ais_own_scheduler_are_not_warned_of_its_words() -> None:
    written = of({}, notes={"gpu-fraction": "0.5"}, schedulerName="runai-scheduler")

    assert list(find_unread(reviewed(written), "")) == []


@pytest.mark.parametrize("served", ["nvidia.com/gpu", "volcano.sh/vgpu-number"])
@pytest.mark.parametrize(
    "limits", [NVIDIA, VGPU, KOORDINATOR, TENCENT, {"volcano.sh/gpu-number": "1"}]
)
def test_a_pod_in_words_that_no_node_serves_gets_those_that_are_served(
    served: str, limits: Limits
) -> None:
    followed = follow(of(limits), index=serving(served))

    assert served in followed.request.triggers
    [before] = follow(of(limits)).request.containers
    [after] = followed.request.containers
    assert (before.gpus, before.cores_percent) == (after.gpus, after.cores_percent)
    assert before.wants_all_memory == after.wants_all_memory
    assert (served in limits) is (not followed.hints)
