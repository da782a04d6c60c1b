"""The budget's scheduling gate: which pods wait at it, and when it is removed."""

import asyncio
from dataclasses import replace

import pytest

from services.binder.ledger_sync.scheduling_gates import (
    BATCH,
    REFUSED_S,
    UNKNOWN_S,
    SchedulingGates,
)
from shared.ledger.waiting_pods import GatedPods
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.pod_events import PodGated
from shared.model.names import Namespace, PodUid
from tests.support.binder.world import NewWorld, World
from tests.support.planner.scene import RecordedReports, budget

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


class Gates(RecordedReports):
    """A binder's part for gates, whose Events are recorded."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.pods = world.pods
        self.store = world.ledger.part(GatedPods)
        self.part = SchedulingGates(self.store, world.pods, self, world.clock)
        self.step = self.part.remove_gates

    async def set_budget(self, new_pods: str) -> None:
        self.world.clock.advance(1)
        known = budget(TEAM, new_pods=new_pods, reported_at=self.world.clock.now())
        await self.world.binder.save_budgets([known])

    async def add(self, *pods: PodGated) -> None:
        await self.part.save_gated_pods(pods)

    async def waiting(self) -> set[str]:
        return {pod.name for pod in await self.store.load(TEAM)}

    def reasons(self, reason: str) -> list[str]:
        return [event.name for event in self.events if event.reason == reason]


@pytest.fixture
async def at(new_world: NewWorld) -> Gates:
    return Gates(await new_world())


async def test_pods_wait_while_their_budget_queues_or_denies_new_ones(at: Gates) -> None:
    await at.add(gated("a"))

    for new_pods in ("queue", "deny"):
        await at.set_budget(new_pods)
        await at.step()

    assert at.pods.opened == []
    assert at.reasons("BudgetQueued") == ["a"]


async def test_a_refilled_budget_removes_all_gates_by_priority_and_age(at: Gates) -> None:
    pods = [gated("late", 9), gated("early", 1), gated("deleted", 2), gated("high", 10, priority=5)]
    await at.add(*pods)
    at.pods.seen["deleted"] = None
    await at.set_budget("admit")

    await at.step()

    assert at.pods.opened == ["high", "early", "late"]
    assert await at.waiting() == set()
    assert at.reasons("BudgetRefilled") == ["high", "early", "late"]


async def test_a_gate_that_cannot_be_removed_blocks_no_other_and_is_retried(at: Gates) -> None:
    at.pods.errors["first"] = [RequestError("no policy lets it")]
    await at.add(gated("first", 1), gated("second", 2))
    await at.set_budget("admit")

    await at.step()
    await at.step()
    before = list(at.pods.opened)
    at.world.clock.advance(REFUSED_S)
    await at.step()

    assert (before, at.pods.opened) == (["second"], ["second", "first"])
    [message] = [event.message for event in at.events if "cannot be removed" in event.message]
    assert "no policy lets it" in message
    assert await at.waiting() == set()


async def test_a_namespace_whose_pods_cannot_be_changed_holds_up_no_other(at: Gates) -> None:
    """A webhook of the cluster that reviews its pods does not respond."""
    others = [Namespace(f"team-{letter}") for letter in "bcd"]
    at.pods.errors["stuck"] = [UnavailableError("failed calling webhook") for _ in range(3)]
    await at.add(gated("stuck"), *(replace(gated(name), namespace=name) for name in others))
    for namespace in (TEAM, *others):
        admitting = budget(namespace, new_pods="admit", reported_at=at.world.clock.now())
        await at.world.binder.save_budgets([admitting])

    for _ in range(2):
        with pytest.raises(UnavailableError):
            await at.step()

    assert sorted(at.pods.opened) == others
    with pytest.raises(UnavailableError):
        await at.step()
    await at.step()
    assert "stuck" in at.pods.opened


async def test_no_more_gates_are_removed_once_the_budget_is_exhausted_again(at: Gates) -> None:
    await at.add(*(gated(f"p{n:03d}", n) for n in range(3 * BATCH)))
    await at.set_budget("admit")

    async def exhausted() -> None:
        if len(at.pods.opened) == BATCH:
            await at.set_budget("queue")

    at.pods.after_gate = exhausted
    await at.step()

    assert len(at.pods.opened) == BATCH
    assert len(await at.waiting()) == 2 * BATCH


async def test_an_unknown_budget_keeps_gates_for_two_minutes_only(at: Gates) -> None:
    await at.add(gated("a"))

    await at.step()
    before = list(at.pods.opened)
    at.world.clock.advance(UNKNOWN_S)
    await at.step()

    assert before == []
    assert at.pods.opened == ["a"]


async def test_gated_pods_are_kept_while_the_api_server_is_unavailable(at: Gates) -> None:
    await at.add(gated("a"))
    await at.set_budget("admit")
    at.pods.away = True

    with pytest.raises(UnavailableError):
        await at.step()
    at.pods.away = False
    await at.step()

    assert at.pods.opened == ["a"]


async def test_a_changed_budget_is_handled_without_delay(at: Gates) -> None:
    await at.step()
    waiting = asyncio.create_task(at.part.wait())
    await asyncio.sleep(0)

    at.part.wake()

    async with asyncio.timeout(30):
        await waiting
    await at.add(replace(gated("a"), requeue_number=-7))
    async with asyncio.timeout(30):
        await at.part.wait()
