"""Evictions: announced, sent with a precondition, limited, recorded, continued by any binder."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.binder.clients import PodClient
from services.planner.clients import PlannerClient
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import ErrorResponse, KubernetesConflictError
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.errors import UnavailableError
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.leases.lease import Lease
from shared.model.leases.preemption import (
    EvictionOutcome,
    PreemptionCause,
    PreemptionStage,
    Victim,
)
from shared.model.names import Namespace, NodeName, PodUid
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.placer.ledger import rebuild, uuid
from tests.support.planner.scene import Scene


async def test_gpusharing_28_the_uid_is_a_precondition(at: Scene) -> None:
    old, _, binder = await at.in_need()
    await binder.preempt()

    await at.terminate(old)
    await at.pod("old", "a", spec={})  # another one of the same name
    at.clock.advance(30)
    await binder.preempt()

    assert not await at.is_deleting("old")
    [line] = await at.evictions()
    assert line.outcome is EvictionOutcome.GONE
    assert len(await binder.preempt()) == 1


@pytest.mark.parametrize("at", [2], indirect=True)
async def test_gpusharing_28_a_protected_pod_stays_and_another_plan_is_made(at: Scene) -> None:
    await at.running("kept", gpu=0, mib=16_000, age_s=100, labels={"app": "x"})
    await at.running("other", gpu=1, mib=16_000, age_s=9_000)
    await at.protect("x", {"app": "x"}, least=1)
    await at.save_budget("a")
    await at.waiting("new")

    binder = at.binder(reader=Unaware(at.kube))
    await binder.preempt()
    assert [record.outcome for record in await at.evictions()] == [EvictionOutcome.BLOCKED]
    at.clock.advance(3)
    await at.evict(binder)

    assert await at.announced_for("kept") is None
    assert not await at.is_deleting("kept")
    assert await at.is_deleting("other")
    outcome, why = await PodClient(at.kube).evict(_victim(at, await at.get_pod("kept")))
    assert outcome is EvictionOutcome.BLOCKED, why


@pytest.mark.parametrize("at", [2], indirect=True)
async def test_an_eviction_refused_by_an_admission_policy_blocks_no_other(at: Scene) -> None:
    refuse(at, "evictions", "pods/eviction", "CREATE", "request.name != 'kept'")
    refuse(at, "notes", "pods", "UPDATE", "object.metadata.name != 'other'")
    await at.running("kept", gpu=0, mib=16_000, age_s=100)
    await at.running("other", gpu=1, mib=16_000, age_s=9_000)
    await at.save_budget("a")
    await at.waiting("new")

    binder = at.binder()
    await binder.preempt()
    at.clock.advance(3)
    await at.evict(binder)

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


class Unaware(PlannerClient):
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


class ConflictingOnce(KubernetesClient):
    """The API server reports a conflict at the first write to a pod, although the pod is there."""

    conflicts = 1

    async def _send(
        self, method: str, path: str, body: bytes | None = None, *args: Any, **options: Any
    ) -> bytes:
        if self.conflicts and body is not None and b"dryRun" not in body:
            self.conflicts -= 1
            response = ErrorResponse(
                method=method, path=path, code=409, reason="Conflict", message="it was modified"
            )
            raise KubernetesConflictError(response)
        return await super()._send(method, path, body, *args, **options)


@pytest.fixture
async def conflicting(at: Scene) -> AsyncIterator[PodClient]:
    async with ConflictingOnce(load_credentials(at.api.kubeconfig)) as kube:
        yield PodClient(kube)


async def test_a_pod_is_not_evicted_before_a_conflicting_announcement_was_repeated(
    at: Scene, conflicting: PodClient
) -> None:
    await at.running("old", mib=16_000)
    await at.save_budget("a")
    await at.waiting("new")
    binder = at.binder(pods=conflicting)

    with pytest.raises(UnavailableError):
        await binder.preempt()
    at.clock.advance(30)
    await binder.preempt()

    assert await at.announced_for("old")
    assert not await at.is_deleting("old")
    at.clock.advance(30)
    await binder.preempt()
    assert await at.is_deleting("old")


async def test_a_conflict_does_not_mean_that_the_pod_is_gone(
    at: Scene, conflicting: PodClient
) -> None:
    await at.running("old", mib=16_000)
    victim = _victim(at, await at.get_pod("old"))

    with pytest.raises(UnavailableError):
        await conflicting.evict(victim)

    assert await conflicting.evict(victim) == (EvictionOutcome.EVICTED, "")


async def test_gpusharing_31_every_victim_has_notice_and_grace_period(at: Scene) -> None:
    await at.running("one", mib=8_000, grace_s=45)
    await at.running("two", mib=8_000, grace_s=45)
    await at.save_budget("a")
    await at.waiting("new", mib=16_000)
    binder = at.binder()

    await binder.preempt()
    messages = at.reports.of("one") + at.reports.of("two")
    at.clock.advance(29.9)
    await at.steps(binder, 3)

    assert len(messages) == 2
    assert all("will be evicted at" in message for message in messages)
    assert all("and a pod of another namespace, whose" in message for message in messages)
    assert not await at.is_deleting("one")
    assert not await at.is_deleting("two")
    at.clock.advance(0.2)
    await binder.preempt()
    for name in ("one", "two"):
        pod = await at.get_pod(name)
        assert pod is not None
        assert pod["metadata"]["deletionGracePeriodSeconds"] == 45
    [text] = [message for message in at.reports.of("new") if "evicted for it" in message]
    assert text.startswith("2 pods are evicted for it on a at ")
    assert text.endswith(": a pod of another namespace")


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
        await at.evict(binder)

        assert await at.is_deleting("old") is evicted
        if evicted:
            await at.terminate(old)
            [chosen] = await binder.preempt()
            await at.ledger.bind([chosen.lease])
            await binder.preempt()
            await at.ledger.release([chosen.lease.pod], reason="over")


async def test_gpusharing_38_every_eviction_is_attributable(at: Scene) -> None:
    await at.running("old", mib=16_000)
    await at.save_budget("a", "expired", used_units=20, remaining_units=-10)
    pod = await at.waiting("new")
    binder = at.binder()
    await binder.preempt()
    at.clock.advance(30)

    await binder.preempt()

    [line] = await at.evictions()
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
    assert at.reports.evictions == {("a", "expired"): 1}


async def test_without_notice_a_pod_is_evicted_in_the_first_step(at: Scene) -> None:
    await at.in_need()

    await at.binder(preemption_notice_s=0).preempt()

    assert await at.is_deleting("old")
    assert await at.announced_for("old") is None
    assert [record.outcome for record in await at.evictions()] == [EvictionOutcome.EVICTED]
    assert len(at.reports.of("old")) == 1


@pytest.mark.parametrize("notice_s", [0, 30])
async def test_what_can_be_evicted_is_recorded_although_another_pod_cannot(
    at: Scene, notice_s: float
) -> None:
    await at.running("one", mib=8_000)
    await at.running("two", mib=8_000)
    await at.save_budget("a")
    await at.waiting("new", mib=16_000)
    binder = at.binder(pods=Refusing(at.kube, "two"), preemption_notice_s=notice_s)

    await at.evict(binder)

    assert [await at.is_deleting(name) for name in ("one", "two")] == [True, False]
    outcomes = {record.name: record.outcome for record in await at.evictions()}
    assert outcomes == {"one": EvictionOutcome.EVICTED}
    assert await at.stages() == [PreemptionStage.EVICTING]  # and tried again


async def test_a_binder_that_leads_no_more_evicts_no_further_pods(
    at: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.binder.plans.preemptions.VICTIMS_AT_ONCE", 1)
    for name in ("one", "two"):
        await at.running(name, mib=8_000)
    await at.save_budget("a")
    await at.waiting("new", mib=16_000)
    binder = at.binder()
    await binder.preempt()
    at.clock.advance(30)
    leads = iter([True, True, False])  # at the start, at the second dry run, at the second eviction

    async def holds() -> bool:
        return next(leads)

    monkeypatch.setattr(binder.preemptions.leadership, "holds", holds)

    with pytest.raises(UnavailableError, match="another binder leads"):
        await binder.preemptions.carry_out()
    assert [await at.is_deleting(name) for name in ("one", "two")].count(True) == 1

    await _turn_over(at)
    await at.binder().preempt()
    assert [await at.is_deleting(name) for name in ("one", "two")] == [True, True]
    assert len(await at.evictions()) == 2


class Refusing(PodClient):
    """The eviction of one pod is refused, but not its dry run."""

    def __init__(self, kube: KubernetesClient, name: str) -> None:
        super().__init__(kube)
        self.name = name

    async def evict(
        self, victim: Victim | PodSnapshot, *, dry_run: bool = False
    ) -> tuple[EvictionOutcome, str]:
        if victim.name == self.name and not dry_run:
            return EvictionOutcome.BLOCKED, "it would violate the pod's disruption budget"
        return await super().evict(victim, dry_run=dry_run)


class KilledError(Exception):
    """The binder ended here."""


class Mortal(PodClient):
    """Kills its binder before or after the nth call that changes something."""

    def __init__(self, kube: KubernetesClient, *, at: int, after: bool) -> None:
        super().__init__(kube)
        self.left = at
        self.after = after

    def _die(self, *, after: bool) -> None:
        if after is self.after:
            self.left -= 1
            if self.left == 0:
                raise KilledError

    async def announce(self, victim: Victim, at: float) -> None:
        self._die(after=False)
        await super().announce(victim, at)
        self._die(after=True)

    async def evict(
        self, victim: Victim | PodSnapshot, *, dry_run: bool = False
    ) -> tuple[EvictionOutcome, str]:
        self._die(after=False)
        done = await super().evict(victim, dry_run=dry_run)
        self._die(after=True)
        return done


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", range(1, 9))
async def test_another_binder_continues_wherever_one_is_killed(
    at: Scene, call: int, after: bool
) -> None:
    one = await at.running("one", mib=8_000)
    two = await at.running("two", mib=8_000)
    await at.save_budget("a")
    pod = await at.waiting("new", mib=16_000)
    binder = at.binder(pods=Mortal(at.kube, at=call, after=after))
    with pytest.raises(KilledError):
        await at.evict(binder)
    successor = at.binder()
    assert await successor.preempt() == []  # the dead one's turn is not over
    await _turn_over(at)

    await at.evict(successor)
    await at.terminate(one)
    await at.terminate(two)
    [chosen] = await successor.preempt()

    assert chosen.lease.pod == pod
    for name in ("one", "two"):
        writes = at.writes(name)
        assert writes.get("delete/eviction") == 1, writes
    past = await at.evictions()
    assert sorted(line.name for line in past) == ["one", "two"]


async def test_a_lease_whose_event_was_lost_is_published_again(at: Scene) -> None:
    old, _, binder = await at.in_need()
    await at.evict(binder)
    await at.terminate(old)
    [placement] = await binder.preempt()  # and killed before it is published
    await _turn_over(at)

    assert await at.binder().preempt() == [placement]


async def test_two_binders_do_not_both_evict(at: Scene) -> None:
    await at.running("old", mib=16_000)
    await at.save_budget("a")
    await at.waiting("new")
    binders = [at.binder() for _ in range(3)]

    for _ in range(3):
        await asyncio.gather(*(binder.preempt() for binder in binders))
        at.clock.advance(30)

    assert at.writes("old")["delete/eviction"] == 1
    assert len(await at.evictions()) == 1


async def test_another_planner_plans_once_the_turn_of_a_dead_one_is_over(at: Scene) -> None:
    dead = at.binder()
    await at.running("old", mib=16_000)
    await at.save_budget("a")
    await dead.preempt()
    await at.waiting("new")
    successor = at.binder()

    await successor.planner.preemptions.plan()
    before = await at.stages()
    await _turn_over(at)
    at.clock.advance(3)
    await successor.planner.preemptions.plan()

    assert (before, await at.stages()) == ([], [PreemptionStage.OPENED])


async def test_a_rebuilt_ledger_cancels(at: Scene) -> None:
    old, _, binder = await at.in_need()
    await binder.preempt()

    await rebuild(at.ledger, kept=[old], now=at.clock.now(), force=True)
    await binder.preempt()

    assert await at.announced_for("old") is None
    assert not await at.stages()


async def _turn_over(at: Scene) -> None:
    """Wait until the leader's turn is over: the server's clock is real."""
    prefix = at.ledger._connection.prefix.removesuffix(":")
    leaders = [f"{prefix}-preemption:leader:{service}" for service in ("binder", "planner")]
    await at.preemptions._connection._redis.delete(*leaders)


EVICTED = {"evict_violators": (ViolationReason.TAMPERED, ViolationReason.UNLEASED)}


def seen(
    at: Scene, lease: Lease, rule: ViolationReason = ViolationReason.TAMPERED, **changes: Any
) -> ViolationFound:
    facts: dict[str, Any] = {
        "node": lease.node,
        "pod": lease.pod,
        "namespace": lease.namespace,
        "name": lease.name,
        "container": "main",
        "reason": rule,
        "message": "container main has changed its limits",
        "found_at": at.clock.now(),
    }
    return ViolationFound(**(facts | changes))


async def test_by_default_no_violator_is_evicted(at: Scene) -> None:
    lease = await at.running("bad")
    binder = at.binder()

    await binder.evict_violators([seen(at, lease, rule) for rule in ViolationReason])
    await at.steps(binder, 2)

    assert await at.stages() == []
    assert await at.announced_for("bad") is None


async def test_a_violator_is_announced_evicted_after_notice_and_recorded(at: Scene) -> None:
    lease = await at.running("bad")
    binder = at.binder(**EVICTED)

    await binder.evict_violators([seen(at, lease)])
    await binder.evict_violators([seen(at, lease)])
    await binder.preempt()
    announced = await at.announced_for("bad")
    at.clock.advance(at.rules.preemption_notice_s - 1)
    await binder.preempt()
    early = await at.is_deleting("bad")
    at.clock.advance(1)
    await at.steps(binder, 2)

    assert announced is not None
    assert not early
    assert await at.is_deleting("bad")
    assert at.writes("bad")["delete/eviction"] == 1
    assert await at.stages() == []
    (line,) = await at.evictions()
    assert (line.cause, line.outcome, line.for_pod) == (
        PreemptionCause.VIOLATION,
        EvictionOutcome.EVICTED,
        "",
    )
    assert {note.reason for note in at.reports.events} == {"GPUViolationEvict"}
    cause = "its node reports GpuLimitTampered: container main has changed its limits"
    assert [cause in text for text in at.reports.of("bad")] == [True, True]
    assert at.reports.evictions == {("a", "violation"): 1}


async def test_a_pod_without_a_lease_is_evicted_too(at: Scene) -> None:
    made = await at.pod("stranger", "a", spec={})
    uid = PodUid(made["metadata"]["uid"])
    await at.kube.bind_pod("a", "stranger", uid, "a", {})
    binder = at.binder(**EVICTED, preemption_notice_s=0)
    lease = Lease(pod=uid, namespace=Namespace("a"), name="stranger", node=NodeName("a"), shares=())

    await binder.evict_violators([seen(at, lease, ViolationReason.UNLEASED)])
    await at.steps(binder, 2)

    assert await at.is_deleting("stranger")


@pytest.mark.parametrize(
    "changes",
    [
        {"reason": ViolationReason.OVERRUN},
        {"pod": PodUid("another of this name")},
        {"node": NodeName("of a thief")},
        {"found_at": 0.0},
        {"name": "gone"},
        {"namespace": Namespace("c")},
    ],
    ids=["another rule", "another uid", "another node", "long ago", "gone", "spared"],
)
async def test_untrusted_or_irrelevant_reports_evict_no_pod(
    at: Scene, changes: dict[str, Any]
) -> None:
    namespace = changes.get("namespace", "a")
    lease = await at.running("good", namespace=namespace)
    binder = at.binder(**EVICTED, evict_violators_spare=("c",))

    await binder.evict_violators([seen(at, lease, **changes)])

    assert await at.stages() == []


async def test_a_pod_disruption_budget_protects_violators_with_an_event(at: Scene) -> None:
    lease = await at.running("bad", labels={"app": "x"})
    await at.protect("keep", {"app": "x"}, least=1)
    binder = at.binder(**EVICTED)

    await binder.evict_violators([seen(at, lease)])
    await binder.preempt()

    assert await at.stages() == []
    assert not await at.is_deleting("bad")
    assert await at.announced_for("bad") is None
    assert "not evicted after all" in at.reports.of("bad")[-1]


@pytest.mark.parametrize("at", [4], indirect=True)
async def test_hourly_limits_apply_to_simultaneous_violators(at: Scene) -> None:
    leases = [await at.running(f"bad{n}", gpu=n, owner=f"o{n}") for n in range(4)]
    binder = at.binder(**EVICTED, preemption_notice_s=0, preemption_per_namespace_hour=2)

    await binder.evict_violators([seen(at, lease) for lease in leases])
    await at.steps(binder, 3)
    at.clock.advance(300)
    late = [lease for lease in leases if not await at.is_deleting(lease.name)]
    await binder.evict_violators([seen(at, lease) for lease in late])
    await at.steps(binder, 3)
    ending = [lease.name for lease in leases if await at.is_deleting(lease.name)]
    at.clock.advance(3600)
    await binder.evict_violators([seen(at, lease) for lease in late])
    await at.steps(binder, 3)

    assert len(ending) == 2
    assert "at most 2 pods of a namespace are evicted in an hour" in at.reports.of(late[0].name)[0]
    assert all([await at.is_deleting(lease.name) for lease in leases])
