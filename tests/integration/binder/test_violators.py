"""Pods that break a rule of their node are evicted where the operator wants it, and no others."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.lease import Lease
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.preemption import EvictionOutcome, PreemptionCause, PreemptionStage
from tests.support.binder.preemption import Scene, scene
from tests.support.servers.valkey import ValkeyServer

EVICTED = {"evict_violators": (ViolationReason.TAMPERED, ViolationReason.UNLEASED)}


@pytest.fixture
async def at(server: ValkeyServer) -> AsyncIterator[Scene]:
    await server.ready()
    await server.command("FLUSHALL")
    async with scene(server.url, gpus=8) as made:
        yield made


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


async def open_preemptions(at: Scene) -> list[PreemptionStage]:
    return [each.preemption.stage for each in (await at.preemptions.state(now=at.clock.now())).open]


async def test_by_default_no_violator_is_evicted(at: Scene) -> None:
    lease = await at.running("bad")
    binder = at.binder()

    await binder.evict_violators([seen(at, lease, rule) for rule in ViolationReason])
    await at.steps(binder, 2)

    assert await open_preemptions(at) == []
    assert await at.announced_for("bad") is None


async def test_a_violator_is_announced_evicted_after_notice_and_recorded(at: Scene) -> None:
    lease = await at.running("bad")
    binder = at.binder(**EVICTED)

    await binder.evict_violators([seen(at, lease)])
    await binder.evict_violators([seen(at, lease)])
    await binder.step()
    announced = await at.announced_for("bad")
    at.clock.advance(at.rules.preemption_notice_s - 1)
    await binder.step()
    early = await at.is_deleting("bad")
    at.clock.advance(1)
    await at.steps(binder, 2)

    assert announced is not None
    assert not early
    assert await at.is_deleting("bad")
    assert at.writes("bad")["delete/eviction"] == 1
    assert await open_preemptions(at) == []
    (line,) = (await at.preemptions.state(now=at.clock.now())).evictions
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

    assert await open_preemptions(at) == []


async def test_a_pod_disruption_budget_protects_violators_with_an_event(at: Scene) -> None:
    lease = await at.running("bad", labels={"app": "x"})
    await at.protect("keep", {"app": "x"}, least=1)
    binder = at.binder(**EVICTED)

    await binder.evict_violators([seen(at, lease)])
    await binder.step()

    assert await open_preemptions(at) == []
    assert not await at.is_deleting("bad")
    assert await at.announced_for("bad") is None
    assert "not evicted after all" in at.reports.of("bad")[-1]


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
