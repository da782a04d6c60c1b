"""The webhook's decisions on new pods: denials name container, field, value and rule."""

import base64
import json
from typing import Any

import jsonpatch
import msgspec
import pytest

from services.webhook.admission import AdmissionDecision, AdmissionPolicy, decide
from services.webhook.admission_review import ReviewRequest, decode_request, encode_response
from services.webhook.handover import SchedulerChoice
from shared.dialects.tencent.vcuda import DENIAL
from shared.model.errors import RequestError
from tests.support.webhook.reviews import reviewed

CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
VGPU = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3000"}


NAMING = {"volumeMounts": [{"name": "v", "mountPath": "/var/run/nvidia-container-devices/all"}]}


def container(name: str = "main", **limits: Any) -> dict[str, Any]:
    resources = {"limits": limits, "requests": dict(limits)} if limits else {}
    return {"name": name, "image": "app", "resources": resources}


def gpu(name: str = "main", **more: Any) -> dict[str, Any]:
    return {**container(name, **VGPU), **more}


def pod(*containers: dict[str, Any], notes: dict[str, str] | None = None, **spec: Any) -> Any:
    meta: dict[str, Any] = {"name": "pod"} | ({"annotations": notes} if notes else {})
    return {"metadata": meta, "spec": {"containers": list(containers), **spec}}


def answer(decision: AdmissionDecision) -> Any:
    return json.loads(encode_response("u1", decision))["response"]


def decided(obj: Any, *, has_budget: bool = True, **policy: Any) -> AdmissionDecision:
    return decide(reviewed(obj, "team-a"), AdmissionPolicy(**policy), has_budget=has_budget)


def patched(obj: Any, **policy: Any) -> Any:
    decision = decided(obj, **policy)
    assert decision.allowed, decision.message
    return jsonpatch.apply_patch(obj, msgspec.to_builtins(decision.patches))


@pytest.mark.parametrize("cores", [1, 99])
def test_gpusharing_2_shares_of_a_card_are_admitted(cores: int) -> None:
    assert decided(pod(container(**{CORE: str(cores), MEMORY: "4"}))).allowed


@pytest.mark.parametrize("cores", [100, 200])
def test_gpusharing_2_whole_cards_are_admitted(cores: int) -> None:
    assert decided(pod(container(**{CORE: str(cores)}))).allowed


def test_gpusharing_2_cores_that_are_not_whole_cards_are_denied_with_their_number() -> None:
    decision = decided(pod(container("cuda", **{CORE: "150", MEMORY: "4"})))

    assert not decision.allowed
    assert 'container "cuda"' in decision.message
    assert "150" in decision.message


@pytest.mark.parametrize("one", [{CORE: "50"}, {MEMORY: "4"}])
def test_gpusharing_3_cores_or_memory_alone_are_denied_with_an_optional_vendor_message(
    one: dict[str, str],
) -> None:
    assert 'container "main"' in decided(pod(container(**one))).message
    old = decided(pod(container(**one)), vendor_messages=frozenset({"tencent"}))

    assert (old.message, old.code) == (DENIAL, 400)


@pytest.mark.parametrize("kind", ["initContainers", "containers"])
def test_gpusharing_7_requests_of_every_kind_of_container_are_read(kind: str) -> None:
    wrong = container("late", **{CORE: "150", MEMORY: "4"})
    obj = pod(container("first"))
    obj["spec"][kind] = [*obj["spec"].get(kind, []), wrong]

    decision = decided(obj)

    assert not decision.allowed
    assert 'container "late"' in decision.message


@pytest.mark.parametrize(
    "key",
    [
        "tencent.com/predicate-gpu-idx-0",
        "tencent.com/gpu-assigned",
        "scheduling.koordinator.sh/device-allocated",
        "hami.io/vgpu-devices-allocated",
        "volcano.sh/vgpu-ids-new",
    ],
)
@pytest.mark.parametrize("asking", [gpu(), container()], ids=["gpu", "none"])
def test_gpusharing_8_annotations_of_an_assignment_are_removed(key: str, asking: Any) -> None:
    kept = patched(pod(asking, notes={key: "forged", "mine": "stays"}))["metadata"]["annotations"]

    assert key not in kept
    assert kept["mine"] == "stays"


