"""Planned starts on a real Valkey and the simulated API server, step by step."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from services.binder.plans.starts import MISSING_S
from services.binder.report.explanations import PLANNED, WITHDRAWN
from services.planner.start_planner import (
    AGED_S,
    MAX_PLAN_S,
    MOST_PASS_S,
    PAUSE_FACTOR,
    PLAN_S,
)
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.leases.lease import ends_by
from shared.model.leases.ledger import ReservedLease
from shared.model.leases.preemption import EndedPromise, PromiseOutcome
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.quantity import timestamp
from shared.model.requests.placement import Placement
from shared.model.requests.request import NO_TERM, Gang, PodRequest, Term
from shared.placing.starts import AGAIN_S, LATE_S, MOST_KINDS, MOST_TRIED, RESERVE_AFTER_S
from tests.support.placer.ledger import assert_sound, device, report, share, uses
from tests.support.planner.scene import (
    HOUR,
    Scene,
    events,
    idle_node,
    promised,
    running,
    starts,
    step,
)

MINUTE = Term(max_run_s=60)
at = idle_node
__all__ = ["at"]


async def promises(at: Scene) -> list[EndedPromise]:
    """Return how promised starts have ended."""
    return (await at.preemptions.promises("0-0"))[1]


async def test_a_pod_is_promised_the_end_of_a_lease_and_gets_its_device(at: Scene) -> None:
    old, binder, start = await promised(at, other=Term(max_run_s=7200))

    assert (start.at, start.enforced) == (ends_by(old), True)
    assert events(at, PLANNED) == [
        f"starts by {timestamp(start.at)} at the latest: a pod of another namespace ends by then"
    ]
    assert await step(at, binder) == []

    await at.terminate(old)
    assert await at.thief(0) != ""
    at.clock.advance(60)
    [placed] = await step(at, binder)
    [kept] = await promises(at)
    assert kept == start.ended(PromiseOutcome.KEPT, at.clock.now())
    assert (placed.lease.pod, placed.lease.shares[0].device) == (start.id, old.shares[0].device)
    assert await starts(at) == ()
    await assert_sound(at.ledger)


@pytest.mark.parametrize(("term", "enters"), [(MINUTE, True), (NO_TERM, False), (HOUR, False)])
async def test_until_then_only_what_ends_before_is_let_onto_the_device(
    at: Scene, term: Term, enters: bool
) -> None:
    old, binder, _ = await promised(at, mib=8_000)

    assert (await at.thief(0, term=term) == "") is enters
    await at.terminate(old)
    assert (await step(at, binder) == []) is enters, "nothing takes the room of what was let in"
    await at.ledger.release([PodUid("thief")], reason="the pod has terminated")
    await step(at, binder)
    await assert_sound(at.ledger)


async def test_a_gang_gets_its_devices_once_the_last_is_free_and_nobody_else_does(
    at: Scene,
) -> None:
    old = [await running(at, 0), await running(at, 1, Term(max_run_s=7200))]
    gang = Gang(name="b/g", min_member=2)
    pods = {await at.waiting(f"g-{n}", mib=16_000, gang=gang) for n in (0, 1)}
    binder = at.binder()
    await step(at, binder)

    [start] = await starts(at)
    assert (start.id, start.at) == ("b/g", ends_by(old[1]))
    assert len(events(at, PLANNED)) == 2
    await at.terminate(old[0])
    assert await step(at, binder) == []
    assert await at.thief(0) != ""

    await at.terminate(old[1])
    assert {each.lease.pod for each in await step(at, binder)} == pods
    await assert_sound(at.ledger)


@pytest.mark.parametrize("gang", [None, Gang(name="b/g", min_member=2)])
async def test_a_gang_gets_a_start_at_once_and_another_pod_after_a_minute(
    at: Scene, gang: Gang | None
) -> None:
    await running(at, 0)
    await running(at, 1)
    for name in ("new", "other"):
        await at.waiting(name, mib=16_000, gang=gang, since=at.clock.now())
    binder = at.binder()
    await step(at, binder)
    assert bool(await starts(at)) is bool(gang)

    at.clock.advance(RESERVE_AFTER_S)
    await step(at, binder)
    assert await starts(at)


async def test_a_member_without_gpus_starts_with_its_gang(at: Scene) -> None:
    old = await running(at, 0)
    await running(at, 1, NO_TERM)
    gang = Gang(name="b/g", min_member=2)
    pods = {await at.waiting(f"g-{gpus}", mib=16_000, gpus=gpus, gang=gang) for gpus in (0, 1)}
    binder = at.binder()
    await step(at, binder)
    [start] = await starts(at)
    assert set(start.pods) == pods

    await at.terminate(old)
    assert {each.lease.pod for each in await step(at, binder)} == pods
    await assert_sound(at.ledger)


async def test_no_pod_is_preempted_on_a_gpu_that_is_claimed_for_a_start(at: Scene) -> None:
    await at.running("old", gpu=1, mib=16_000)
    await running(at, 0)  # has used less, so that it would be the one
    gang = Gang(name="a/g", min_member=2)
    for number in (0, 1):
        await at.waiting(f"g-{number}", namespace="a", mib=8_000, gang=gang, since=1.0)
    binder = at.binder()
    await step(at, binder)
    [start] = await starts(at)
    assert start.devices == {"GPU-a-0"}

    await at.save_budget("a")
    at.clock.advance(at.rules.preemption_min_runtime_s)
    urgent = await at.waiting("urgent", namespace="c", mib=16_000)
    await step(at, binder)

    state = await at.state()
    [read] = state.open
    assert read.preemption.id == urgent
    assert [each.devices for each in read.preemption.victims] == [("GPU-a-1",)]
    assert state.starts == (start,)


async def test_a_start_whose_time_has_passed_is_withdrawn_with_the_reason_and_planned_anew(
    at: Scene,
) -> None:
    _, binder, start = await promised(at)

    at.clock.advance(start.at + LATE_S - at.clock.now())
    await step(at, binder)

    [text] = events(at, WITHDRAWN)
    assert "; a pod of another namespace still runs" in text
    await step(at, binder)
    [again] = await starts(at)
    assert (again.at > start.at, again.enforced) == (True, False)


async def test_a_pod_of_higher_priority_comes_first_and_the_other_is_told(at: Scene) -> None:
    old, binder, _ = await promised(at)
    urgent = await at.waiting("urgent", mib=16_000, namespace="c", priority=5)
    await step(at, binder)

    [start] = await starts(at)
    assert start.id == urgent
    [text] = events(at, WITHDRAWN)
    assert "a pod of priority 5 comes first" in text
    assert [promise.outcome for promise in await promises(at)] == [PromiseOutcome.WITHDRAWN]
    await at.terminate(old)
    [placed] = await step(at, binder)
    assert placed.lease.pod == urgent
    await assert_sound(at.ledger)


async def test_a_pod_that_is_gone_or_placed_elsewhere_gives_its_devices_back(at: Scene) -> None:
    await running(at, 0, mib=8_000)
    other = await running(at, 1, NO_TERM)
    pod = await at.waiting("new", mib=16_000)
    binder = at.binder()
    await step(at, binder)
    assert await at.thief(0) != ""

    await at.terminate(other)
    place = Placement(node=NodeName("a"), shares=(share("a", 1, mib=16_000),))
    assert isinstance(await at.reserve(pod, "new", place, namespace="b"), ReservedLease)
    assert [each.lease.pod for each in await step(at, binder)] == [pod]
    assert await starts(at) == ()
    assert [promise.outcome for promise in await promises(at)] == [PromiseOutcome.NOT_NEEDED]
    assert await at.thief(0) == ""
    await assert_sound(at.ledger)


@pytest.mark.parametrize("gang", [None, Gang(name="b/g", min_member=2)])
async def test_a_start_is_kept_while_a_placer_decides_again_about_its_pod(
    at: Scene, gang: Gang | None
) -> None:
    await running(at, 0)
    await running(at, 1)
    pods = [await at.waiting(f"g-{n}", mib=16_000, gang=gang) for n in range(2 if gang else 1)]
    binder = at.binder()
    await step(at, binder)
    planned = await starts(at)

    await at.ledger.waiting_pods.remove_bound(pods[:1])
    await step(at, binder)
    kept = await starts(at)
    at.clock.advance(planned[0].at + LATE_S - at.clock.now())
    await step(at, binder)

    assert kept == planned != ()
    withdrawn = {event.pod for event in at.reports.events if event.reason == WITHDRAWN}
    assert withdrawn == set(pods), "all pods learn that the time has passed"


async def test_a_start_is_given_up_if_its_pod_does_not_wait_again_soon(at: Scene) -> None:
    """The event of the pod's end may have been lost with what Redis lost."""
    await running(at, 0)
    await running(at, 1)
    pod = await at.waiting("new", mib=16_000)
    binder = at.binder()
    await step(at, binder)
    planned = await starts(at)

    await at.ledger.waiting_pods.remove_bound([pod])
    await step(at, binder)
    at.clock.advance(MISSING_S - PLAN_S - 2)
    await step(at, binder)
    kept = await starts(at)
    await step(at, binder)

    assert kept == planned != ()
    assert await starts(at) == ()
    (withdrawn,) = (event for event in at.reports.events if event.reason == WITHDRAWN)
    assert withdrawn.pod == pod
    assert "no longer wait" in withdrawn.message


