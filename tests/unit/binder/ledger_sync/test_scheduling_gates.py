"""The budget's scheduling gate: which pods wait at it, and when it is removed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from services.binder.clients import PodClient
from services.binder.ledger_sync.scheduling_gates import (
    BATCH,
    REFUSED_S,
    UNKNOWN_S,
    SchedulingGates,
)
from services.binder.report.explanations import KubernetesEvent
from shared.ledger.waiting_pods import GatedPods
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.pod_events import BudgetChanged, PodGated
from shared.model.names import BUDGET_GATE, Namespace, PodUid
from tests.support.clock import FakeClock

TEAM = Namespace("team-a")


def gated(name: str, at: float = 0.0, priority: int = 0) -> PodGated:
    return PodGated(
        pod=PodUid(f"uid-{name}"),
        namespace=TEAM,
        name=name,
        resource_version="1",
        priority=priority,
        created_at=at,
    )


def budget(new_pods: str) -> BudgetChanged:
    return BudgetChanged(
        namespace=TEAM,
        state="exhausted" if new_pods != "admit" else "ok",
        previous_state="ok",
        lease_class="reclaimable",
        new_pods=new_pods,
    )


class Stage(GatedPods):
    """Store, API server and Events at once; budgets change after so many gates."""

    def __init__(self) -> None:
        self.waiting: dict[PodUid, PodGated] = {}
        self.budget: BudgetChanged | None = None
        self.opened: list[str] = []
        self.absent: set[str] = set()
        self.away = False
        self.refused: set[str] = set()
        self.tried: list[str] = []
        self.exhausted_after = 10_000
        self.events: list[KubernetesEvent] = []
        self.clock = FakeClock(1_000.0)
        self.gates = SchedulingGates(self, cast(PodClient, self), self, self.clock)

    async def save(self, pods: Sequence[PodGated]) -> None:
        self.waiting |= {pod.pod: pod for pod in pods}

    async def remove(self, namespace: Namespace, pods: Sequence[PodUid]) -> None:
        for pod in pods:
            self.waiting.pop(pod, None)

    async def namespaces(self) -> dict[Namespace, BudgetChanged | None]:
        if len(self.opened) >= self.exhausted_after:
            return {TEAM: budget("queue")}
        return {TEAM: self.budget} if self.waiting else {}

    async def load(self, namespace: Namespace) -> list[PodGated]:
        return list(self.waiting.values())

    async def remove_gate(self, namespace: str, name: str, uid: str, gate: str) -> bool:
        assert (namespace, gate, uid) == (TEAM, BUDGET_GATE, f"uid-{name}")
        if self.away:
            raise UnavailableError("no answer")
        self.tried.append(name)
        if name in self.refused:
            raise RequestError("no policy lets it")
        if name in self.absent:
            return False
        self.opened.append(name)
        return True

    def record(self, event: KubernetesEvent, *, once: bool = False) -> None:
        self.events.append(event)


async def test_pods_wait_while_their_budget_queues_or_denies_new_ones() -> None:
    at = Stage()
    await at.gates.save_gated_pods([gated("a")])

    for new_pods in ("queue", "deny"):
        at.budget = budget(new_pods)
        await at.gates.remove_gates()

    assert at.opened == []
    assert [(event.name, event.reason) for event in at.events] == [("a", "BudgetQueued")]


async def test_a_refilled_budget_removes_all_gates_by_priority_and_age() -> None:
    at = Stage()
    at.absent.add("deleted")
    pods = [gated("late", 9), gated("early", 1), gated("deleted", 2), gated("high", 10, priority=5)]
    await at.gates.save_gated_pods(pods)
    at.budget = budget("admit")

    await at.gates.remove_gates()

    assert at.opened == ["high", "early", "late"]
    assert at.waiting == {}
    refilled = [event.name for event in at.events if event.reason == "BudgetRefilled"]
    assert refilled == ["high", "early", "late"]


async def test_a_gate_that_cannot_be_removed_blocks_no_other_and_is_retried() -> None:
    at = Stage()
    at.refused.add("first")
    await at.gates.save_gated_pods([gated("first", 1), gated("second", 2)])
    at.budget = budget("admit")

    await at.gates.remove_gates()
    await at.gates.remove_gates()
    tried = at.tried.count("first")
    messages = [event.message for event in at.events if "cannot be removed" in event.message]
    at.clock.advance(REFUSED_S)
    at.refused.clear()
    await at.gates.remove_gates()

    assert (at.opened, tried) == (["second", "first"], 1)
    assert "no policy lets it" in messages[0]
    assert at.waiting == {}


async def test_no_more_gates_are_removed_once_the_budget_is_exhausted_again() -> None:
    at = Stage()
    await at.gates.save_gated_pods([gated(f"p{n:03d}", n) for n in range(3 * BATCH)])
    at.budget, at.exhausted_after = budget("admit"), BATCH

    await at.gates.remove_gates()

    assert len(at.opened) == BATCH
    assert len(at.waiting) == 2 * BATCH


async def test_an_unknown_budget_keeps_gates_for_two_minutes_only() -> None:
    at = Stage()
    await at.gates.save_gated_pods([gated("a")])

    await at.gates.remove_gates()
    before = list(at.opened)
    at.clock.advance(UNKNOWN_S)
    await at.gates.remove_gates()

    assert before == []
    assert at.opened == ["a"]


async def test_gated_pods_are_kept_while_the_api_server_is_unavailable() -> None:
    at = Stage()
    await at.gates.save_gated_pods([gated("a")])
    at.budget, at.away = budget("admit"), True

    with pytest.raises(UnavailableError):
        await at.gates.remove_gates()
    at.away = False
    await at.gates.remove_gates()

    assert at.opened == ["a"]


async def test_a_changed_budget_is_handled_without_delay() -> None:
    at = Stage()
    await at.gates.remove_gates()
    waiting = asyncio.create_task(at.gates.wait())
    await asyncio.sleep(0)

    at.gates.wake()

    async with asyncio.timeout(30):
        await waiting
    await at.gates.save_gated_pods([replace(gated("a"), requeue_number=-7)])
    async with asyncio.timeout(30):
        await at.gates.wait()
