"""Pods of other schedulers that wait for claims of our devices, as the watcher publishes them."""

from typing import Any

import msgspec
import pytest
import yaml
from msgspec import structs

from services.watcher import claiming_pods
from services.watcher.claiming_pods import (
    MOST_OF_NAMESPACE,
    ClaimingPods,
    ClaimUpdate,
    requested_classes,
)
from services.watcher.pod_tracker import RESYNC_SHARDS
from shared.dialects.dialect import Rules
from shared.kubernetes.resource_claims import ApiResourceClaim, DeviceClass
from shared.kubernetes.types import ApiPod
from shared.model.bounds import check_bounds
from shared.model.events.pod_events import PodHandedOver, PodTerminated
from shared.model.names import Namespace, PodUid
from shared.model.requests.claim import CLAIMS_FIELD, DRIVER
from shared.model.requests.request import PodRequest
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_parser import PodParser
from tests.support.binder.world import allocated, on
from tests.support.placer.ledger import uuid
from tools.generate.pages import ROOT

PARSER = PodParser(frozenset({"leasehold"}), Rules())
CLASSES = ROOT / "k8s" / "components" / "dra" / "device-classes.yaml"
TEAM = Namespace("team")
BY_NAME = [{"name": "gpu", "resourceClaimName": "gpu"}]
BY_TEMPLATE = [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]
OUT_OF_GPUS = "0/3 nodes are available: 3 cannot allocate all claims."
REFUSED = {"type": "PodScheduled", "status": "False", "message": OUT_OF_GPUS}


def parsed(uid: str = "u1", status: dict[str, Any] | None = None, **spec: Any) -> ObservedPod:
    """A pod of default-scheduler that uses the claim `gpu`, as the watcher reads it."""
    raw = {
        "metadata": {"uid": uid, "name": uid, "namespace": TEAM},
        "spec": {
            "schedulerName": "default-scheduler",
            "priority": 7,
            "nodeSelector": {"zone": "a"},
            "containers": [{"name": "c", "resources": {"requests": {"cpu": "2"}}}],
            "resourceClaims": BY_NAME,
            **spec,
        },
        "status": {"conditions": [REFUSED], **(status or {})},
    }
    return PARSER.parse(msgspec.json.decode(msgspec.json.encode(raw), type=ApiPod))


def claim(name: str = "gpu", *classes: str, uid: str = "c1") -> ClaimUpdate:
    """An unallocated claim for devices of these classes, or one that was deleted."""
    return ClaimUpdate(PodUid(uid), TEAM, name, None, frozenset(classes))


OURS = claim("gpu", DRIVER)


def knowing(*claims: ClaimUpdate) -> ClaimingPods:
    pods = ClaimingPods()
    pods.update_classes({DRIVER: True, "gpu.nvidia.com": False})
    pods.update_claims(claims)
    return pods


def waiting(pods: ClaimingPods) -> list[tuple[str, str, bool]]:
    """Return the pods of the next events, with their reasons, and whether they wait no longer."""
    events = pods.update()
    assert all(isinstance(event, PodHandedOver) for event in events)
    return [
        (event.queued.name, event.reason, event.bound)
        for event in events
        if isinstance(event, PodHandedOver)
    ]


def test_a_pod_of_another_scheduler_that_waits_for_our_devices_is_published() -> None:
    pods = knowing(OURS)

    pods.observe([(parsed(), None)])
    [event] = pods.update()

    assert isinstance(event, PodHandedOver)
    assert (event.reason, event.bound) == (OUT_OF_GPUS, False)
    queued = event.queued
    assert queued.by_kube_scheduler, "no placer may place it"
    assert (queued.scheduler, queued.handed_over) == ("default-scheduler", CLAIMS_FIELD)
    assert (queued.request.priority, queued.request.resources["cpu"]) == (7, 2000)
    assert queued.request.node_requirements.selector == (("zone", "a"),)
    assert queued.request.containers == ()


def test_it_is_published_again_if_its_reason_changes_and_else_by_resyncs() -> None:
    pods = knowing(OURS)
    first = parsed()
    refused = structs.replace(first, reason="no CPU")

    pods.observe([(first, None)])
    assert waiting(pods) == [("u1", OUT_OF_GPUS, False)]
    pods.observe([(refused, first)])
    assert waiting(pods) == [("u1", "no CPU", False)]
    pods.observe([(structs.replace(refused, resource_version="9"), refused)])
    assert waiting(pods) == []

    shards = [event for shard in range(RESYNC_SHARDS) for event in pods.resync_shard(shard)]
    assert [event.pod for event in pods.published.values()] == ["u1"]
    assert len(pods.resync()) == len(shards) == 1


