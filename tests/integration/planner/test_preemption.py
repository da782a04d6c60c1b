"""Preemption on a real Valkey and the simulated API server, step by step."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from msgspec import structs

from services.binder.plans.preemptions import GIVE_WAY_PAUSE_S, GIVE_WAY_S, NEXT_S
from services.planner.plan import PlanInput, plan_input
from services.planner.preemption_planner import LOOK_S, PLANNING_S, STEP_S
from shared.ledger.preemptions import Preemptions
from shared.model.devices.node import HOSTNAME, AntiAffinityTerm, LabelRequirement
from shared.model.events.request_reply import DryRunReply, DryRunRequest
from shared.model.leases.lease import LeaseState
from shared.model.leases.preemption import Preemption, PreemptionCause, PreemptionStage
from shared.model.names import OFFER, PREEMPTIBLE, NodeName, PodUid
from tests.support.placer.ledger import (
    assert_sound,
    facts,
    ledger,
    reservation,
    reserve,
    share,
    uses,
    uuid,
)
from tests.support.planner.scene import Scene, scene
from tests.support.servers.valkey import ValkeyServer
from tests.support.waiting import until


async def calls(server: ValkeyServer, *commands: str) -> int:
    async with redis.asyncio.Redis.from_url(server.url) as client:
        statistics = await client.info("commandstats")
        return sum(
            int(statistics[f"cmdstat_{command}"]["calls"])
            for command in commands
            if f"cmdstat_{command}" in statistics
        )


async def function_calls(server: ValkeyServer) -> int:
    return await calls(server, "fcall", "fcall_ro")


async def test_with_nothing_to_preempt_planner_and_binder_only_read_the_status(
    at: Scene, server: ValkeyServer
) -> None:
    await at.running("old", mib=16_000)
    binder = at.binder()
    await binder.preempt()
    before = await function_calls(server)

    for _ in range(20):
        at.clock.advance(max(binder.steps_s))
        await binder.preempt()

    assert binder.steps_s == (LOOK_S, LOOK_S)
    assert await function_calls(server) - before == 2 * 20


async def test_gpusharing_27_an_exhausted_budget_alone_evicts_no_pod_and_writes_nothing(
    at: Scene,
) -> None:
    await at.running("old", mib=16_000)
    before = at.writes("old")
    await at.save_budget("a", "expired", remaining_units=-1, used_units=10)

    binder = at.binder()
    for _ in range(5):
        await binder.preempt()
        at.clock.advance(60)

    assert at.writes("old") == before
    assert not await at.stages()


async def test_gpusharing_28_a_pod_with_budget_gets_the_device_of_one_without(at: Scene) -> None:
    old, pod, binder = await at.in_need()

    await binder.preempt()
    assert binder.steps_s == (STEP_S, NEXT_S)  # the next step may be due
    announced = await at.announced_for("old")
    at.clock.advance(30)
    await binder.preempt()
    assert announced is not None
    assert await at.is_deleting("old")
    assert await at.steps(binder, 2) == []  # its containers may still run

    await at.terminate(old)
    [chosen] = await binder.preempt()

    assert (chosen.lease.pod, chosen.lease.shares[0].device) == (pod, uuid("a", 0))
    assert chosen.lease.state is LeaseState.RESERVED
    assert at.writes("old")["delete/eviction"] == 1
    await at.ledger.bind([chosen.lease])
    await binder.preempt()
    assert not await at.stages()
    await assert_sound(at.ledger)


async def test_many_pods_are_planned_for_at_once_each_with_victims_and_devices_of_its_own(
    server: ValkeyServer,
) -> None:
    async with scene(server.url, gpus=16) as at:
        for gpu in range(16):
            await at.running(f"old-{gpu}", gpu=gpu, mib=16_000, owner=f"owner-{gpu}")
        await at.save_budget("a")
        for number in range(14):
            await at.waiting(f"new-{number}")
        binder = at.binder(preemption_per_namespace_hour=12)

        await binder.preempt()

        begun = [each.preemption for each in (await at.state()).open]
        victims = {victim.pod for each in begun for victim in each.victims}
        devices = {
            share.device
            for each in begun
            for wanted in each.wanted
            for share in wanted.candidates[0].shares
        }
        assert (len(begun), len(victims), len(devices)) == (12, 12, 12)


async def test_what_is_freed_for_many_pods_is_handed_over_with_one_reading_of_the_cluster(
    server: ValkeyServer,
) -> None:
    async with scene(server.url, gpus=16) as at:
        old = [
            await at.running(f"old-{gpu}", gpu=gpu, mib=16_000, owner=f"owner-{gpu}")
            for gpu in range(16)
        ]
        await at.save_budget("a")
        pods = {await at.waiting(f"new-{number}") for number in range(16)}
        binder = at.binder(preemption_per_namespace_hour=16)
        await at.evict(binder)
        for each in old:
            await at.terminate(each)
        before = await function_calls(server)

        found = await binder.preempt()

        assert {each.lease.pod for each in found} == pods
        assert await function_calls(server) - before < 2 * len(pods)


async def in_need_of(at: Scene, count: int) -> None:
    """Let as many pods run as wait for their devices."""
    for gpu in range(count):
        await at.running(f"old-{gpu}", gpu=gpu, mib=16_000, owner=f"owner-{gpu}")
        await at.waiting(f"new-{gpu}")
    await at.save_budget("a")


async def test_a_round_takes_few_steps_and_each_preemption_gets_its_turn(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.binder.plans.preemptions.MOST_STEPS", 2)
    monkeypatch.setattr("services.binder.plans.preemptions.OBSERVED_AT_ONCE", 2)
    async with scene(server.url, gpus=6) as at:
        await in_need_of(at, 6)
        binder = at.binder(preemption_per_namespace_hour=6)
        announced = []
        for _ in range(3):
            await binder.preempt()
            announced.append((await at.stages()).count(PreemptionStage.ANNOUNCED))

        assert announced == [2, 4, 6]


async def test_the_pause_after_a_round_is_as_long_as_it(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(server.url) as at:
        await in_need_of(at, 1)
        binder = at.binder()
        evict = binder.preemptions.pods.evict

        async def slow(*given: Any, **more: Any) -> Any:
            at.clock.advance(3 * STEP_S)
            return await evict(*given, **more)

        monkeypatch.setattr(binder.preemptions.pods, "evict", slow)
        await binder.preempt()

        assert binder.preemptions.step_s == pytest.approx(3 * STEP_S)


async def test_a_step_waits_while_bindings_do_but_not_for_ever(server: ValkeyServer) -> None:
    async with scene(server.url) as at:
        await in_need_of(at, 1)
        binder = at.binder()
        binder.preemptions.is_busy = lambda: True
        began = at.clock.ticks()
        before = at.writes("old-0")

        async with asyncio.TaskGroup() as group:
            round_of_steps = group.create_task(binder.preempt())
            await until(lambda: at.clock.sleepers)
            assert at.writes("old-0") == before
            while not round_of_steps.done():
                await until(lambda: at.clock.sleepers or round_of_steps.done())
                at.clock.advance(GIVE_WAY_PAUSE_S)

        assert GIVE_WAY_S <= at.clock.ticks() - began < 2 * GIVE_WAY_S
        assert await at.stages() == [PreemptionStage.ANNOUNCED]


async def test_no_more_is_planned_while_many_plans_are_open(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.planner.preemption_planner.MOST_OPEN", 1)
    monkeypatch.setattr("services.planner.preemption_planner.AT_ONCE", 1)
    async with scene(server.url, gpus=3) as at:
        await in_need_of(at, 3)
        binder = at.binder(preemption_per_namespace_hour=6)
        for _ in range(4):
            await binder.preempt()
            at.clock.advance(1)
        assert len(await at.stages()) == 1

        for read in (await at.state()).open:
            await at.preemptions.close(read)
        at.clock.advance(PLANNING_S)
        await binder.preempt()

        assert len(await at.stages()) == 1


async def test_the_end_of_a_lease_reads_the_claims_of_its_node_alone(server: ValkeyServer) -> None:
    async with ledger(server.url, {"a": 2, "b": 1}) as leases:

        async def reads_of_an_end() -> int:
            await reserve(leases, reservation("ends", share("b", 0, 4_000), node="b"))
            [lease] = await leases.load([PodUid("ends")])
            assert lease is not None
            await leases.bind([lease])
            before = [await calls(server, name) for name in ("hget", "hgetall")]
            assert await leases.release([PodUid("ends")], reason="it was deleted")
            return sum([await calls(server, name) for name in ("hget", "hgetall")]) - sum(before)

        without_claims = await reads_of_an_end()
        for gpu, pod in enumerate(("x", "y")):
            wanted = reservation(pod, share("a", gpu, 4_000))
            assert await leases.part(Preemptions).open(
                Preemption(id=pod, victims=(), wanted=(wanted,))
            )

        assert await reads_of_an_end() == without_claims


async def test_planning_lasts_as_long_as_it_took_until_the_first_plan(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(server.url, gpus=3) as at:

        def slow(*given: Any, **more: Any) -> PlanInput:
            at.clock.advance(2 * PLANNING_S)
            return plan_input(*given, **more)

        monkeypatch.setattr("services.planner.plan.plan_input", slow)
        for gpu in range(3):
            await at.running(f"old-{gpu}", gpu=gpu, mib=16_000, owner=f"owner-{gpu}")
            await at.waiting(f"new-{gpu}")
        await at.save_budget("a")

        await at.binder().preempt()

        assert len(await at.stages()) == 3


async def test_gpusharing_28_a_budget_made_during_the_notice_stops_the_eviction(at: Scene) -> None:
    _, _, binder = await at.in_need(labels={"app": "x"})
    await binder.preempt()

    await at.protect("x", {"app": "x"}, least=1)
    at.clock.advance(30)
    await binder.preempt()

    assert not await at.is_deleting("old")
    assert await at.announced_for("old") is None
    assert await at.stages() == []
    assert not (await uses(at.ledger))[uuid("a", 0)].claimed_by


async def test_gpusharing_30_no_other_pod_gets_the_freed_devices(at: Scene) -> None:
    # All of the node's cpu is taken, too: 64 cores, and the pod in need wants a tenth of one.
    old = await at.running("old", mib=8_000, cpu=64_000)
    await at.save_budget("a")
    await at.waiting("new", mib=12_000)
    binder = at.binder()
    assert "cpu" in await at.thief()

    await binder.preempt()
    assert (await uses(at.ledger))[uuid("a", 0)].claimed_by
    at.clock.advance(30)
    await binder.preempt()
    await at.terminate(old)

    assert "in-exclusive-use" in await at.thief(cpu=0)
    assert "cpu" in await at.thief(cpu=64_000)
    assert (await at.ledger.totals.claimed())[NodeName("a")] == {"cpu": 100, "pods": 1}
    [chosen] = await binder.preempt()
    assert chosen.lease.shares[0].memory_mib == 12_000
    assert await at.ledger.totals.claimed() == {}
    assert await at.thief(mib=4_000) == ""
    await assert_sound(at.ledger)


async def test_gpusharing_30_a_waiting_pod_of_higher_priority_does_not_get_the_freed_devices(
    at: Scene,
) -> None:
    old = await at.running("old", mib=16_000)
    await at.save_budget("a")
    await at.save_budget("c")
    pod = await at.waiting("new", mib=12_000)
    binder = at.binder()
    await binder.preempt()
    await at.waiting("higher", namespace="c", mib=12_000, priority=1_000)
    at.clock.advance(30)
    await binder.preempt()
    await at.terminate(old)

    [chosen] = await binder.preempt()

    assert chosen.lease.pod == pod


async def test_gpusharing_30_capacity_is_offered_to_others_once_the_pending_pod_has_its_lease(
    at: Scene,
) -> None:
    old, _, binder = await at.in_need(mib=12_000)
    await at.evict(binder)
    await at.terminate(old)
    other = await at.waiting("small", namespace="c", mib=4_000)
    assert not (await at.ledger.waiting_pods.choose_offers(now=at.clock.now())).pods

    await binder.preempt()

    offered = (await at.ledger.waiting_pods.choose_offers(now=at.clock.now())).pods
    assert [each.pod for each in offered] == [other]


async def test_gpusharing_33_a_refilled_budget_cancels(at: Scene) -> None:
    old = await at.running("old", mib=8_000)
    await at.save_budget("a")
    await at.waiting("new", mib=16_000)
    binder = at.binder()
    await binder.preempt()
    assert await at.announced_for("old") is not None
    at.clock.advance(10)

    await at.save_budget("a", "guaranteed")
    await binder.preempt()
    at.clock.advance(60)
    await at.steps(binder, 2)

    assert await at.announced_for("old") is None
    assert not await at.is_deleting("old")
    [still] = await at.ledger.load([old.pod])
    assert still == old
    assert await at.thief() == ""
    assert any("not evicted after all" in message for message in at.reports.of("old"))


@pytest.mark.parametrize("when", ["announced", "evicted"])
async def test_a_deleted_pending_pod_frees_the_devices_claimed_for_it(at: Scene, when: str) -> None:
    old, pod, binder = await at.in_need()
    await binder.preempt()
    if when == "evicted":
        at.clock.advance(30)
        await binder.preempt()
        await at.terminate(old)

    await at.ledger.waiting_pods.remove([pod])
    await binder.preempt()

    assert await at.stages() == []
    assert not (await uses(at.ledger))[uuid("a", 0)].claimed_by
    assert await at.ledger.totals.claimed() == {}
    if when == "announced":
        assert await at.announced_for("old") is None


async def test_a_preemption_is_given_up_when_a_victim_does_not_terminate(at: Scene) -> None:
    _, _, binder = await at.in_need(grace_s=10)
    await at.evict(binder)

    at.clock.advance(41)
    await binder.preempt()

    assert await at.stages() == []
    assert any("took too long" in message for message in at.reports.of("new"))


async def test_the_time_for_victims_to_terminate_begins_with_their_eviction(at: Scene) -> None:
    old, pod, binder = await at.in_need(grace_s=10)
    await binder.preempt()
    at.clock.advance(59)  # the binder was busy
    await binder.preempt()
    at.clock.advance(39)
    await binder.preempt()

    await at.terminate(old)

    assert [each.lease.pod for each in await binder.preempt()] == [pod]


async def test_an_eviction_that_is_long_overdue_is_announced_anew(at: Scene) -> None:
    _, _, binder = await at.in_need(grace_s=60)
    await binder.preempt()
    first = await at.announced_for("old")
    at.clock.advance(69)  # no binder was there

    await binder.preempt()
    assert not await at.is_deleting("old")
    assert await at.announced_for("old") not in {None, first}

    at.clock.advance(30)
    await binder.preempt()
    assert await at.is_deleting("old")


async def test_a_pod_of_higher_priority_preempts_one_of_lower_priority(at: Scene) -> None:
    old = await at.running("old", mib=16_000)
    await at.waiting("same", priority=0)
    binder = at.binder()
    await binder.preempt()
    assert await at.announced_for("old") is None

    pod = await at.waiting("high", priority=100)
    at.clock.advance(3)
    await at.evict(binder)
    await at.terminate(old)
    [chosen] = await binder.preempt()

    assert chosen.lease.pod == pod
    assert any(note.reason == "GPUPriorityPreempt" for note in at.reports.events)


async def test_what_is_preempted_for_a_pod_of_kube_scheduler_is_offered_to_it(at: Scene) -> None:
    old = await at.running("old", mib=16_000)
    await at.waiting("high", priority=100, by_kube_scheduler=True)
    binder = at.binder()
    await at.evict(binder)
    await at.terminate(old)

    assert await binder.preempt() == []

    pod = await at.get_pod("high", "b")
    assert pod is not None
    assert pod["metadata"]["annotations"][OFFER].startswith("a@")
    assert await at.thief()


async def test_what_was_freed_is_not_leased_beside_a_pod_that_repels_the_pending_one_by_now(
    server: ValkeyServer,
) -> None:
    await server.ready()
    labels = {HOSTNAME: "a"}
    selector = (LabelRequirement("app", "In", ("noisy",)),)
    term = AntiAffinityTerm(topology_key=HOSTNAME, selector=selector, all_namespaces=True)
    async with scene(server.url, gpus=2) as at:
        await at.ledger.save_nodes([replace(facts("a"), labels=labels)])
        old = await at.running("old", mib=16_000)
        await at.running("other", mib=9_000, gpu=1, namespace="c")
        await at.save_budget("a")
        await at.waiting("new", labels={"app": "noisy"})
        binder = at.binder()
        await at.evict(binder)

        quiet = structs.replace(reservation("quiet", share("a", 1, mib=1_000)), repels=(term,))
        await reserve(at.ledger, quiet, now=at.clock.now())
        await at.terminate(old)

        assert await binder.preempt() == []
        assert await at.stages() == []
        assert any("keeps it off node a" in message for message in at.reports.of("new"))


@pytest.mark.parametrize("zone", ["same", "other"])
async def test_what_was_freed_is_not_leased_in_a_zone_that_another_nodes_pod_guards(
    server: ValkeyServer, zone: str
) -> None:
    await server.ready()
    selector = (LabelRequirement("app", "In", ("noisy",)),)
    term = AntiAffinityTerm(topology_key="zone", selector=selector, all_namespaces=True)
    async with scene(server.url) as at:
        await at.ledger.save_nodes([replace(facts("a"), labels={"zone": "same"})])
        old = await at.running("old", mib=16_000)
        await at.save_budget("a")
        await at.waiting("new", labels={"app": "noisy"})
        binder = at.binder()
        await at.evict(binder)

        elsewhere = replace(facts("b"), labels={"zone": zone}, anti_affinity=(term,))
        await at.ledger.save_nodes([elsewhere, facts("c")])
        await at.terminate(old)
        around = await at.ledger.snapshot_around([NodeName("a")])
        placed = await binder.preempt()

        assert [node.facts.name for node in around.nodes] == ["a", "b"]
        assert [event.lease.name for event in placed] == ([] if zone == "same" else ["new"])
        kept_off = [text for text in at.reports.of("new") if "keeps it off node a" in text]
        assert len(kept_off) == (zone == "same")
        await at.ledger.save_nodes([replace(elsewhere, anti_affinity=())])
        around = await at.ledger.snapshot_around([NodeName("a")])
        assert [node.facts.name for node in around.nodes] == ["a"]


@pytest.mark.parametrize(
    "why", ["young", "labelled", "no-budget-either", "own-budget-ends", "limit", "disabled"]
)
async def test_a_pod_that_is_not_preemptible_stays(at: Scene, why: str) -> None:
    labels = {PREEMPTIBLE: "false"} if why == "labelled" else {}
    await at.running("old", mib=16_000, age_s=30 if why == "young" else 3600, labels=labels)
    await at.save_budget("a")
    if why == "no-budget-either":
        await at.save_budget("b")
    if why == "own-budget-ends":
        await at.save_budget("b", "guaranteed", exhausted_at=at.clock.now() + 60)
    await at.waiting("new")
    binder = at.binder(
        preemption_per_namespace_hour=0 if why == "limit" else 6, preemption=why != "disabled"
    )

    await binder.preempt()

    assert await at.stages() == []
    assert await at.announced_for("old") is None


async def test_a_dry_run_names_victims_and_spared_pods_and_changes_nothing(
    at: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pod, binder = await at.in_need()

    found = await binder.dry_run(DryRunRequest(pod=pod))
    patient = await binder.dry_run(DryRunRequest(pod=pod, min_runtime_s=7_200))

    assert found.plan is not None
    assert [each.pod for each in found.plan.victims] == ["a/old"]
    assert (found.plan.node, found.protected) == ("a", ())
    assert (patient.plan, patient.reason) == (None, "no pod may be preempted for it")
    [spared] = patient.protected
    assert (spared.pod, spared.reason) == ("a/old", "it has not run for 7200 s")
    monkeypatch.setattr("services.planner.dry_run.MAX_PROTECTED", 0)
    full = await binder.dry_run(DryRunRequest(pod=pod, min_runtime_s=7_200))
    assert (full.protected, full.protected_left_out) == ((), 1)
    assert await binder.dry_run(DryRunRequest(pod=PodUid("gone"))) == DryRunReply()
    assert await at.stages() == []
    assert await at.announced_for("old") is None


async def test_a_budget_policy_evicts_without_a_pending_pod(at: Scene) -> None:
    await at.running("old", mib=16_000)
    await at.save_budget("a", evict_after_minutes=1, state_since=at.clock.now())
    binder = at.binder()
    await binder.preempt()
    assert await at.announced_for("old") is None

    at.clock.advance(61)
    await binder.preempt()
    assert await at.announced_for("old") is not None
    at.clock.advance(30)
    await at.steps(binder, 2)

    assert await at.is_deleting("old")
    [line] = await at.evictions()
    assert (line.cause, line.for_pod) == (PreemptionCause.POLICY, "")
    assert await at.stages() == []
