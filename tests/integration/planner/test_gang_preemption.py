"""Gangs in preemption, on a real Valkey and the simulated API server: whole, or not at all."""

from typing import Any

import pytest

from shared.model.events.request_reply import DryRunRequest
from shared.model.leases.lease import Lease
from shared.model.leases.preemption import PreemptionStage
from shared.model.names import PREEMPTIBLE, PodUid
from shared.model.requests.request import Gang
from tests.support.placer.ledger import assert_sound, uses, uuid
from tests.support.planner.scene import HOUR, Replicas, Scene, starts, step

TWO_GPUS = pytest.mark.parametrize("at", [2], indirect=True)
THREE_GPUS = pytest.mark.parametrize("at", [3], indirect=True)
GANG = Gang(name="b/train", min_member=2)
OLD_GANG = Gang(name="a/old", min_member=2)


async def gang_of_two(at: Scene, gang: Gang = GANG) -> list[PodUid]:
    return [await at.waiting(f"new-{n}", mib=16_000, gang=gang) for n in range(2)]


async def gang_in_need(at: Scene, **of_first: Any) -> tuple[list[Lease], list[PodUid], Replicas]:
    """Two pods of namespace `a`, whose budget is used up, and a gang of `b` that needs both."""
    old = [await at.running("old-0", gpu=0, mib=16_000, **of_first)]
    old.append(await at.running("old-1", gpu=1, mib=16_000))
    await at.save_budget("a")
    return old, await gang_of_two(at), at.binder()


@TWO_GPUS
async def test_a_gang_gets_its_devices_all_at_once(at: Scene) -> None:
    old, pods, binder = await gang_in_need(at)

    await binder.preempt()
    assert [await at.announced_for(each.name) is not None for each in old] == [True, True]
    assert all(use.claimed_by for use in (await uses(at.ledger)).values())
    at.clock.advance(30)
    await binder.preempt()
    assert [await at.is_deleting(each.name) for each in old] == [True, True]
    await at.terminate(old[0])
    assert await at.steps(binder, 2) == []  # the other one may still run
    assert "in-exclusive-use" in await at.thief(0)

    await at.terminate(old[1])
    placements = await binder.preempt()

    assert {chosen.lease.pod for chosen in placements} == set(pods)
    assert {chosen.lease.gang for chosen in placements} == {"b/train"}
    assert {chosen.lease.shares[0].device for chosen in placements} == {uuid("a", 0), uuid("a", 1)}
    await at.ledger.bind([chosen.lease for chosen in placements])
    await binder.preempt()
    assert not await at.stages()
    assert [each.for_name for each in await at.evictions()] == ["gang train", "gang train"]
    assert "2 pods are evicted for its gang on a" in " ".join(at.reports.of("new-0"))
    await assert_sound(at.ledger)


@TWO_GPUS
async def test_placements_of_a_gang_are_published_again_until_all_pods_are_bound(
    at: Scene,
) -> None:
    old, pods, binder = await gang_in_need(at)
    await at.evict(binder)
    for each in old:
        await at.terminate(each)
    await binder.preempt()  # the placements are lost

    again = await binder.preempt()

    assert {chosen.lease.pod for chosen in again} == set(pods)
    await at.ledger.bind([again[0].lease])  # and the whole gang with it
    assert await binder.preempt() == []
    assert await at.stages() == []


@TWO_GPUS
async def test_no_pod_is_evicted_for_a_gang_of_which_a_part_would_not_start(at: Scene) -> None:
    old, pods, binder = await gang_in_need(at, labels={PREEMPTIBLE: "false"})
    before = [at.writes(each.name) for each in old]

    await at.steps(binder, 3)
    dry_run = await binder.dry_run(DryRunRequest(pod=pods[0]))

    assert [at.writes(each.name) for each in old] == before
    assert await at.stages() == []
    assert "would not fit even if every pod were evicted" in dry_run.reason
    assert [each.pod for each in dry_run.protected] == ["a/old-0"]


@TWO_GPUS
async def test_the_limits_on_evictions_hold_for_a_gang(at: Scene) -> None:
    await gang_in_need(at)
    binder = at.binder(preemption_per_minute=1)

    await at.steps(binder, 3)

    assert await at.stages() == []


@TWO_GPUS
async def test_a_dry_run_shows_the_place_of_the_pod_and_the_victims_of_its_gang(at: Scene) -> None:
    _, pods, binder = await gang_in_need(at)

    plan = (await binder.dry_run(DryRunRequest(pod=pods[1]))).plan

    assert plan is not None
    assert plan.pods == 2
    assert sorted(victim.pod for victim in plan.victims) == ["a/old-0", "a/old-1"]


