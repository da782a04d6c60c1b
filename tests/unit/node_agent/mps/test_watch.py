"""When deleted pods are noticed, and the GPU work of their programs is ended, in simulated time."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from services.node_agent import node
from services.node_agent.enforcers.enforcer import ReadBack
from services.node_agent.enforcers.mps import Mps, SharedMps
from services.node_agent.gpus.inventory import DeviceSample
from services.node_agent.kubelet.pods import Deletion
from services.node_agent.mps import watch
from services.node_agent.mps.daemon import (
    MpsDaemon,
    MpsServer,
    MpsTarget,
    StartedDaemon,
    WedgedError,
)
from services.node_agent.mps.runners import MpsRunner
from services.node_agent.mps.watch import MpsWatch
from shared.model.errors import UnavailableError
from shared.model.leases.lease import ClaimAllocation
from shared.model.names import PodUid
from tests.support.clock import FakeClock
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.node import entry_of, node_of

POD = PodUid("pod-1")
OTHER = PodUid("pod-2")
STEP_S = 0.1


@pytest.fixture(autouse=True)
def simulated_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The multiples of an interval are of the machine's time."""
    for module in (watch, node):
        monkeypatch.setattr(module, "until_tick", float)


class Kubelet:
    """Takes a while for its list, which shows what was deleted before it began."""

    def __init__(self, clock: FakeClock, reading_s: float) -> None:
        self.clock = clock
        self.reading_s = reading_s
        self.ending: dict[PodUid, Deletion] = {}
        self.reads: list[float] = []
        self.error = ""

    def delete(self, pod: PodUid, grace_s: float) -> None:
        self.ending[pod] = Deletion(self.clock.ticks() + grace_s, grace_s)

    async def list_ending(self) -> dict[PodUid, Deletion]:
        self.reads.append(self.clock.ticks())
        shown = dict(self.ending)
        if self.reading_s:
            await self.clock.sleep(self.reading_s)
        if self.error:
            raise UnavailableError(self.error)
        return shown


class Daemons:
    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.clients: tuple[int, ...] = (7,)
        self.ended_at = 0.0
        self.hanging: PodUid | None = None
        self.error = ""
        self.probed: list[PodUid] = []
        self.stopped: list[PodUid] = []
        self.on_wedged: Callable[[], None] | None = None

    async def get(self, target: MpsTarget) -> MpsDaemon:
        if target.holder == self.hanging:
            await self.clock.sleep(60.0)
        if self.error:
            raise UnavailableError(self.error)
        server = MpsServer(pid=1, status="", percent=50, memory_mib={}, clients=self.clients)
        return MpsDaemon(pipes="", servers=(server,))

    async def probe(self, target: MpsTarget) -> None:
        self.probed.append(target.holder)

    async def list(self) -> tuple[StartedDaemon, ...]:
        pods = (POD, OTHER)
        return tuple(StartedDaemon(MpsTarget(pod, "main"), 1, 0.0) for pod in pods)

    async def stop(self, target: MpsTarget, *, fence: int) -> None:
        if target.holder == self.hanging:
            await self.clock.sleep(60.0)
        self.stopped.append(target.holder)

    async def terminate(self, target: MpsTarget, clients: Iterable[int]) -> None:
        assert set(clients) == {7}
        if self.on_wedged is not None:
            self.on_wedged()
            raise WedgedError("ending the GPU work did not return")
        self.clients = ()
        self.ended_at = self.clock.ticks()