async def test_others_may_use_the_ordinary_resources_that_the_ends_will_free(at: Scene) -> None:
    old = await at.running("old", gpu=0, mib=8_000, age_s=0, term=HOUR, cpu=1_000)
    await running(at, 1, NO_TERM)
    pod = await at.waiting("new", mib=16_000)  # needs less cpu than the old one frees
    binder = at.binder()
    await step(at, binder)

    [node] = (await at.ledger.snapshot()).nodes
    free = node.facts.allocatable["cpu"] - node.used["cpu"]
    assert await at.thief(0, cpu=free, term=MINUTE) == ""
    await at.ledger.release([PodUid("thief")], reason="the pod has terminated")
    await at.terminate(old)
    [placed] = await step(at, binder)
    assert placed.lease.pod == pod


async def test_a_rebuild_loses_plans_and_no_lease(at: Scene) -> None:
    await promised(at)

    token = await at.ledger.begin_rebuild(now=at.clock.now(), lock_s=60, force=True)
    assert token
    assert await at.ledger.finish_rebuild(token)
    assert await starts(at) == ()


async def test_a_start_that_can_be_earlier_is_planned_again_and_never_later(at: Scene) -> None:
    old = await running(at, 0)
    other = await running(at, 1, Term(max_run_s=7200), mib=8_000)
    await at.running("brief", gpu=1, mib=8_000, age_s=0, term=Term(max_run_s=1800))
    await at.waiting("new", mib=16_000)
    binder = at.binder()
    await step(at, binder)
    [first] = await starts(at)

    await at.terminate(other)
    at.clock.advance(AGAIN_S)
    await step(at, binder)

    [again] = await starts(at)
    assert (first.waits_for[0].pod, again.waits_for[0].name) == (old.pod, "brief")
    assert again.at < first.at
    assert not events(at, WITHDRAWN)


