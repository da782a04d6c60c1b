"""The webhook's decisions on new pods: denials name container, field, value and rule."""

import base64
import difflib
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from services.webhook.admission import AdmissionDecision
from services.webhook.admission_review import ReviewRequest, decode_request, encode_response
from services.webhook.largest_device import STALE_S, LargestDevice
from services.webhook.pod_admission import DeviceMaximum, SchedulerChoice
from services.webhook.settings import WebhookSettings
from shared.dialects.tencent.vcuda import DENIAL
from shared.model.budgets.quota import Quota
from shared.model.errors import RequestError
from shared.model.events.pod_events import LargestDeviceReported
from shared.model.names import Namespace
from tests.support.dialects.builders import koord
from tests.support.webhook.reviews import applied, budget, container, decided, gpu, pod, reviewed

CORE = "tencent.com/vcuda-core"
MEMORY = "tencent.com/vcuda-memory"


def answer(decision: AdmissionDecision) -> Any:
    return json.loads(encode_response("u1", decision))["response"]


def patched(obj: Any, **policy: Any) -> Any:
    return applied(obj, decided(obj, **policy))


@pytest.mark.parametrize("one", [{CORE: "50"}, {MEMORY: "4"}])
def test_gpusharing_3_cores_or_memory_alone_are_denied_with_an_optional_vendor_message(
    one: dict[str, str],
) -> None:
    assert 'container "main"' in decided(pod(container("main", one))).message
    old = decided(pod(container("main", one)), vendor_messages=frozenset({"tencent"}))

    assert (old.message, old.code) == (DENIAL, 400)


@pytest.mark.parametrize("kind", ["initContainers", "containers"])
def test_gpusharing_7_requests_of_every_kind_of_container_are_read(kind: str) -> None:
    wrong = container("late", {CORE: "150", MEMORY: "4"})
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
        "leasehold.dev/lease",
        "leasehold.dev/of-a-later-version",
    ],
)
@pytest.mark.parametrize("asking", [gpu(), container()], ids=["gpu", "none"])
def test_gpusharing_8_annotations_of_an_assignment_are_removed(key: str, asking: Any) -> None:
    obj = pod(asking, notes={key: "forged", "mine": "stays"})
    decision = decided(obj)
    kept = applied(obj, decision)["metadata"]["annotations"]

    assert key not in kept
    assert kept["mine"] == "stays"
    assert any(key in text for text in decision.warnings)


def test_a_misspelled_annotation_of_leasehold_is_denied_with_the_one_that_was_meant() -> None:
    decision = decided(pod(gpu(), notes={"leasehold.dev/max-runtime": "2h"}))

    assert not decision.allowed
    assert decision.message.endswith("did you mean leasehold.dev/max-run-time?")


def test_few_and_short_annotations_are_compared_with_those_of_authors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []

    def compare(word: str, *_: object, **_named: object) -> list[str]:
        compared.append(word)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", compare)
    many = {f"leasehold.dev/{number:05}": "" for number in range(9_000)}
    decision = decided(pod(gpu(), notes={**many, f"leasehold.dev/{'0' * 100_000}": ""}))

    assert decision.allowed
    assert 0 < len(compared) <= 100
    assert max(map(len, compared)) < 100


def test_gpusharing_9_foreign_annotations_survive_beside_the_core_limit() -> None:
    asking = container("main", {CORE: "50", MEMORY: "15"})
    notes = patched(pod(asking, notes={"mine": "stays"}))["metadata"]["annotations"]

    assert notes == {"mine": "stays", "tencent.com/vcuda-core-limit": "50"}
    assert patched(pod(asking))["metadata"]["annotations"] == {"tencent.com/vcuda-core-limit": "50"}


def test_gpusharing_9_a_core_limit_set_by_the_user_stays() -> None:
    asking = container("main", {CORE: "50", MEMORY: "15"})
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
    wrong = container("gpu-sidecar", {CORE: "150", MEMORY: "4"})

    assert not decided(pod(gpu(), wrong)).allowed
    assert decided(pod(gpu(), container("gpu-sidecar"))).allowed


@pytest.mark.parametrize(
    ("given", "becomes"), [("default-scheduler", "leasehold"), ("volcano", "volcano")]
)
def test_a_gpu_pod_of_the_default_scheduler_gets_the_scheduler_leasehold(
    given: str, becomes: str
) -> None:
    schedulers = SchedulerChoice(served=frozenset({"leasehold", "volcano"}))
    spec = patched(pod(gpu(), schedulerName=given), schedulers=schedulers)["spec"]

    assert spec["schedulerName"] == becomes


NAMES = WebhookSettings(resource_names=("nvidia.com/vgpu=nvidia.com/gpu",)).policy.resource_names


def test_a_custom_resource_name_is_replaced_by_the_one_that_it_stands_for() -> None:
    obj = pod(container("main", {"nvidia.com/vgpu": "2", "nvidia.com/gpumem": "3000"}))

    spec = patched(obj, resource_names=NAMES)["spec"]

    amounts = {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "3000"}
    assert spec["containers"][0]["resources"] == {"limits": amounts, "requests": amounts}
    assert spec["schedulerName"] == "leasehold"