@pytest.mark.parametrize("classes", [(), ("gpu.nvidia.com",), ("unknown",)])
def test_a_pod_whose_claim_is_missing_or_for_other_devices_is_not_published(
    classes: tuple[str, ...],
) -> None:
    pods = knowing(*([claim("gpu", *classes)] if classes else []), claim("other", DRIVER))

    pods.observe([(parsed(), None)])

    assert waiting(pods) == []


def test_it_is_published_once_its_claim_is_there_and_not_after_that_is_deleted() -> None:
    pods = knowing()
    pods.observe([(parsed(), None)])
    assert waiting(pods) == []

    pods.update_claims([OURS])
    assert waiting(pods) == [("u1", OUT_OF_GPUS, False)]
    pods.update_claims([claim("gpu", uid="an earlier claim of the name")])
    assert waiting(pods) == []
    pods.update_claims([claim("gpu")])
    assert waiting(pods) == [("u1", OUT_OF_GPUS, True)]


def test_a_claim_is_one_of_ours_once_its_class_is_and_while_it_has_our_devices() -> None:
    pods = knowing(claim("gpu", "team-gpu"))
    pods.observe([(parsed(), None)])
    assert waiting(pods) == []

    pods.update_classes({"team-gpu": True})
    assert waiting(pods) == [("u1", OUT_OF_GPUS, False)]
    pods.update_classes({"team-gpu": False})
    assert waiting(pods) == [("u1", OUT_OF_GPUS, True)]
    pods.update_claims(
        [OURS._replace(allocation=allocated("c1", on(uuid("a", 0))), classes=frozenset())]
    )
    assert waiting(pods) == [("u1", OUT_OF_GPUS, False)]


def test_a_claim_from_a_template_is_known_by_the_status_of_its_pod() -> None:
    pods = knowing(claim("u1-gpu-x7", DRIVER))
    first = parsed(resourceClaims=BY_TEMPLATE)
    made = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "u1-gpu-x7"}]}
    second = parsed(resourceClaims=BY_TEMPLATE, status=made)

    pods.observe([(first, None)])
    assert waiting(pods) == []
    pods.observe([(second, first)])
    assert waiting(pods) == [("u1", OUT_OF_GPUS, False)]


def test_its_wait_ends_with_a_node_and_a_plan_for_it_with_the_pod() -> None:
    pods = knowing(OURS)
    bound, deleted, failed = (parsed(uid) for uid in ("u1", "u2", "u3"))
    pods.observe([(pod, None) for pod in (bound, deleted, failed)])
    pods.update()

    pods.observe(
        [
            (parsed("u1", nodeName="n"), bound),
            (None, deleted),
            (parsed("u3", {"phase": "Failed"}), failed),
        ]
    )
    [first, *others] = pods.update()

    assert isinstance(first, PodHandedOver)
    assert (first.queued.pod, first.bound) == ("u1", True)
    assert [(event.pod, event.phase) for event in others if isinstance(event, PodTerminated)] == [
        ("u2", ""),
        ("u3", "Failed"),
    ]
    assert pods.published == {}
    assert pods.resync() == []


def test_a_pod_that_its_scheduler_has_not_tried_is_published_if_that_lasts() -> None:
    pods = knowing(OURS)
    placed, ignored = (parsed(uid, {"conditions": []}) for uid in ("u1", "u2"))

    pods.observe([(placed, None), (ignored, None)])
    assert waiting(pods) == []
    pods.note_untried()
    pods.observe([(parsed("u1", nodeName="n"), placed)])
    assert waiting(pods) == []
    pods.note_untried()
    assert waiting(pods) == [("u2", "", False)]
    pods.note_untried()
    assert pods.changed == set()
    pods.observe([(parsed("u2"), ignored)])
    assert waiting(pods) == [("u2", OUT_OF_GPUS, False)]


def test_of_a_namespace_with_very_many_the_first_by_priority_and_age_are_published() -> None:
    pods = knowing(OURS)
    many = [
        structs.replace(parsed(f"u{number}"), created_at=float(number))
        for number in range(MOST_OF_NAMESPACE + 2)
    ]
    pods.observe([(pod, None) for pod in many])
    assert {name for name, _, _ in waiting(pods)} == {pod.name for pod in many[:-2]}

    urgent = parsed("urgent", priority=1000)
    pods.observe([(urgent, None)])
    assert waiting(pods) == [
        (many[-3].name, OUT_OF_GPUS, True),
        ("urgent", OUT_OF_GPUS, False),
    ]
    pods.observe([(None, many[0]), (None, many[-1])])
    assert [type(event).__name__ for event in pods.update()] == ["PodTerminated", "PodHandedOver"]
    assert len(pods.published) == MOST_OF_NAMESPACE