def test_koordinator_25_a_forged_allocation_is_removed_with_a_warning() -> None:
    key = "scheduling.koordinator.sh/device-allocated"
    [warning] = decided(pod(container(), notes={key: '{"gpu":[]}'})).warnings

    assert key in warning


def test_our_own_annotations_deny_the_pod() -> None:
    decision = decided(pod(gpu(), notes={"leasehold.dev/lease": "{}"}))

    assert (decision.allowed, decision.code) == (False, 403)
    assert "leasehold.dev/lease" in decision.message


def test_gpusharing_9_foreign_annotations_survive_beside_the_core_limit() -> None:
    asking = container(**{CORE: "50", MEMORY: "15"})
    notes = patched(pod(asking, notes={"mine": "stays"}))["metadata"]["annotations"]

    assert notes == {"mine": "stays", "tencent.com/vcuda-core-limit": "50"}
    assert patched(pod(asking))["metadata"]["annotations"] == {"tencent.com/vcuda-core-limit": "50"}


def test_gpusharing_9_a_core_limit_set_by_the_user_stays() -> None:
    asking = container(**{CORE: "50", MEMORY: "15"})
    given = {"tencent.com/vcuda-core-limit": "80"}

    assert patched(pod(asking, notes=given))["metadata"]["annotations"] == given


def test_gpusharing_9_only_the_creation_of_pods_is_reviewed() -> None:
    pods = {"group": "", "version": "v1", "resource": "pods"}

    def request(**fields: Any) -> ReviewRequest:
        review = {"kind": "AdmissionReview", "request": {"uid": "u1", "resource": pods, **fields}}
        return decode_request(json.dumps(review).encode())

    assert request(operation="CREATE").is_new_pod
    assert not request(operation="UPDATE").is_new_pod
    assert not request(operation="CREATE", subResource="binding").is_new_pod
    assert not request(operation="CREATE", resource={**pods, "resource": "jobs"}).is_new_pod


def test_gpusharing_18_a_container_called_sidecar_is_a_container() -> None:
    wrong = container("gpu-sidecar", **{CORE: "150", MEMORY: "4"})

    assert not decided(pod(gpu(), wrong)).allowed
    assert decided(pod(gpu(), container("gpu-sidecar"))).allowed


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (pod(gpu(env=[{"name": "LD_PRELOAD", "value": ""}])), "variable LD_PRELOAD"),
        (
            pod(gpu(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {}}}])),
            "variable NVIDIA_VISIBLE_DEVICES",
        ),
        (
            pod(gpu(env=[{"name": "CUDA_DEVICE_ORDER", "value": "FASTEST_FIRST"}])),
            "variable CUDA_DEVICE_ORDER",
        ),
        (
            pod(gpu(env=[{"name": "CUDA_DEVICE_MEMORY_LIMIT_0", "value": "9g"}])),
            "variable CUDA_DEVICE_MEMORY_LIMIT_0",
        ),
        (
            pod(gpu(env=[{"name": "LD_LIBRARY_PATH", "value": "/a:/usr/local/vgpu"}])),
            "LD_LIBRARY_PATH contains /usr/local/vgpu",
        ),
        (
            pod(gpu(env=[{"name": "LD_LIBRARY_PATH", "valueFrom": {"configMapKeyRef": {}}}])),
            "LD_LIBRARY_PATH uses valueFrom",
        ),
        (pod(gpu(envFrom=[{"configMapRef": {"name": "paths"}}])), "envFrom without a prefix"),
        (
            pod(gpu(envFrom=[{"prefix": "LD_", "configMapRef": {"name": "preloads"}}])),
            "envFrom with prefix LD_",
        ),
        (pod(gpu(envFrom=[{"configMapRef": {"name": "settings"}}])), "give it a prefix"),
        (pod(gpu(envFrom=[{"secretRef": {"name": "token"}}])), "valueFrom"),
        (
            pod(gpu(envFrom=[{"prefix": "CUDA_DEVICE_", "configMapRef": {"name": "plain"}}])),
            "prefix CUDA_DEVICE_",
        ),
        (pod(gpu(), nodeName="n1"), "nodeName is set to n1"),
        (
            pod(gpu(), volumes=[{"name": "v", "hostPath": {"path": "/dev/nvidia0"}}]),
            "volume v: hostPath /dev/nvidia0",
        ),
        (
            pod(gpu(), volumes=[{"name": "v", "hostPath": {"path": "/usr//local/vgpu/x"}}]),
            "volume v: hostPath /usr//local/vgpu/x",
        ),
        (pod(gpu(), volumes=[{"name": "v", "hostPath": {"path": "/"}}]), "volume v: hostPath /"),
        (
            pod(gpu(), container("side") | {"securityContext": {"privileged": True}}),
            "container side is privileged",
        ),
        (
            pod(gpu("a"), gpu("b", env=[{"name": "LD_PRELOAD", "value": "x"}])),
            "container b: variable LD_PRELOAD",
        ),
        (pod(gpu(), container("side") | NAMING), "container side: a mount at /var/run/nvidia-con"),
        (pod(container() | NAMING), "would select devices in the container runtime"),
    ],
)
def test_what_would_let_a_pod_exceed_its_limits_is_denied(obj: Any, message: str) -> None:
    decision = decided(obj)

    assert (decision.allowed, decision.code) == (False, 403)
    assert message in decision.message