def test_both_names_of_one_resource_are_denied() -> None:
    both = container("main", {"nvidia.com/vgpu": "2", "nvidia.com/gpu": "1"})

    decision = decided(pod(both), resource_names=NAMES)

    assert "nvidia.com/vgpu is another name of nvidia.com/gpu here" in decision.message
    assert decision.code == 422


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("nvidia.com/vgpu", "must be OTHER=NAME"),
        ("nvidia.com/vgpu=nvidia.com/gpus", "nvidia.com/gpus is no resource of GPUs"),
        ("nvidia.com/gpumem=nvidia.com/gpu", "nvidia.com/gpumem is a resource itself"),
        ("example.com/gpu=nvidia.com/gpu", "begin with one of volcano.sh/"),
    ],
)
def test_an_invalid_custom_resource_name_is_refused_at_the_start(given: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        _ = WebhookSettings(resource_names=(given,)).policy


@pytest.mark.parametrize(
    "fields", [{"labels": {"hami.io/webhook": "ignore"}}, {"schedulerName": "theirs"}], ids=str
)
def test_a_pod_that_is_left_alone_sees_only_what_a_device_plugin_gives_it(
    fields: dict[str, Any],
) -> None:
    amounts = {"main": {"nvidia.com/gpu": "1"}, "amount": {"volcano.sh/vgpu-memory": "1000"}}
    containers = [
        container(name, limits, env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])
        for name, limits in amounts.items()
    ]
    obj = pod(*containers, **fields)

    decision = decided(obj)

    spec = applied(obj, decision)["spec"]
    assert spec.get("schedulerName") == fields.get("schedulerName")
    main, other = (each["env"][-1]["value"] for each in spec["containers"])
    assert (main, other) == ("all", "void")
    assert "node agents refuse containers without a lease" in decision.warnings[0]


@pytest.mark.parametrize(
    ("asked", "completed"),
    [
        ({"koordinator.sh/gpu": "50"}, koord(core="50", ratio="50", shared="1")),
        (
            {"nvidia.com/gpumem": "3000"},
            {"nvidia.com/gpumem": "3000", "nvidia.com/gpu": "1"},
        ),
        (
            {"volcano.sh/gpu-memory": "1024"},
            {"volcano.sh/gpu-memory": "1024", "leasehold.dev/share": "1"},
        ),
    ],
)
def test_koordinator_2_amounts_are_completed_in_limits_and_requests(
    asked: dict[str, str], completed: dict[str, str]
) -> None:
    spec = patched(pod(container("main", asked)))["spec"]

    assert spec["containers"][0]["resources"] == {"limits": completed, "requests": completed}


@pytest.mark.parametrize(("lease_class", "name"), [("guaranteed", "in"), ("reclaimable", "out")])
def test_the_priority_class_follows_the_budget_and_removes_derived_fields(
    lease_class: str, name: str
) -> None:
    classes = {"in_budget_class": "in", "out_of_budget_class": "out"}
    obj = pod(gpu(), priority=0, preemptionPolicy="PreemptLowerPriority")
    spec = patched(obj, budget=budget(lease_class), **classes)["spec"]

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


MOST = "leasehold.dev/max-run-time"
EXPECTED = "leasehold.dev/expected-run-time"
LIMITS = Quota(namespace=Namespace("team-a"), default_run_s=600, max_run_s=7200)


@pytest.mark.parametrize(
    ("notes", "deadline", "quota", "written"),
    [
        ({}, None, None, None),
        ({MOST: "2h"}, None, None, 7200),
        ({MOST: "2h"}, 60, None, 60),
        ({MOST: "1m"}, 7200, LIMITS, 60),
        ({}, None, LIMITS, 600),
        ({}, None, replace(LIMITS, default_run_s=None), 7200),
        ({}, 7200, LIMITS, 7200),
    ],
)
def test_the_kubelet_enforces_the_shortest_run_time_that_is_written(
    notes: dict[str, str], deadline: int | None, quota: Quota | None, written: int | None
) -> None:
    spec: Any = {} if deadline is None else {"activeDeadlineSeconds": deadline}

    made = patched(pod(gpu(), notes=notes, **spec), quota=quota)

    assert made["spec"].get("activeDeadlineSeconds") == written


@pytest.mark.parametrize("kind", ["DaemonSet", "Node"])
def test_pods_that_run_on_get_no_run_time_from_their_namespace(kind: str) -> None:
    obj = pod(gpu())
    obj["metadata"]["ownerReferences"] = [{"kind": kind, "name": "x", "controller": True}]

    assert "activeDeadlineSeconds" not in patched(obj, quota=LIMITS)["spec"]
    assert "activeDeadlineSeconds" not in patched(pod(container()), quota=LIMITS)["spec"]