class World:
    def __init__(self, reading_s: float, kind: type[Mps] = Mps, **lease: Any) -> None:
        self.kind = kind
        self.clock = FakeClock()
        self.kubelet = Kubelet(self.clock, reading_s)
        self.daemons = Daemons(self.clock)
        self.node = node_of(self.kubelet, clock=self.clock)
        self.hold(POD, **lease)
        self.watch = MpsWatch(self.node, kind(cast("MpsRunner", self.daemons)))

    def hold(self, pod: PodUid, **lease: Any) -> None:
        held: Any = dict.fromkeys(("memory", "compute", "mode"), self.kind.facts.name)
        entry = entry_of(lease_of(pod, share(**held), **lease))
        self.node.checkpoint.by_key[entry.key] = entry

    async def run(self, duration_s: float) -> None:
        """Let the watch run for this time, from its start."""
        task = asyncio.create_task(self.watch.drain_ending())
        await self.advance(duration_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def advance(self, duration_s: float) -> None:
        for _ in range(round(duration_s / STEP_S)):
            for _ in range(20):
                await asyncio.sleep(0)
            self.clock.advance(STEP_S)


@pytest.mark.parametrize(("reading_s", "least", "most"), [(0.0, 55, 65), (0.5, 9, 12), (4.0, 6, 7)])
async def test_the_kubelets_list_is_read_the_less_the_longer_it_takes_down_to_a_bound(
    reading_s: float, least: int, most: int
) -> None:
    world = World(reading_s)

    await world.run(60.0)

    assert least <= len(world.kubelet.reads) <= most


@pytest.mark.parametrize("after_s", [2.1, 2.5, 2.9, 3.3])
@pytest.mark.parametrize(
    ("reading_s", "grace_s", "earliest_s", "killed_s"),
    [(0.0, 1, 0, 1.5), (0.3, 10, 5, 10), (4.0, 30, 15, 30)],
)
async def test_work_is_ended_before_the_kill_whenever_a_pod_is_deleted(
    after_s: float, reading_s: float, grace_s: float, earliest_s: float, killed_s: float
) -> None:
    world = World(reading_s)
    deleted_at = world.clock.now() + after_s

    async def delete() -> None:
        await world.clock.sleep(after_s)
        world.kubelet.delete(POD, grace_s)

    deletion = asyncio.create_task(delete())
    await world.run(after_s + killed_s)
    await deletion

    assert deleted_at + earliest_s <= world.daemons.ended_at < deleted_at + killed_s


async def test_a_claim_that_no_pod_uses_yet_keeps_its_work_while_other_pods_end() -> None:
    world = World(reading_s=0.0, claim=ClaimAllocation(generation="1"))
    world.kubelet.delete(PodUid("another"), 0.0)

    await world.run(3.0)

    assert not world.daemons.ended_at


async def test_a_deletion_that_was_seen_is_acted_on_while_the_list_cannot_be_read() -> None:
    world = World(reading_s=0.0)
    killed_at = world.clock.now() + 30
    world.kubelet.delete(POD, 30.0)
    await world.watch.look()
    world.kubelet.error = "the kubelet does not respond"
    world.kubelet.reading_s = 20.0

    await world.run(30.0)

    assert killed_at - 3 <= world.daemons.ended_at < killed_at


async def test_a_daemon_that_hangs_delays_the_end_of_no_other_pods_work() -> None:
    world = World(reading_s=0.0)
    other = world.daemons.hanging = PodUid("pod-0")
    world.hold(other)
    began = world.clock.now()
    world.kubelet.delete(other, 3.0)
    await world.watch.look()

    async def delete() -> None:
        await world.clock.sleep(5.0)
        world.kubelet.delete(POD, 10.0)

    deletion = asyncio.create_task(delete())
    await world.run(20.0)
    await deletion

    assert began + 5 < world.daemons.ended_at < began + 15


async def test_a_server_whose_last_container_ends_while_it_hangs_closes_no_gpu() -> None:
    world = World(reading_s=0.0)
    world.daemons.on_wedged = world.node.checkpoint.by_key.clear
    world.kubelet.delete(POD, 3.0)
    await world.watch.look()

    await world.run(5.0)

    assert not world.node.checkpoint.entries
    assert not world.watch.enforcer.faults


async def test_while_the_driver_does_not_respond_what_holds_a_container_is_not_known() -> None:
    async def sample() -> tuple[DeviceSample, ...]:
        raise UnavailableError("the NVIDIA driver did not respond")

    world = World(reading_s=0.0)
    enforcer = Mps(cast("MpsRunner", world.daemons), sample=sample)
    [entry] = world.node.checkpoint.entries

    assert await enforcer.read_back(entry) == ReadBack(unread="the NVIDIA driver did not respond")


@pytest.mark.parametrize(("before_s", "after_s"), [(-60, -60), (0, -86_400), (0, 86_400)])
async def test_a_clock_that_is_behind_or_is_set_moves_no_end_of_work(
    before_s: float, after_s: float
) -> None:
    world = World(reading_s=0.0)
    began = world.clock.ticks()
    world.clock.set_by = before_s
    world.kubelet.delete(POD, 30.0)
    await world.watch.look()
    world.clock.set_by = after_s

    await world.run(31.0)

    assert began + 26 <= world.daemons.ended_at < began + 30


async def test_a_second_deletion_that_shortens_the_grace_period_counts() -> None:
    world = World(reading_s=0.0)
    began = world.clock.ticks()
    world.kubelet.delete(POD, 3600.0)
    await world.watch.look()
    world.kubelet.delete(POD, 10.0)

    await world.run(11.0)

    assert began + 5 <= world.daemons.ended_at < began + 10


async def test_a_server_that_hangs_delays_the_probe_of_no_other() -> None:
    world = World(reading_s=0.0)
    world.hold(OTHER)
    world.daemons.hanging = POD

    probing = asyncio.create_task(world.watch.probe_once())
    await world.advance(1.0)

    assert world.daemons.probed == [OTHER]
    await world.advance(60.0)
    await probing
    assert world.daemons.probed == [OTHER, POD]


async def test_a_daemon_that_hangs_delays_the_stop_of_no_other() -> None:
    world = World(reading_s=0.0)
    world.daemons.hanging = POD

    ending = asyncio.create_task(world.watch.enforcer.end(set(), None))
    await world.advance(1.0)

    assert world.daemons.stopped == [OTHER]
    await world.advance(60.0)
    await ending
    assert world.daemons.stopped == [OTHER, POD]


async def test_a_shared_server_without_replies_closes_its_gpu_until_it_replies() -> None:
    world = World(reading_s=0.0, kind=SharedMps)
    faults = world.watch.enforcer.faults
    world.daemons.error = "server get gpu status did not end within 10 s"

    await world.watch.probe_once()
    assert not world.watch.enforcer.faults
    await world.watch.probe_once()
    [fault] = world.watch.enforcer.faults.values()
    world.daemons.error = ""
    await world.watch.probe_once()

    assert "MpsSilent" in fault
    assert "did not end within 10 s" in fault
    assert world.watch.enforcer.faults == faults == {}