@pytest.mark.parametrize("at", [3], indirect=True)
@pytest.mark.parametrize("comes_later", [False, True])
async def test_a_namespace_has_two_starts_while_others_wait(at: Scene, comes_later: bool) -> None:
    for gpu in range(3):
        await at.running(f"old-{gpu}", namespace="b", gpu=gpu, mib=16_000, age_s=0, term=HOUR)
    binder = at.binder()
    for number in range(3):
        await at.waiting(f"greedy-{number}", mib=16_000)
    if comes_later:
        await step(at, binder)
        assert [each.namespace for each in await starts(at)] == ["b"] * 3
    await at.waiting("modest", namespace="c", mib=16_000)
    at.clock.advance(60)
    await step(at, binder)

    assert sorted(each.namespace for each in await starts(at)) == ["b", "b", "c"]
    texts = events(at, PLANNED)
    assert any("latest: b/old-" in text for text in texts)
    assert any("latest: a pod of another namespace end" in text for text in texts)
    withdrawn = [text.partition("; ")[2] for text in events(at, WITHDRAWN)]
    reason = "its namespace has more than 2, and others wait. It is planned anew"
    assert withdrawn == ([reason] if comes_later else [])


@pytest.mark.parametrize("cards", [1, 2])
async def test_a_gang_claims_no_more_than_its_quota_allows_and_displaces_nobody(
    at: Scene, cards: int
) -> None:
    quota = Quota(namespace=Namespace("b"), limits=QuotaLimits(cards=cards))
    await at.ledger.quotas.save([quota], read_at=at.clock.now())
    for gpu in (0, 1):
        await running(at, gpu)
    await at.waiting("modest", namespace="c", mib=16_000)
    at.clock.advance(60)
    binder = at.binder()
    await step(at, binder)
    for number in (0, 1):
        gang = Gang(name="b/g", min_member=2)
        await at.waiting(f"g-{number}", mib=16_000, gang=gang, priority=5)
    await step(at, binder)

    assert {each.namespace for each in await starts(at)} == {"c" if cards == 1 else "b"}
    assert len(events(at, WITHDRAWN)) == cards - 1


