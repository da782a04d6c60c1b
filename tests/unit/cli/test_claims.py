"""Leases of ResourceClaims in the audit and in `explain`."""

from dataclasses import replace

from msgspec import structs

from shared.model.claim import LEASED
from shared.model.events.claim_events import AllocatedClaim
from shared.model.lease import ClaimAllocation, Lease
from shared.model.names import PodUid
from tests.support.audit import GPU, account, facts, found, lease, pod, share
from tests.support.binder.world import allocated, on
from tests.support.snapshots import cluster_of, explained


def claimed(name: str = "c", *consumers: str) -> tuple[AllocatedClaim, Lease]:
    claim = allocated(name, on(GPU, 3_000, request="gpu", share_id="s1"), node="node-0")
    held = structs.replace(
        lease(name, structs.replace(share(), container="gpu", share_id="s1")),
        resources={},
        claim=ClaimAllocation(generation="g1", consumers=tuple(map(PodUid, consumers))),
    )
    return replace(claim, answer=LEASED), held


def test_a_claim_with_its_lease_has_no_differences() -> None:
    claim, held = claimed()

    assert found(replace(facts(account(held)), claims=(claim,))) == []
    assert found(facts(account(held))) == [], "claims that were not read are not compared"


def test_a_claim_that_is_answered_needs_a_lease() -> None:
    claim, _ = claimed()

    sound = replace(facts(account()), claims=(claim,))

    assert found(sound) == [("S3", "it is answered as leased and holds no lease")]
    assert found(replace(sound, claims=(replace(claim, answer=""),))) == []


def test_a_lease_of_another_share_than_the_allocated_one_is_found() -> None:
    claim, held = claimed()
    [device] = claim.devices
    moved = replace(claim, devices=(replace(device, share_id="s2"),))

    [(invariant, text)] = found(replace(facts(account(held)), claims=(moved,)))

    assert invariant == "S7"
    assert "('gpu', 'gpu-0', 's2')" in text


def test_a_lease_without_an_allocation_is_found() -> None:
    _, held = claimed()

    [(invariant, text)] = found(replace(facts(account(held)), claims=()))

    assert invariant == "P2"
    assert text == "it has no allocation and its lease is bound, version 0"


def test_a_pod_is_explained_by_the_lease_of_its_claim() -> None:
    consumer, other = pod("p"), pod("q")
    _, held = claimed("c", consumer.pod, other.pod)

    explanation = explained(consumer, cluster_of(account(held)))

    assert explanation.verdict == "running"
    assert "claim       default/c, which 2 pods use" in explanation.lines
    assert any(line.startswith("request     gpu: 3000 MiB") for line in explanation.lines)