@pytest.mark.parametrize(
    "obj",
    [
        pod(gpu(env=[{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}])),
        pod(gpu(env=[{"name": "CUDA_DEVICE_ORDER", "value": "PCI_BUS_ID"}])),
        pod(gpu(env=[{"name": "CUDA_DEVICE_MAX_CONNECTIONS", "value": "1"}])),
        pod(gpu(env=[{"name": "NVIDIA_API_KEY", "valueFrom": {"secretKeyRef": {}}}])),
        pod(gpu(envFrom=[{"prefix": "APP_", "configMapRef": {"name": "plain"}}])),
        pod(gpu(envFrom=[{"prefix": "APP_", "secretRef": {"name": "token"}}])),
        pod(gpu(), volumes=[{"name": "v", "hostPath": {"path": "/data/models"}}]),
        pod({**container(), "env": [{"name": "LD_PRELOAD", "value": "x.so"}]}, nodeName="n1"),
    ],
)
def test_what_does_not_affect_the_limits_is_admitted(obj: Any) -> None:
    assert decided(obj).allowed


def test_the_operator_may_allow_sources_of_variables_where_cdi_passes_devices() -> None:
    assert decided(
        pod(gpu(envFrom=[{"secretRef": {"name": "token"}}])), allow_env_from=True
    ).allowed


def test_containers_without_a_request_see_no_device() -> None:
    side = container("side") | {"env": [{"name": "A", "value": "b"}]}
    spec = patched(pod(gpu(), side, container("other")))["spec"]

    assert spec["containers"][1]["env"] == [
        {"name": "A", "value": "b"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},
    ]
    assert spec["containers"][2]["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert "env" not in spec["containers"][0]


@pytest.mark.parametrize(
    ("more", "seen"),
    [
        ({"image": "nvcr.io/nvidia/pytorch:24.05"}, "void"),
        ({"image": "docker.io/nvidia/cuda:12.4.1-base"}, "void"),
        ({"image": "registry/team/cuda-tools"}, "void"),
        ({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}, "void"),
        ({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {}}}]}, "void"),
        ({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}]}, "none"),
        ({"image": "nginx"}, None),
    ],
)
def test_a_pod_without_a_request_sees_no_device_whatever_its_image_sets(
    more: dict[str, Any], seen: str | None
) -> None:
    spec = patched(pod(container("one"), {**container("main"), **more}))["spec"]

    assert "env" not in spec["containers"][0]
    values = [each.get("value") for each in spec["containers"][1].get("env", ())]
    assert (values[-1] if values else None) == seen, "the last of a name takes effect"


@pytest.mark.parametrize(
    ("given", "becomes"), [("default-scheduler", "leasehold"), ("volcano", "volcano")]
)
def test_a_gpu_pod_of_the_default_scheduler_gets_the_scheduler_leasehold(
    given: str, becomes: str
) -> None:
    schedulers = SchedulerChoice(served=frozenset({"leasehold", "volcano"}))
    spec = patched(pod(gpu(), schedulerName=given), schedulers=schedulers)["spec"]

    assert spec["schedulerName"] == becomes


