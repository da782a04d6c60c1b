"""ResourceClaims: what of them is ours, and the events that follow from their changes."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from services.watcher.service import ClaimTracker
from shared.kubernetes.resource_claims import ApiResourceClaim, allocated_claim
from shared.model.claim import LEASED, REFUSED
from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedDevice, ClaimAllocated, ClaimDeallocated
from tests.support.binder.world import allocated, on
from tests.support.placer.ledger import uuid

GPU = uuid("a", 0)
RESULT = {
    "request": "gpu",
    "driver": "gpu.leasehold.dev",
    "pool": "node-a",
    "device": "gpu-a",
    "shareID": "9cbf540b",
    "consumedCapacity": {"memory": "30000Mi", "cores": "50", "slots": "1"},
}


def parsed(*results: dict[str, Any], **status: Any) -> Any:
    allocation = {
        "devices": {"results": list(results)},
        "allocationTimestamp": "2031-05-01T10:00:00Z",
    }
    claim = {
        "metadata": {"name": "c", "namespace": "ns", "uid": "u", "resourceVersion": "7"},
        "status": {"allocation": allocation, **status},
    }
    return allocated_claim(msgspec.json.decode(msgspec.json.encode(claim), type=ApiResourceClaim))


def entry(condition: str, **more: Any) -> dict[str, Any]:
    device = {"driver": "gpu.leasehold.dev", "pool": "node-a", "device": "gpu-a", **more}
    return {**device, "conditions": [{"type": condition, "status": "True"}]}


def test_an_allocation_is_read_with_what_it_consumes() -> None:
    reserved = [{"resource": "pods", "name": "p", "uid": "u2"}, {"resource": "pods", "uid": "u1"}]

    claim = parsed(RESULT, reservedFor=reserved)

    assert claim.devices == (
        AllocatedDevice(
            request="gpu",
            device="gpu-a",
            share_id="9cbf540b",
            memory_mib=30_000,
            cores_percent=50,
        ),
    )
    assert (claim.node, claim.consumers, claim.answer) == ("node-a", ("u1", "u2"), "")
    assert claim.generation == "2031-05-01T10:00:00Z gpu/gpu-a/9cbf540b"


def test_memory_is_rounded_up_and_without_capacity_it_is_the_whole_device() -> None:
    claim = parsed(
        RESULT | {"consumedCapacity": {"memory": "1048577"}}, RESULT | {"consumedCapacity": None}
    )

    assert [device.memory_mib for device in claim.devices] == [2, None]


def test_devices_of_other_drivers_and_for_administrators_take_nothing() -> None:
    other, admin = RESULT | {"driver": "gpu.nvidia.com"}, RESULT | {"adminAccess": True}

    assert parsed(other, admin) is None
    assert len(parsed(other, RESULT).devices) == 1


def test_administrative_access_is_answered_where_its_pods_wait_for_it() -> None:
    waiting = {"adminAccess": True, "bindingConditions": [LEASED], "request": "admin"}

    alone, mixed = parsed(RESULT | waiting), parsed(RESULT | waiting, RESULT)
    half = parsed(RESULT | waiting, RESULT, devices=[entry(LEASED)])
    both = parsed(RESULT | waiting, RESULT, devices=[entry(LEASED), entry(LEASED)])

    assert [len(each.devices) for each in (alone, mixed)] == [0, 1]
    assert [each.admin_devices[0].request for each in (alone, mixed)] == ["admin", "admin"]
    assert [half.answer, both.answer] == ["", LEASED]


def test_devices_of_two_nodes_cannot_be_ours() -> None:
    with pytest.raises(RequestError, match="several nodes: node-a, node-b"):
        parsed(RESULT, RESULT | {"pool": "node-b"})


def test_a_claim_is_answered_when_all_its_devices_are() -> None:
    copy = {"data": {"format": 1}}

    both = parsed(RESULT, RESULT, devices=[entry(LEASED, **copy), entry(LEASED)])
    half = parsed(RESULT, RESULT, devices=[entry(LEASED)])
    refused = parsed(RESULT, RESULT, devices=[entry(REFUSED)])
    of_another = parsed(RESULT, devices=[{**entry(LEASED), "driver": "gpu.nvidia.com"}])

    assert [each.answer for each in (both, half, refused, of_another)] == [LEASED, "", REFUSED, ""]
    assert both.lease == '{"format":1}'


def test_an_allocation_and_its_end_are_published_once() -> None:
    tracker, claim = ClaimTracker(), allocated("c", on(GPU))

    assert tracker.update(claim.claim, None) == []
    assert tracker.update(claim.claim, claim) == [ClaimAllocated(claim=claim)]
    assert tracker.update(claim.claim, replace(claim, answer=LEASED, resource_version="2")) == []
    [gone] = tracker.update(claim.claim, None)
    assert isinstance(gone, ClaimDeallocated)
    assert (gone.claim, gone.generation) == (claim.claim, "g1")
    assert tracker.update(claim.claim, None) == []


def test_a_new_allocation_ends_the_one_before() -> None:
    tracker, first = ClaimTracker(), allocated("c", on(GPU))
    second = allocated("c", on(GPU), generation="g2")
    tracker.update(first.claim, first)

    gone, new = tracker.update(first.claim, second)

    assert isinstance(gone, ClaimDeallocated)
    assert gone.generation == "g1"
    assert new == ClaimAllocated(claim=second)


def test_other_consumers_and_a_lost_answer_are_published() -> None:
    tracker, claim = ClaimTracker(), allocated("c", on(GPU))
    answered = replace(claim, answer=LEASED)
    tracker.update(claim.claim, answered)
    shared = replace(answered, consumers=("p1", "p2"))  # type: ignore[arg-type]

    assert tracker.update(claim.claim, shared) == [ClaimAllocated(claim=shared)]
    lost = replace(shared, answer="")
    assert tracker.update(claim.claim, lost) == [ClaimAllocated(claim=lost)]


def test_a_claim_without_an_answer_is_published_again() -> None:
    tracker, claim = ClaimTracker(), allocated("c", on(GPU))
    tracker.update(claim.claim, claim)

    assert tracker.resync_unanswered() == []
    assert tracker.resync_unanswered() == [ClaimAllocated(claim=claim)]
    answered = replace(claim, answer=LEASED)
    tracker.update(claim.claim, answered)
    assert tracker.resync_unanswered() == []
    assert tracker.resync() == [ClaimAllocated(claim=answered)]


@pytest.mark.parametrize("field", ["request", "device", "shareID", "pool"])
def test_an_allocation_with_a_field_that_is_too_long_is_refused(field: str) -> None:
    with pytest.raises(RequestError, match="ResourceClaim ns/c: a field is out of its bounds"):
        parsed(RESULT | {field: "x" * 318})
