"""Preemption on a real Valkey and the simulated API server, step by step."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.binder.preempt.eviction_client import EvictionClient
from shared.kubernetes.client import KubernetesClient
from shared.model.lease import LeaseState
from shared.model.names import NodeName, PodUid
from shared.model.preemption import (
    PREEMPTIBLE,
    EvictionOutcome,
    PreemptionCause,
    PreemptionStage,
    Victim,
)
from tests.support.binder.preemption import Scene, scene
from tests.support.placer.ledger import assert_sound, uses, uuid
from tests.support.servers.valkey import ValkeyServer


@pytest.fixture
async def at(server: ValkeyServer) -> AsyncIterator[Scene]:
    await server.ready()
    await server.command("FLUSHALL")
    async with scene(server.url) as made:
        yield made


async def stage_of(at: Scene) -> list[PreemptionStage]:
    return [each.preemption.stage for each in (await at.preemptions.state(now=at.clock.now())).open]


async def test_gpusharing_27_an_exhausted_budget_alone_evicts_no_pod_and_writes_nothing(
    at: Scene,
) -> None:
    await at.running("old", mib=16_000)
    before = at.writes("old")
    await at.save_budget("a", "expired", remaining_units=-1, used_units=10)

    binder = at.binder()
    for _ in range(5):
        await binder.step()
        at.clock.advance(60)

    assert at.writes("old") == before
    assert not (await at.preemptions.state(now=at.clock.now())).open


async def test_gpusharing_28_a_pod_with_budget_gets_the_device_of_one_without(at: Scene) -> None:
    old = await at.running("old", mib=16_000)
    await at.save_budget("a")
    pod = await at.waiting("new")
    binder = at.binder()

    await binder.step()
    announced = await at.announced_for("old")
    at.clock.advance(30)
    await binder.step()
    assert announced is not None
    assert await at.is_deleting("old")
    assert await at.steps(binder, 2) == []  # its containers may still run

    await at.terminate(old)
    [chosen] = await binder.step()

    assert (chosen.lease.pod, chosen.lease.shares[0].device) == (pod, uuid("a", 0))
    assert chosen.lease.state is LeaseState.RESERVED
    assert at.writes("old")["delete/eviction"] == 1
    await at.ledger.bind([chosen.lease])
    await binder.step()
    assert not (await at.preemptions.state(now=at.clock.now())).open
    await assert_sound(at.ledger)


async def test_gpusharing_28_the_uid_is_a_precondition(at: Scene) -> None:
    old = await at.running("old", mib=16_000)
    await at.save_budget("a")
    await at.waiting("new")
    binder = at.binder()
    await binder.step()

    await at.terminate(old)
    await at.pod("old", "a", spec={})  # another one of the same name
    at.clock.advance(30)
    await binder.step()

    assert not await at.is_deleting("old")
    [line] = (await at.preemptions.state(now=at.clock.now())).evictions
    assert line.outcome is EvictionOutcome.GONE
    assert len(await binder.step()) == 1


async def test_gpusharing_28_a_protected_pod_stays_and_another_plan_is_made(
    server: ValkeyServer,
) -> None:
    await server.ready()
    async with scene(server.url, gpus=2) as at:
        await at.running("kept", gpu=0, mib=16_000, age_s=100, labels={"app": "x"})
        await at.running("other", gpu=1, mib=16_000, age_s=9_000)
        await at.protect("x", {"app": "x"}, least=1)
        await at.save_budget("a")
        await at.waiting("new")

        binder = at.binder(evictions=Unaware(at.kube))
        await binder.step()
        at.clock.advance(30)
        await binder.step()

        assert await at.announced_for("kept") is None
        assert not await at.is_deleting("kept")
        assert await at.is_deleting("other")
        outcome, why = await Unaware(at.kube).evict(_victim(at, await at.get_pod("kept")))
        assert outcome is EvictionOutcome.BLOCKED, why


async def test_an_eviction_refused_by_an_admission_policy_blocks_no_other(
    server: ValkeyServer,
) -> None:
    await server.ready()
    async with scene(server.url, gpus=2) as at:
        refuse(at, "evictions", "pods/eviction", "CREATE", "request.name != 'kept'")
        refuse(at, "notes", "pods", "UPDATE", "object.metadata.name != 'other'")
        await at.running("kept", gpu=0, mib=16_000, age_s=100)
        await at.running("other", gpu=1, mib=16_000, age_s=9_000)
        await at.save_budget("a")
        await at.waiting("new")

        binder = at.binder()
        await binder.step()
        at.clock.advance(30)
        await binder.step()

        assert not await at.is_deleting("kept")
        assert await at.is_deleting("other")


def refuse(at: Scene, name: str, resource: str, operation: str, unless: str) -> None:
    """Have a ValidatingAdmissionPolicy refuse a write unless an expression holds."""
    kind = "admissionregistration.k8s.io/v1"
    rule = {"operations": [operation], "apiGroups": [""], "apiVersions": ["v1"]}
    spec = {
        "matchConstraints": {"resourceRules": [{**rule, "resources": [resource]}]},
        "validations": [{"expression": unless}],
    }
    policy = {"apiVersion": kind, "kind": "ValidatingAdmissionPolicy", "spec": spec}
    at.api.store.create("validatingadmissionpolicies", {**policy, "metadata": {"name": name}})
    binding = {
        "apiVersion": kind,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    at.api.store.create("validatingadmissionpolicybindings", binding)


class Unaware(EvictionClient):
    """Does not see PodDisruptionBudgets beforehand, as if they had just been made."""

    def __init__(self, kube: KubernetesClient) -> None:
        super().__init__(kube)

    async def list_pods(self) -> Any:
        pods, _ = await super().list_pods()
        return pods, []


def _victim(at: Scene, pod: Any) -> Victim:
    return Victim(
        pod=PodUid(pod["metadata"]["uid"]),
        namespace=pod["metadata"]["namespace"],
        name=pod["metadata"]["name"],
        node=NodeName("a"),
        cause=PreemptionCause.RECLAIMABLE,
        owner="",
        budget="exhausted",
        grace_s=0,
        devices=(),
    )


async def test_gpusharing_28_a_budget_made_during_the_notice_stops_the_eviction(at: Scene) -> None:
    await at.running("old", mib=16_000, labels={"app": "x"})
    await at.save_budget("a")
    await at.waiting("new")
    binder = at.binder()
    await binder.step()

    await at.protect("x", {"app": "x"}, least=1)
    at.clock.advance(30)
    await binder.step()

    assert not await at.is_deleting("old")
    assert await at.announced_for("old") is None
    assert await stage_of(at) == []
    assert not (await uses(at.ledger))[uuid("a", 0)].claimed_by


async def test_gpusharing_29_no_eviction_if_the_freed_parts_are_on_two_devices(
    server: ValkeyServer,
) -> None:
    await server.ready()
    async with scene(server.url, gpus=2) as at:
        for gpu in (0, 1):
            await at.running(f"free{gpu}", gpu=gpu)
            await at.running(f"kept{gpu}", gpu=gpu, namespace="c")
        await at.save_budget("a")
        await at.waiting("new", mib=16_000)

        await at.binder().step()

        assert await stage_of(at) == []
        assert await at.announced_for("free0") is None


async def test_gpusharing_30_no_other_pod_gets_the_freed_devices(at: Scene) -> None:
    # All of the node's cpu is taken, too: 64 cores, and the pod in need wants a tenth of one.
    old = await at.running("old", mib=8_000, cpu=64_000)
    await at.save_budget("a")
    await at.waiting("new", mib=12_000)
    binder = at.binder()
    assert "cpu" in await at.thief()

    await binder.step()
    assert (await uses(at.ledger))[uuid("a", 0)].claimed_by
    at.clock.advance(30)
    await binder.step()
    await at.terminate(old)

    assert "in-exclusive-use" in await at.thief(cpu=0)
    assert "cpu" in await at.thief(cpu=64_000)
    assert (await at.ledger.totals.claimed())[NodeName("a")] == {"cpu": 100, "pods": 1}
    [chosen] = await binder.step()
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
    await binder.step()
    await at.waiting("higher", namespace="c", mib=12_000, priority=1_000)
    at.clock.advance(30)
    await binder.step()
    await at.terminate(old)

    [chosen] = await binder.step()

    assert chosen.lease.pod == pod


async def test_gpusharing_30_capacity_is_offered_to_others_once_the_pending_pod_has_its_lease(
    at: Scene,
) -> None:
    old = await at.running("old", mib=16_000)
    await at.save_budget("a")
    await at.waiting("new", mib=12_000)
    binder = at.binder()
    await binder.step()
    at.clock.advance(30)
    await binder.step()
    await at.terminate(old)
    other = await at.waiting("small", namespace="c", mib=4_000)
    assert not (await at.ledger.waiting_pods.choose_offers(now=at.clock.now())).pods

    await binder.step()

    offered = (await at.ledger.waiting_pods.choose_offers(now=at.clock.now())).pods
    assert [each.pod for each in offered] == [other]


async def test_gpusharing_31_every_victim_has_notice_and_grace_period(at: Scene) -> None:
    await at.running("one", mib=8_000, grace_s=45)
    await at.running("two", mib=8_000, grace_s=45)
    await at.save_budget("a")
    await at.waiting("new", mib=16_000)
    binder = at.binder()

    await binder.step()
    messages = at.reports.of("one") + at.reports.of("two")
    at.clock.advance(29.9)
    await at.steps(binder, 3)

    assert len(messages) == 2
    assert all("will be evicted at" in message and "b/new" in message for message in messages)
    assert not await at.is_deleting("one")
    assert not await at.is_deleting("two")
    at.clock.advance(0.2)
    await binder.step()
    for name in ("one", "two"):
        pod = await at.get_pod(name)
        assert pod is not None
        assert pod["metadata"]["deletionGracePeriodSeconds"] == 45
    assert any("evicted for it" in message for message in at.reports.of("new"))


async def test_gpusharing_32_no_pod_of_the_same_owner_is_evicted_during_the_cooldown(
    at: Scene,
) -> None:
    binder = at.binder()
    for number, (lasts_s, evicted) in enumerate([(3_600, True), (500, False), (200, True)]):
        if await at.get_pod("old") is None:
            old = await at.running("old", mib=16_000, age_s=100)
            await at.save_budget("a")
            await at.waiting(f"new{number}")
        at.clock.advance(lasts_s)
        await binder.step()
        at.clock.advance(30)
        await binder.step()

        assert await at.is_deleting("old") is evicted
        if evicted:
            await at.terminate(old)
            [chosen] = await binder.step()
            await at.ledger.bind([chosen.lease])
            await binder.step()
            await at.ledger.release([chosen.lease.pod], reason="over")


async def test_gpusharing_33_a_refilled_budget_cancels(at: Scene) -> None:
    old = await at.running("old", mib=8_000)
    await at.save_budget("a")
    await at.waiting("new", mib=16_000)
    binder = at.binder()
    await binder.step()
    assert await at.announced_for("old") is not None
    at.clock.advance(10)

    await at.save_budget("a", "guaranteed")
    await binder.step()
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
    old = await at.running("old", mib=16_000)
    await at.save_budget("a")
    pod = await at.waiting("new")
    binder = at.binder()
    await binder.step()
    if when == "evicted":
        at.clock.advance(30)
        await binder.step()
        await at.terminate(old)

    await at.ledger.waiting_pods.remove([pod])
    await binder.step()

    assert await stage_of(at) == []
    assert not (await uses(at.ledger))[uuid("a", 0)].claimed_by
    assert await at.ledger.totals.claimed() == {}
    if when == "announced":
        assert await at.announced_for("old") is None


async def test_a_preemption_is_given_up_when_a_victim_does_not_terminate(at: Scene) -> None:
    await at.running("old", mib=16_000, grace_s=10)
    await at.save_budget("a")
    await at.waiting("new")
    binder = at.binder()
    await binder.step()
    at.clock.advance(30)
    await binder.step()

    at.clock.advance(41)
    await binder.step()

    assert await stage_of(at) == []
    assert any("took too long" in message for message in at.reports.of("new"))


async def test_gpusharing_38_every_eviction_is_attributable(at: Scene) -> None:
    await at.running("old", mib=16_000)
    await at.save_budget("a", "expired", used_units=20, remaining_units=-10)
    pod = await at.waiting("new")
    binder = at.binder()
    await binder.step()
    at.clock.advance(30)

    await binder.step()

    [line] = (await at.preemptions.state(now=at.clock.now())).evictions
    assert (line.namespace, line.name, line.cause, line.budget) == (
        "a",
        "old",
        PreemptionCause.EXPIRED,
        "overdrawn",
    )
    assert (line.for_pod, line.for_namespace, line.for_name) == (pod, "b", "new")
    assert line.devices == (uuid("a", 0),)
    [note] = [each for each in at.reports.events if each.message.startswith("evicted")]
    assert line.event == f"a/{note.event_name}"
    assert at.reports.evictions == [("a", "expired", "b")]


async def test_a_pod_of_higher_priority_preempts_one_of_lower_priority(at: Scene) -> None:
    old = await at.running("old", mib=16_000)
    await at.waiting("same", priority=0)
    binder = at.binder()
    await binder.step()
    assert await at.announced_for("old") is None

    pod = await at.waiting("high", priority=100)
    at.clock.advance(3)
    await binder.step()
    at.clock.advance(30)
    await binder.step()
    await at.terminate(old)
    [chosen] = await binder.step()

    assert chosen.lease.pod == pod
    assert any(note.reason == "GPUPriorityPreempt" for note in at.reports.events)


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
    binder = at.binder(per_namespace_hour=0 if why == "limit" else 6)
    binder.enabled = why != "disabled"

    await binder.step()

    assert await stage_of(at) == []
    assert await at.announced_for("old") is None


async def test_a_budget_policy_evicts_without_a_pending_pod(at: Scene) -> None:
    await at.running("old", mib=16_000)
    await at.save_budget("a", evict_after_minutes=1, state_since=at.clock.now())
    binder = at.binder()
    await binder.step()
    assert await at.announced_for("old") is None

    at.clock.advance(61)
    await binder.step()
    assert await at.announced_for("old") is not None
    at.clock.advance(30)
    await at.steps(binder, 2)

    assert await at.is_deleting("old")
    [line] = (await at.preemptions.state(now=at.clock.now())).evictions
    assert (line.cause, line.for_pod) == (PreemptionCause.POLICY, "")
    assert await stage_of(at) == []