def test_claims_of_a_namespace_beyond_the_bound_are_not_kept_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claiming_pods, "MOST_CLAIMS_OF_NAMESPACE", 1)
    other = OURS._replace(claim=PodUid("other"), name="other")
    pods = knowing(other, OURS)
    pods.observe([(parsed("u1"), None)])

    assert waiting(pods) == []
    assert pods.room.left_out == {OURS.namespace}

    pods.update_claims([other._replace(classes=frozenset()), OURS])
    assert waiting(pods) == [("u1", OUT_OF_GPUS, False)]


def test_the_end_of_a_wait_is_repeated_unless_the_pod_waits_again() -> None:
    pods = knowing(OURS)
    first, second = parsed("u1"), parsed("u2")
    pods.observe([(first, None), (second, None)])
    pods.update()
    pods.observe([(parsed("u1", nodeName="n"), first), (parsed("u2", resourceClaims=[]), second)])
    ended = [event for event in pods.update() if isinstance(event, PodHandedOver)]

    assert pods.ended_waits.take_due() == []
    pods.observe([(second, None)])
    assert waiting(pods) == [("u2", OUT_OF_GPUS, False)]

    assert pods.ended_waits.take_due() == [event for event in ended if event.queued.name == "u1"]
    assert pods.ended_waits.take_due() == []


def test_an_event_is_small_whatever_the_author_of_a_pod_writes() -> None:
    pods = knowing(OURS)
    pod = parsed(
        schedulerName="x" * 5_000,
        nodeSelector={f"selector-{number}": "x" * 60 for number in range(1_000)},
    )
    labels = {f"label-{number}": "x" * 60 for number in range(1_000)}

    pods.observe([(structs.replace(pod, labels=labels), None)])
    [event] = pods.update()

    check_bounds(event, "the event")
    assert isinstance(event, PodHandedOver)
    assert event.queued.request == PodRequest(priority=7)
    assert len(msgspec.msgpack.encode(event)) < 1_500


@pytest.mark.parametrize(
    "pod",
    [
        parsed(resourceClaims=[]),
        parsed(schedulerName="leasehold"),
        parsed(nodeName="n"),
        parsed(schedulingGates=[{"name": "g"}]),
        parsed(status={"phase": "Succeeded"}),
    ],
    ids=["no claims", "ours", "bound", "gated", "ended"],
)
def test_of_other_pods_nothing_is_kept(pod: ObservedPod) -> None:
    pods = knowing(OURS)

    pods.observe([(pod, None)])

    assert pod.awaited is None
    assert pods.changed == set()
    assert waiting(pods) == []


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
        {"schedulingGroup": {"podGroupName": "g"}},
        {"nodeSelector": {"x" * 4000: "a" * 70_000}},
    ],
    ids=["a GPU by name", "group", "invalid"],
)
def test_no_plan_is_made_for_a_pod_that_also_waits_for_something_else(spec: Any) -> None:
    pods = knowing(OURS)

    pods.observe([(parsed(**spec), None)])
    [event] = pods.update()

    assert isinstance(event, PodHandedOver)
    assert event.queued.handed_over == ""
    assert event.queued.scheduler == "default-scheduler"
    assert event.queued.request.priority == 7


def test_the_classes_of_the_component_are_ours_and_those_of_other_drivers_are_not() -> None:
    def read(manifest: Any) -> DeviceClass:
        return msgspec.json.decode(msgspec.json.encode(manifest), type=DeviceClass)

    other = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'"
    theirs = {"spec": {"selectors": [{"cel": {"expression": other}}]}}

    assert all(read(manifest).is_ours for manifest in yaml.safe_load_all(CLASSES.read_text()))
    assert not read(theirs).is_ours
    assert not read({"spec": {}}).is_ours


def test_the_classes_of_a_claim_are_read_until_it_is_allocated() -> None:
    choices = [{"name": "a", "deviceClassName": "one"}, {"name": "b", "deviceClassName": "two"}]
    requests = [
        {"name": "gpu", "exactly": {"deviceClassName": DRIVER, "adminAccess": True}},
        {"name": "any", "firstAvailable": choices},
    ]
    manifest: dict[str, Any] = {"spec": {"devices": {"requests": requests}}}

    def classes() -> frozenset[str]:
        encoded = msgspec.json.encode(manifest)
        return requested_classes(msgspec.json.decode(encoded, type=ApiResourceClaim))

    assert classes() == {DRIVER, "one", "two"}
    manifest["status"] = {"allocation": {}}
    assert classes() == frozenset()