@TWO_GPUS
async def test_a_gang_of_which_a_pod_is_gone_evicts_none(at: Scene) -> None:
    old, pods, binder = await gang_in_need(at)
    await binder.preempt()

    await at.ledger.waiting_pods.remove([pods[1]])
    at.clock.advance(30)
    await at.steps(binder, 2)

    assert [await at.is_deleting(each.name) for each in old] == [False, False]
    assert [await at.announced_for(each.name) for each in old] == [None, None]
    assert await at.stages() == []
    assert not any(use.claimed_by for use in (await uses(at.ledger)).values())
    assert "not evicted after all: a pod of the gang is gone" in at.reports.of("old-0")


@TWO_GPUS
async def test_pods_that_a_placer_decides_again_are_waited_for(at: Scene) -> None:
    old, pods, binder = await gang_in_need(at)
    await binder.preempt()
    [waiting] = await at.ledger.waiting_pods.load([pods[1]])
    await at.ledger.waiting_pods.remove_bound([pods[1]])

    at.clock.advance(30)
    await at.steps(binder, 2)
    assert [await at.is_deleting(each.name) for each in old] == [False, False]
    assert await at.stages() == [PreemptionStage.ANNOUNCED]

    await at.ledger.waiting_pods.enqueue([waiting])
    await binder.preempt()
    assert [await at.is_deleting(each.name) for each in old] == [True, True]


@TWO_GPUS
async def test_a_gang_ends_as_a_whole_for_a_single_pod(at: Scene) -> None:
    for gpu in range(2):
        await at.running(f"old-{gpu}", gpu=gpu, mib=16_000, gang=OLD_GANG)
    await at.save_budget("a")
    await at.waiting("new", mib=16_000)
    binder = at.binder()

    await at.evict(binder)

    assert [await at.is_deleting(f"old-{gpu}") for gpu in range(2)] == [True, True]


@TWO_GPUS
async def test_a_gang_stays_if_one_of_its_pods_is_protected_during_the_notice(at: Scene) -> None:
    for gpu in range(2):
        labels = {"app": f"old-{gpu}"}
        await at.running(f"old-{gpu}", gpu=gpu, mib=16_000, gang=OLD_GANG, labels=labels)
    await at.save_budget("a")
    await at.waiting("new", mib=16_000)
    binder = at.binder()
    await binder.preempt()

    await at.protect("late", {"app": "old-1"}, least=1)
    at.clock.advance(30)
    await binder.preempt()

    assert [await at.is_deleting(f"old-{gpu}") for gpu in range(2)] == [False, False]
    assert await at.stages() == []
    assert "not evicted after all" in at.reports.of("old-0")[-1]


@THREE_GPUS
async def test_a_pod_of_a_gang_ends_if_its_minimum_stays(at: Scene) -> None:
    for gpu in range(3):
        await at.running(f"old-{gpu}", gpu=gpu, mib=16_000, gang=OLD_GANG, owner=f"owner-{gpu}")
    await at.save_budget("a")
    await at.waiting("new-0", mib=16_000)
    binder = at.binder()

    await at.evict(binder)
    assert [await at.is_deleting(f"old-{gpu}") for gpu in range(3)].count(True) == 1

    # For one more, the others end, too: with the first one, too few would stay.
    await at.waiting("new-1", mib=16_000)
    at.clock.advance(5)
    await binder.preempt()
    victims = [each.preemption.victims for each in (await at.state()).open]
    assert sorted(map(len, victims)) == [1, 2]


@TWO_GPUS
async def test_a_preemption_replaces_the_planned_start_of_its_gang(at: Scene) -> None:
    for gpu in range(2):
        await at.running(f"old-{gpu}", gpu=gpu, mib=16_000, age_s=0, term=HOUR)
    await at.save_budget("a")
    await gang_of_two(at)
    binder = at.binder()
    await step(at, binder)  # they run for too short a time to be evicted
    assert [start.id for start in await starts(at)] == ["b/train"]

    at.clock.advance(60)
    await at.steps(binder, 2)

    assert await starts(at) == ()
    assert await at.stages() == [PreemptionStage.ANNOUNCED]


@THREE_GPUS
async def test_no_pod_is_evicted_for_further_pods_of_a_gang_that_runs(at: Scene) -> None:
    await at.running("old", gpu=0, mib=16_000)
    await at.save_budget("a")
    for gpu in (1, 2):
        await at.running(f"new-{gpu}", gpu=gpu, mib=16_000, namespace="b", gang=GANG)
    pod = await at.waiting("new-3", mib=16_000, gang=GANG)
    other = await at.waiting("new-4", mib=16_000, gang=GANG)
    binder = at.binder()

    await at.steps(binder, 2)

    assert await at.stages() == []
    reason = (await binder.dry_run(DryRunRequest(pod=pod))).reason
    assert reason == "pods of its gang run already: no pod is evicted for further ones"
    assert other != pod
