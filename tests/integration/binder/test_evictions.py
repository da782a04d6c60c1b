"""Evictions of a preemption: announced, sent with a precondition, limited and recorded."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.binder.clients import PodClient
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import ErrorResponse, KubernetesConflictError
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.errors import UnavailableError
from shared.model.names import NodeName, PodUid
from shared.model.preemption import EvictionOutcome, PreemptionCause, Victim
from tests.support.binder.preemption import Scene, scene
from tests.support.placer.ledger import uuid
from tests.support.servers.valkey import ValkeyServer


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

        binder = at.binder(pods=Unaware(at.kube))
        await at.evict(binder)

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


class Unaware(PodClient):
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
        await binder.step()
    at.clock.advance(30)
    await binder.step()

    assert await at.announced_for("old")
    assert not await at.is_deleting("old")
    at.clock.advance(30)
    await binder.step()
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

    await binder.step()
    messages = at.reports.of("one") + at.reports.of("two")
    at.clock.advance(29.9)
    await at.steps(binder, 3)

    assert len(messages) == 2
    assert all("will be evicted at" in message for message in messages)
    assert all("and a pod of another namespace, whose" in message for message in messages)
    assert not await at.is_deleting("one")
    assert not await at.is_deleting("two")
    at.clock.advance(0.2)
    await binder.step()
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
            [chosen] = await binder.step()
            await at.ledger.bind([chosen.lease])
            await binder.step()
            await at.ledger.release([chosen.lease.pod], reason="over")


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
    assert at.reports.evictions == {("a", "expired"): 1}
