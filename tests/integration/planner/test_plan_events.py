"""What wakes planner and binder, so that they do not wait for a poll or the end of a pause."""

import asyncio
from collections.abc import Sequence

import pytest

from services.planner.preemption_planner import MAX_PLAN_S, PLAN_S, STEP_S
from shared.model.clock import SystemClock
from shared.model.events.event import Event
from shared.model.events.plan_events import PlansChanged
from shared.model.events.pod_events import PlacementChosen
from shared.model.leases.preemption import PreemptionStage
from shared.runtime.runner import run_loop
from shared.runtime.service import roles_of
from tests.support.binder.world import running
from tests.support.placer.ledger import device, report, uuid
from tests.support.planner.scene import Replicas, Scene, scene
from tests.support.servers.valkey import ValkeyServer
from tests.support.waiting import until

NEVER_S = 1_000.0
POLLS = (
    "services.planner.preemption_planner.LOOK_S",
    "services.planner.preemption_planner.STEP_S",
    "services.binder.plans.preemptions.LOOK_S",
    "services.binder.plans.preemptions.STEP_S",
)


class Running:
    """The loops of a planner, and of the binder that carries its plans out."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.placements: list[PlacementChosen] = []
        self.planner_speaks = True
        replicas.planner.preemptions.step_s = NEVER_S
        replicas.preemptions.step_s = NEVER_S

    async def publish(self, events: Sequence[Event]) -> None:
        self.placements += [event for event in events if isinstance(event, PlacementChosen)]
        if self.planner_speaks:
            await self.replicas.preemptions.note_changes(
                [event for event in events if isinstance(event, PlansChanged)]
            )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for service in (self.replicas.planner, self.replicas.preemptions):
                for role in roles_of(service):
                    if role.kind == "loops":
                        tasks.create_task(run_loop(role, self.publish))


@pytest.mark.parametrize("ended_by", ["another binder", "this binder"])
async def test_a_gpu_is_reclaimed_without_a_poll(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    for poll in POLLS:
        monkeypatch.setattr(poll, NEVER_S)
    await server.ready()
    await server.command("FLUSHALL")
    async with scene(server.url) as at:
        at.clock = SystemClock()  # type: ignore[assignment]
        old = await at.running("old", mib=16_000)
        await at.save_budget("a")
        replicas = at.binder(preemption_notice_s=0, preemption_min_runtime_s=0)
        running = Running(replicas)
        loops = asyncio.create_task(running.run())
        mirror = replicas.planner.mirror
        await until(lambda: mirror._follows)
        try:
            pod = await at.waiting("new", mib=16_000)
            await replicas.planner.preemptions.note_refused([])
            await until(lambda: at.is_deleting("old"), bool, limit_s=30)
            if ended_by == "this binder":
                running.planner_speaks = False
            await at.terminate(old)
            if ended_by == "this binder":
                replicas.preemptions.note_ended([old.pod])
            await until(lambda: running.placements, limit_s=30)
        finally:
            loops.cancel()
            await asyncio.gather(loops, return_exceptions=True)

    chosen = running.placements[0]
    assert (chosen.lease.pod, chosen.lease.shares[0].device) == (pod, uuid("a", 0))


async def test_plans_that_failed_are_made_again_soon_after_a_gpu_can_be_used_again(
    at: Scene,
) -> None:
    async def report_gpu(*, healthy: bool) -> None:
        gpu = device("a", 0, healthy=healthy)
        await at.ledger.save_devices([report("a", [gpu], at=at.clock.now())])

    _, _, binder = await at.in_need()
    mirror = binder.planner.preemptions.view.mirror
    async with running(mirror.follow_ledger):
        await until(lambda: mirror.openings)
        await report_gpu(healthy=False)
        for _ in range(5):
            at.clock.advance(MAX_PLAN_S + PLAN_S)
            await binder.preempt()
        assert not await at.stages()

        before = mirror.openings
        await report_gpu(healthy=True)
        await until(lambda: mirror.openings > before)
        at.clock.advance(PLAN_S + STEP_S)
        await binder.preempt()

        assert await at.stages() == [PreemptionStage.ANNOUNCED]
