"""Pods with ResourceClaims are evicted like others: their share is free once the lease ends."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shared.model.events.request_reply import DryRunRequest
from shared.model.leases.lease import ClaimAllocation
from shared.model.leases.ledger import Reservation, ReservedLease, waits_for_kube_scheduler
from shared.model.names import PREEMPTIBLE, Namespace, NodeName, PodUid
from shared.model.requests.placement import Placement
from tests.support.placer.ledger import share
from tests.support.planner.scene import Scene, waiting_pod

CLAIM = PodUid("uid-of-claim")


async def claim_of_two(at: Scene, labels: Mapping[str, str] | None = None) -> None:
    """Two pods of namespace `a`, whose budget is used up, that share the GPU of one claim."""
    consumers = []
    for name, own in (("old-0", labels or {}), ("old-1", {})):
        made = await at.pod(name, "a", spec={}, labels=dict(own))
        uid = PodUid(made["metadata"]["uid"])
        await at.kube.bind_pod("a", name, uid, "a", {})
        consumers.append(uid)
    place = Placement(node=NodeName("a"), shares=(share("a", 0, mib=16_000),))
    wanted = Reservation(
        pod=CLAIM,
        namespace=Namespace("a"),
        name="claim",
        candidates=(place,),
        claim=ClaimAllocation(generation="1", consumers=tuple(sorted(consumers))),
    )
    [outcome] = await at.ledger.reserve([wanted], now=at.clock.now() - 3600, ttl_s=1e6)
    assert isinstance(outcome, ReservedLease)
    await at.ledger.bind([outcome.lease])
    await at.save_budget("a")


async def test_all_pods_of_a_claim_are_evicted_and_its_share_is_handed_over(at: Scene) -> None:
    await claim_of_two(at)
    pod = await at.waiting("new", mib=16_000)
    binder = at.binder()

    await at.evict(binder)
    assert [await at.is_deleting(f"old-{n}") for n in range(2)] == [True, True]
    assert await at.steps(binder, 2) == []  # the claim still has its lease

    await at.ledger.release([CLAIM], reason="it has lost its allocation")
    [chosen] = await binder.preempt()

    assert chosen.lease.pod == pod
    assert sorted(each.name for each in await at.evictions()) == ["old-0", "old-1"]


async def test_a_claim_that_a_protected_pod_uses_stays(at: Scene) -> None:
    await claim_of_two(at, {PREEMPTIBLE: "false"})
    pod = await at.waiting("new", mib=16_000)
    binder = at.binder()

    await at.steps(binder, 2)
    dry_run = await binder.dry_run(DryRunRequest(pod=pod))

    assert await at.stages() == []
    assert dry_run.plan is None
    assert ("a/old-0", "it is labelled as not preemptible") in [
        (each.pod, each.reason) for each in dry_run.protected
    ]


async def test_no_pod_is_evicted_for_one_that_waits_for_a_claim(at: Scene) -> None:
    old = await at.running("old", mib=16_000)
    made = await at.pod("claiming", "b", spec={"resourceClaims": [{"name": "gpu"}]})
    pod = PodUid(made["metadata"]["uid"])
    field = "spec.resourceClaims[0]"
    queued = waiting_pod(pod, name="claiming", gpus=0, priority=1_000, by_kube_scheduler=True)
    queued = replace(queued, handed_over=field)
    refused = waits_for_kube_scheduler(queued, "1 cannot allocate all claims", at.clock.now())
    await at.ledger.waiting_pods.hand_over([refused])
    binder = at.binder()

    await at.steps(binder, 3)
    dry_run = await binder.dry_run(DryRunRequest(pod=pod))

    assert await at.stages() == []
    assert not await at.is_deleting(old.name)
    assert dry_run.waits
    assert "may choose other GPUs than those that evictions would free" in dry_run.reason

    # One of the same priority that requests its GPU by a resource name gets it.
    await at.waiting("urgent", mib=16_000, priority=1_000)
    at.clock.advance(5)  # the planner looks again
    await at.evict(binder)
    assert await at.is_deleting(old.name)


@pytest.mark.parametrize("most", [1, 2])
async def test_each_pod_of_a_claim_counts_for_the_limits(at: Scene, most: int) -> None:
    await claim_of_two(at)
    await at.waiting("new", mib=16_000)

    await at.binder(preemption_per_minute=most).preempt()

    assert len(await at.stages()) == (most == 2)