async def test_plans_that_take_long_are_rare_although_pods_come_and_each_gets_its_turn(
    at: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[int]()

    def slow(requests: Sequence[PodRequest], *_: object, **__: object) -> None:
        tried.append(requests[0].priority)
        at.clock.advance(MOST_PASS_S + 1)

    monkeypatch.setattr("services.planner.start_planner.plan_start", slow)
    await running(at, 0)
    for priority in (1, 2):
        await at.waiting(f"new-{priority}", namespace="b", priority=priority)
    binder = at.binder()
    at.clock.advance(60)
    await step(at, binder)
    await at.waiting("another", namespace="b")
    await step(at, binder)
    assert tried == [2], "it takes a twentieth of the time, whatever comes"

    at.clock.advance(PAUSE_FACTOR * (MOST_PASS_S + 1))
    await step(at, binder)
    assert tried == [2, 1]


@pytest.mark.parametrize(("kinds", "planned"), [(MOST_KINDS, 1), (MOST_KINDS + 1, 0)])
async def test_a_gang_of_many_different_pods_gets_no_plan(
    at: Scene, kinds: int, planned: int
) -> None:
    await running(at, 0)
    await running(at, 1, NO_TERM)
    gang = Gang(name="b/g", min_member=2)
    for number in range(MOST_KINDS + 1):
        await at.waiting(f"g-{number}", mib=900 + number % kinds, gang=gang)

    await step(at, at.binder())

    assert len(await starts(at)) == planned


@pytest.mark.parametrize("what", ["cordoned", "unhealthy"])
async def test_a_start_whose_node_or_device_is_lost_is_withdrawn_at_once(
    at: Scene, what: str
) -> None:
    _, binder, start = await promised(at)

    node = (await at.ledger.snapshot()).nodes[0].facts
    if what == "cordoned":
        await at.ledger.save_nodes([replace(node, unschedulable=True)])
    else:
        devices = [replace(device("a", 0), healthy=False), device("a", 1)]
        await at.ledger.save_devices([report("a", devices)])
    at.clock.advance(AGAIN_S)
    await step(at, binder)

    [text] = events(at, WITHDRAWN)
    assert what in text
    assert start not in await starts(at)


async def test_what_is_left_of_a_gang_is_told_that_it_does_not_start(at: Scene) -> None:
    await running(at, 0)
    await running(at, 1)
    gang = Gang(name="b/g", min_member=2)
    pods = [await at.waiting(f"g-{n}", mib=16_000, gang=gang) for n in (0, 1)]
    binder = at.binder()
    await step(at, binder)
    assert len(events(at, PLANNED)) == 2

    await at.ledger.waiting_pods.remove(pods[:1])
    await step(at, binder)

    [event] = [each for each in at.reports.events if each.reason == WITHDRAWN]
    assert (event.pod, "too few pods of its gang" in event.message) == (pods[1], True)
    assert await starts(at) == ()


async def test_a_leader_that_is_none_any_more_changes_no_start_that_it_has_not_read(
    at: Scene,
) -> None:
    _, _, read = await promised(at, other=HOUR)
    newer = replace(read, opened_at=read.opened_at + 1)

    assert await at.preemptions.open_start(newer, read)
    kept = read.ended(PromiseOutcome.KEPT, at.clock.now())
    assert kept
    assert not await at.preemptions.close_start(read, kept)
    assert not await at.preemptions.open_start(read, read, ended=[kept])
    assert await starts(at) == (newer,)
    assert await promises(at) == []
    assert await at.preemptions.close_start(newer, kept)
    assert await promises(at) == [kept]
    assert not any(use.claimed_by for use in (await uses(at.ledger)).values())


@pytest.mark.parametrize("is_aged", [False, True])
async def test_the_first_of_the_queue_gets_a_start_and_the_next_one_after_it(
    at: Scene, is_aged: bool
) -> None:
    old = [
        await at.running(f"old-{gpu}", namespace="b", gpu=gpu, mib=16_000, age_s=0, term=HOUR)
        for gpu in range(2)
    ]
    now = at.clock.now()
    oldest = await at.waiting("oldest", mib=16_000, since=now - AGED_S * is_aged)
    of_less = await at.waiting("of-less", mib=16_000, since=now, namespace="c")
    first, second = (oldest, of_less) if is_aged else (of_less, oldest)
    binder = at.binder(most=1)
    at.clock.advance(60)
    await step(at, binder)
    [start] = await starts(at)
    assert start.id == first, "its namespace uses less of its fair share, or it has waited for long"

    await at.terminate(next(each for each in old if each.pod == start.waits_for[0].pod))
    [placed] = await step(at, binder)
    assert placed.lease.pod == first
    at.clock.advance(60)
    await step(at, binder)
    assert [each.id for each in await starts(at)] == [second]


async def test_pods_of_a_namespace_that_get_no_start_do_not_keep_others_from_theirs(
    at: Scene,
) -> None:
    await running(at, 0, NO_TERM)
    await running(at, 1, HOUR)
    now = at.clock.now()
    for number in range(MOST_TRIED):
        await at.waiting(f"endless-{number}", mib=16_000, gpus=2, since=now - 2 * AGED_S)
    modest = await at.waiting("modest", mib=16_000, namespace="c", since=now - AGED_S)
    binder = at.binder()
    for _ in range(2):
        await step(at, binder)
        at.clock.advance(MAX_PLAN_S)

    assert [each.id for each in await starts(at)] == [modest]


async def test_a_plan_that_cannot_be_stored_leaves_the_one_before_it(at: Scene) -> None:
    await running(at, 0)
    await running(at, 1)
    for name in ("new", "other"):
        await at.waiting(name, mib=16_000)
    await step(at, at.binder())
    first, second = await starts(at)

    assert not await at.preemptions.open_start(replace(first, wanted=second.wanted), first)
    assert await starts(at) == (first, second)
    assert all(use.claimed_by for use in (await uses(at.ledger)).values())


async def test_a_pod_for_which_others_may_be_preempted_does_not_wait_for_its_planned_start(
    at: Scene,
) -> None:
    _, binder, start = await promised(at, other=HOUR)

    await at.save_budget("a")
    at.clock.advance(at.rules.preemption_min_runtime_s)
    await step(at, binder)

    state = await at.state()
    assert [each.preemption.id for each in state.open] == [start.id]
    assert (state.starts, len(events(at, WITHDRAWN))) == ((), 1)


async def test_no_device_is_claimed_for_a_pod_whose_lease_could_not_be_stored(at: Scene) -> None:
    _, _, start = await promised(at, other=HOUR)
    groups = tuple(f"{n:0250}" for n in range(64))
    wanted = tuple(structs.replace(each, anti_affinity_groups=groups) for each in start.wanted)

    assert not await at.preemptions.open_start(replace(start, wanted=wanted), start)