def test_a_pod_of_a_foreign_scheduler_is_left_alone_with_a_warning() -> None:
    decision = decided(pod(gpu(), schedulerName="theirs", nodeName="n1"))

    assert (decision.allowed, decision.patches) == (True, ())
    assert "theirs" in decision.warnings[0]


def test_koordinator_2_the_shorthand_becomes_core_ratio_and_a_card_count() -> None:
    spec = patched(pod(container(**{"koordinator.sh/gpu": "50"})))["spec"]

    expected = {
        "koordinator.sh/gpu-core": "50",
        "koordinator.sh/gpu-memory-ratio": "50",
        "koordinator.sh/gpu.shared": "1",
    }
    assert spec["containers"][0]["resources"] == {"limits": expected, "requests": expected}


def test_hamis_count_is_added_where_only_memory_is_requested() -> None:
    spec = patched(pod(container(**{"nvidia.com/gpumem": "3000"})))["spec"]

    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_trigger_is_added_to_limits_and_requests_of_containers_with_gpu_memory() -> None:
    memory = container("one", **{"volcano.sh/gpu-memory": "1024"})
    spec = patched(pod(memory))["spec"]

    expected = {"volcano.sh/gpu-memory": "1024", "leasehold.dev/share": "1"}
    assert spec["containers"][0]["resources"] == {"limits": expected, "requests": expected}


@pytest.mark.parametrize(("has_budget", "name"), [(True, "in"), (False, "out")])
def test_the_priority_class_follows_the_budget_and_removes_derived_fields(
    has_budget: bool, name: str
) -> None:
    classes = {"in_budget_class": "in", "out_of_budget_class": "out"}
    obj = pod(gpu(), priority=0, preemptionPolicy="PreemptLowerPriority")
    decision = decided(obj, has_budget=has_budget, **classes)
    spec = jsonpatch.apply_patch(obj, msgspec.to_builtins(decision.patches))["spec"]

    assert spec["priorityClassName"] == name
    assert "priority" not in spec
    assert "preemptionPolicy" not in spec


def test_a_priority_class_set_by_the_user_stays() -> None:
    spec = patched(pod(gpu(), priorityClassName="mine", priority=7), in_budget_class="in")["spec"]

    assert (spec["priorityClassName"], spec["priority"]) == ("mine", 7)


def test_a_configured_runtime_class_is_set_unless_the_pod_has_one() -> None:
    assert patched(pod(gpu()), runtime_class="nvidia")["spec"]["runtimeClassName"] == "nvidia"
    kept = patched(pod(gpu(), runtimeClassName="kata"), runtime_class="nvidia")["spec"]
    assert kept["runtimeClassName"] == "kata"


def test_a_pod_without_a_request_is_not_touched() -> None:
    decision = decided(pod(container()))

    assert (decision.allowed, decision.patches, decision.warnings) == (True, (), ())


def test_a_response_has_uid_patch_and_warnings() -> None:
    notes = {"volcano.sh/vgpu-ids-new": "x"}
    response = answer(decided(pod(gpu(), notes=notes)))

    operations = json.loads(base64.b64decode(response["patch"]))
    assert (response["uid"], response["allowed"], response["patchType"]) == (
        "u1",
        True,
        "JSONPatch",
    )
    assert operations[0] == {
        "op": "remove",
        "path": "/metadata/annotations/volcano.sh~1vgpu-ids-new",
    }
    assert len(response["warnings"]) == 1


def test_a_denial_has_its_reason_and_code() -> None:
    response = answer(decided(pod(gpu(), nodeName="n1")))

    assert (response["allowed"], response["status"]["code"]) == (False, 403)
    assert "patch" not in response


@pytest.mark.parametrize("body", [None, [], {"kind": "Pod"}, {"kind": "AdmissionReview"}])
def test_a_body_that_is_not_a_review_is_refused(body: Any) -> None:
    with pytest.raises(RequestError, match="AdmissionReview"):
        decode_request(json.dumps(body).encode())


@pytest.mark.parametrize("obj", [{}, {"spec": {"containers": [[]]}}, {"spec": []}])
def test_an_object_that_is_not_a_pod_is_refused(obj: Any) -> None:
    with pytest.raises(RequestError, match="is not a pod"):
        reviewed(obj, "ns")