@pytest.mark.parametrize(
    ("notes", "deadline", "fault"),
    [
        ({MOST: "2 days"}, None, "annotation leasehold.dev/max-run-time: '2 days' is not a"),
        ({EXPECTED: "soon"}, None, "annotation leasehold.dev/expected-run-time: 'soon' is not a"),
        ({MOST: "3h"}, None, "run-time lets the pod run for 3h, and the GPUQuota of namespace "
         "team-a allows 2h at most"),
        ({}, 7290, "spec.activeDeadlineSeconds lets the pod run for 2h1m30s"),
    ],
)  # fmt: skip
def test_a_run_time_that_is_malformed_or_too_long_is_denied_with_what_is_allowed(
    notes: dict[str, str], deadline: int | None, fault: str
) -> None:
    spec: Any = {} if deadline is None else {"activeDeadlineSeconds": deadline}

    decision = decided(pod(gpu(), notes=notes, **spec), quota=LIMITS)

    assert fault in decision.message
    assert decision.code == 422


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


CARD = DeviceMaximum(memory_mib=16_384, memory_units=1638)
"""One device of 16 GiB, and one on a node that counts in units of 10 MiB."""
KOORDINATOR = {"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-core": "50"}


def asked(
    limits: dict[str, str], largest: DeviceMaximum | None = CARD, **policy: Any
) -> AdmissionDecision:
    return decided(pod(container("log"), container("cuda", limits)), largest=largest, **policy)


FITTING = {
    "blocks": {CORE: "50", MEMORY: "64"},
    "units": {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "1638"},
    "bytes": {**KOORDINATOR, "koordinator.sh/gpu-memory": "16Gi"},
    "percent": {**KOORDINATOR, "koordinator.sh/gpu-memory-ratio": "100"},
    "hami": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1638"},
    "whole": {CORE: "200", MEMORY: "4096"},
    "all": {"nvidia.com/gpu": "2"},
}
TOO_LARGE = {
    "blocks": ({CORE: "50", MEMORY: "65"}, f"{MEMORY}=65) requests 16640 MiB of one GPU"),
    "units": (
        {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "1639"},
        "(volcano.sh/vgpu-memory=1639, volcano.sh/vgpu-number=1) requests 1639 units of memory of "
        "one GPU, and the largest GPU of the cluster has 1638 units of memory (16384 MiB)",
    ),
    "bytes": (
        {**KOORDINATOR, "koordinator.sh/gpu-memory": str(16 * 2**30 + 1)},
        "16385 MiB of one GPU, and the largest GPU of the cluster has 16384 MiB",
    ),
    "hami": ({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1639"}, "nvidia.com/gpumem=1639"),
    "gpushare": (
        {"volcano.sh/gpu-memory": "1639"},
        "volcano.sh/gpu-memory=1639) requests 1639 units",
    ),
}


@pytest.mark.parametrize("limits", FITTING.values(), ids=FITTING)
def test_gpusharing_2_as_much_as_the_largest_device_has_is_admitted(limits: dict[str, str]) -> None:
    decision = asked(limits)

    assert (decision.allowed, decision.warnings) == (True, ()), decision.message


@pytest.mark.parametrize(("limits", "text"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_gpusharing_2_more_than_the_largest_device_has_is_denied_with_container_and_field(
    limits: dict[str, str], text: str
) -> None:
    decision = asked(limits)

    assert not decision.allowed
    assert decision.message.startswith('container "cuda" (')
    assert text in decision.message
    less = re.search(r"; set ([a-z./-]+): (\w+), or request a whole GPU$", decision.message)
    assert less is not None
    assert asked({**limits, less[1]: less[2]}).allowed
    assert asked(limits, None).allowed, "no device is known yet"


def test_an_init_container_larger_than_the_largest_device_is_denied() -> None:
    decision = decided(
        pod(initContainers=[container("cuda", TOO_LARGE["blocks"][0])]), largest=CARD
    )

    assert not decision.allowed
    assert TOO_LARGE["blocks"][1] in decision.message


def test_where_larger_requests_are_allowed_the_pod_is_admitted_with_a_warning() -> None:
    decision = asked(TOO_LARGE["blocks"][0], allow_larger_requests=True)

    assert decision.allowed
    assert any("the pod waits for a node" in text for text in decision.warnings)


def report(mib: int) -> LargestDeviceReported:
    return LargestDeviceReported(memory_mib=mib, memory_units=mib)


def test_a_device_counts_for_a_limited_time_after_its_last_report() -> None:
    largest = LargestDevice()
    assert largest.now(100.0) is None

    largest.note(report(80_000), 90.0)
    largest.note(report(80_000), 100.0)
    largest.note(report(16_000), 150.0)

    assert largest.now(100.0 + STALE_S) == DeviceMaximum(80_000, 80_000)
    assert largest.now(101.0 + STALE_S) == DeviceMaximum(16_000, 16_000)
    assert largest.now(151.0 + STALE_S) is None


def test_the_largest_units_and_the_largest_mib_may_be_of_different_devices() -> None:
    largest = LargestDevice()
    largest.note(LargestDeviceReported(memory_mib=80_000, memory_units=8_000), 1.0)
    largest.note(LargestDeviceReported(memory_mib=16_000, memory_units=16_000), 1.0)

    assert largest.now(2.0) == DeviceMaximum(memory_mib=80_000, memory_units=16_000)
