"""What each enforcer has to do, an unknown one too: offer, set, read back, put back, end."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import REGISTRY

from services.node_agent.enforcers import table
from services.node_agent.enforcers.enforcer import Enforcer
from services.node_agent.enforcers.exclusive import Exclusive
from services.node_agent.enforcers.hami_core import HamiCore
from services.node_agent.enforcers.limit_audit import AGAIN_S, AUDIT_S, LimitAudit
from services.node_agent.enforcers.mig import Mig
from services.node_agent.enforcers.table import ALL_FACTS, Enforcers
from services.node_agent.gpus.inventory import Gpu, SharingConfig, devices_of
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.library import NodeLibrary
from services.node_agent.isolation.region_image import region_path_of
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.node import Node
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.dialects import DIALECTS
from shared.dialects.isolation_words import parse_isolation
from shared.model.errors import UnavailableError
from shared.model.leases.lease import MIB, Lease, LeaseState
from shared.model.names import NodeName, PodUid
from shared.model.requests.placement import Placement
from shared.model.requests.request import GpuRequest
from simcluster.node_agent.gpus import SimulatedGpus
from tests.support.build import lease, ledger_node, request, share
from tests.support.clock import FakeClock
from tests.support.node_agent.fake_enforcer import FakeEnforcer, place_of
from tests.support.node_agent.node import entry_of, node_of
from tests.support.placer.placing import Cluster
from tests.support.simcluster.kubelet import NODE
from tests.support.waiting import until


@dataclass(kw_only=True)
class World:
    """A node with one enforcer, and how its limits are altered and lost from outside."""

    enforcer: Enforcer
    files: ContainerFiles
    node: Node
    clock: FakeClock

    @property
    def audit(self) -> LimitAudit:
        return LimitAudit(self.node)

    @asynccontextmanager
    async def auditing(self) -> AsyncIterator[LimitAudit]:
        audit = self.audit
        task = asyncio.create_task(audit.run())
        try:
            await until(lambda: self.clock.sleepers)
            yield audit
        finally:
            task.cancel()

    async def pass_time(self, seconds: float) -> None:
        """Let the next comparison begin, and wait until it has ended.

        A tick that is nearer than a hundredth of the interval is skipped (`until_next`).
        """
        self.clock.advance(1.01 * seconds)
        await until(lambda: self.clock.sleepers)

    def leased(self, mib: int = 3_000) -> Lease:
        name: Any = self.enforcer.facts.name
        words = {"memory": name, "compute": name, "mode": name}
        part = share(memory_mib=mib, cores_percent=30, slot=0, fence=1, **words)
        held = lease("uid-1", NODE, part, dialect="volcano-vgpu", state=LeaseState.BOUND)
        return structs.replace(held, version=mib)

    def entry(self, mib: int = 3_000) -> CheckpointEntry:
        held = self.leased(mib)
        setup = DIALECTS["volcano-vgpu"].container_setup(held, "main", {}, self.files.paths)
        return entry_of(held, setup)

    async def prepared(self) -> CheckpointEntry:
        entry = self.entry()
        await self.node.enforcers.prepare(entry, starting=True)
        await self.node.checkpoint.save(entry)
        self.node.leases.observe([entry.lease])
        return entry

    def alter(self, entry: CheckpointEntry) -> None:
        if isinstance(self.enforcer, FakeEnforcer):
            [limit] = self.enforcer.table[place_of(entry)]
            altered = replace(limit, memory_bytes=9_000 * MIB)
            self.enforcer.table[place_of(entry)] = (altered,)
            return
        with Path(self.region(entry)).open("r+b") as region:
            os.pwrite(region.fileno(), struct.pack("<Q", 9_000 * MIB), V1_2.memory_limits)

    def lose(self, entry: CheckpointEntry) -> None:
        if isinstance(self.enforcer, FakeEnforcer):
            del self.enforcer.table[place_of(entry)]
        else:
            Path(self.region(entry)).unlink()

    def region(self, entry: CheckpointEntry) -> PurePosixPath:
        path = region_path_of(entry.limits)
        assert path is not None
        return path

    def put_back(self, outcome: str) -> float:
        labels = {"enforcer": self.enforcer.facts.name, "outcome": outcome}
        return REGISTRY.get_sample_value("leasehold_limits_put_back_total", labels) or 0.0


@pytest.fixture(params=["hami-core", "fake"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    library = NodeLibrary(tmp_path / "library", None)
    files = ContainerFiles(PurePosixPath(tmp_path / "state"), library)
    await files.create_shared_files()
    await library.update()
    enforcer = FakeEnforcer() if request.param == "fake" else HamiCore(files)
    checkpoint = Checkpoint(tmp_path / "checkpoint.json", NodeName(NODE))
    clock = FakeClock()
    node = node_of(
        files=files,
        checkpoint=checkpoint,
        enforcers=Enforcers((Exclusive(), Mig(), enforcer)),
        clock=clock,
    )
    return World(enforcer=enforcer, files=files, node=node, clock=clock)


@pytest.mark.parametrize("facts", [*ALL_FACTS, FakeEnforcer.facts], ids=lambda facts: facts.name)
def test_operators_read_what_it_holds_and_what_it_does_not(facts: Any) -> None:
    assert facts.memory or facts.compute
    assert all((facts.not_held, facts.needs, facts.resize, facts.shown))


async def test_a_device_offers_it_unless_something_is_missing(world: World) -> None:
    gpus = await SimulatedGpus(NodeName("n"), "1xT4").discover()
    sharing = SharingConfig()
    name: Any = world.enforcer.facts.name

    [offering] = world.node.enforcers.offered(devices_of(gpus, sharing), gpus, sharing)
    if isinstance(world.enforcer, FakeEnforcer):
        world.enforcer.reason = "its daemon is not installed"
    world.files.library.unusable_reason = "it does not exist"
    [lacking] = world.node.enforcers.offered(devices_of(gpus, sharing), gpus, sharing)

    assert (offering.offer.memory, offering.offer.compute) == ((name,), (name,))
    assert (lacking.offer.memory, lacking.offer.compute) == ((), ())
    assert [missing.name for missing in lacking.missing] == [name]
    assert lacking.missing_text


async def test_a_pod_that_demands_it_gets_a_lease_that_says_so(world: World) -> None:
    gpus = await SimulatedGpus(NodeName("n"), "1xT4").discover()
    sharing = SharingConfig()
    name = world.enforcer.facts.name
    devices = world.node.enforcers.offered(devices_of(gpus, sharing), gpus, sharing)
    demand = parse_isolation(name)
    wanted = request(
        GpuRequest(container="main", gpus=1, memory_units=100, cores_percent=30, held_by=demand)
    )

    answer = Cluster(ledger_node("n", *devices)).place(wanted)

    assert isinstance(answer, Placement)
    assert (answer.shares[0].memory, answer.shares[0].compute) == (name, name)


async def test_what_was_set_is_read_back_however_often_it_is_set(world: World) -> None:
    entry = await world.prepared()

    await world.node.enforcers.prepare(entry)
    read = await world.enforcer.read_back(entry)

    assert read is not None
    assert tuple(read.limits) == world.enforcer.wanted(entry)
    assert list(world.enforcer.audit(entry, read)) == []


async def test_an_altered_limit_is_reported_with_both_numbers_and_put_back(world: World) -> None:
    entry = await world.prepared()
    before = world.put_back("done")
    audit = world.audit
    world.alter(entry)

    await audit.audit()

    [violation] = audit.violations
    assert violation.reason == world.enforcer.differs_reason
    assert "holds it to 9000.0 MiB" in violation.message
    assert "instead of 3000.0" in violation.message
    [read] = audit.read.values()
    assert read.memory_bytes == 9_000 * MIB
    assert world.put_back("done") == before + 1
    await audit.audit()
    assert audit.violations == ()
    [read] = audit.read.values()
    assert (read.memory_bytes, read.difference) == (3_000 * MIB, "")


async def test_a_lost_limit_is_put_back_by_an_agent_that_starts(world: World) -> None:
    entry = await world.prepared()
    world.lose(entry)

    started = world.audit
    await started.audit()

    assert [found.reason for found in started.violations] == [world.enforcer.missing_reason]
    await started.audit()
    assert started.violations == ()


@pytest.mark.parametrize("world", ["fake"], indirect=True)
async def test_what_cannot_be_read_is_no_violation_and_is_read_again_soon(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    entry = await world.prepared()
    enforcer = world.enforcer
    assert isinstance(enforcer, FakeEnforcer)
    async with world.auditing() as audit:
        enforcer.unread = "no partitioner responds"
        world.lose(entry)
        await world.pass_time(AUDIT_S)
        for _ in range(2):
            [read] = audit.read.values()
            assert (read.memory_bytes, read.unread) == (3_000 * MIB, "no partitioner responds")
            assert audit.violations == ()
            await world.pass_time(AGAIN_S)
        assert caplog.text.count("no partitioner responds") == 1

        enforcer.unread = ""
        await world.pass_time(AGAIN_S)

        [violation] = audit.violations
        assert violation.reason == enforcer.missing_reason
        assert place_of(entry) in enforcer.table


async def test_limits_that_may_be_gone_are_put_back_without_delay(world: World) -> None:
    entry = await world.prepared()
    async with world.auditing() as audit:
        world.lose(entry)

        world.node.audit_due.set()

        await until(lambda: audit.violations)


async def test_limits_of_ended_leases_are_not_put_back(world: World) -> None:
    entry = await world.prepared()
    world.lose(entry)
    world.node.leases.end([entry.lease.pod])

    audit = world.audit
    await audit.audit()

    assert audit.violations == ()
    assert audit.read == {}


async def test_a_new_size_is_set_and_read_back(world: World) -> None:
    await world.prepared()
    smaller = world.entry(2_000)

    await world.node.enforcers.resize(smaller)

    read = await world.enforcer.read_back(smaller)
    assert read is not None
    assert [limit.memory_bytes for limit in read.limits] == [2_000 * MIB]


@pytest.mark.parametrize("world", ["fake"], indirect=True)
async def test_a_size_that_does_not_hold_is_an_error(world: World) -> None:
    await world.prepared()
    assert isinstance(world.enforcer, FakeEnforcer)
    world.enforcer.ignores = True

    with pytest.raises(UnavailableError, match=r"3000\.0 MiB of GPU GPU-a instead of 2000\.0"):
        await world.node.enforcers.resize(world.entry(2_000))


async def test_what_ended_pods_had_is_removed(world: World) -> None:
    entry = await world.prepared()
    if not isinstance(world.enforcer, FakeEnforcer):
        os.utime(world.region(entry).parent, (1, 1))
    await world.node.enforcers.end({PodUid("uid-1")}, None)
    kept = await world.enforcer.read_back(entry)
    await world.node.enforcers.end(set(), None)
    gone = await world.enforcer.read_back(entry)

    assert kept is not None
    assert not kept.problem
    assert gone is not None
    assert gone.problem


class HangingEnforcer(FakeEnforcer):
    """Its daemon does not reply while `released` is not set."""

    facts = replace(FakeEnforcer.facts, name="driver")

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()

    async def find_out(self, gpus: Sequence[Gpu]) -> None:
        await self.released.wait()

    def unready_reason(self) -> str:
        return "the agent itself is limited" if self.released.is_set() else ""

    async def end(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        await self.released.wait()
        await super().end(live, mounted)


async def test_an_enforcer_that_hangs_delays_no_probe_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "FIND_OUT_S", 0.01)
    hanging = HangingEnforcer()
    enforcers = Enforcers((hanging,))

    first = asyncio.create_task(enforcers.find_out(()))
    await asyncio.sleep(0.05)
    assert not first.done(), "nothing is known yet"
    hanging.released.set()
    with pytest.raises(UnavailableError, match="itself is limited"):
        await first
    hanging.released.clear()

    async with asyncio.timeout(10):
        await enforcers.find_out(())
        await enforcers.find_out(())
    hanging.released.set()
    with pytest.raises(UnavailableError, match="itself is limited"):
        await enforcers.find_out(())


async def test_two_probes_at_once_wait_for_the_same_enforcers() -> None:
    hanging = HangingEnforcer()
    enforcers = Enforcers((hanging,))

    probes = asyncio.gather(*(enforcers.find_out(()) for _ in range(2)), return_exceptions=True)
    await asyncio.sleep(0)
    hanging.released.set()

    assert [str(error) for error in await probes] == 2 * ["the agent itself is limited"]


async def test_an_enforcer_that_hangs_delays_no_cleanup_by_others(world: World) -> None:
    entry = await world.prepared()
    if not isinstance(world.enforcer, FakeEnforcer):
        os.utime(world.region(entry).parent, (1, 1))
    hanging = HangingEnforcer()
    enforcers = Enforcers((hanging, world.enforcer))

    ending = asyncio.create_task(enforcers.end(set(), None))

    async def has_ended() -> bool:
        read = await world.enforcer.read_back(entry)
        return read is not None and bool(read.problem)

    await until(has_ended)
    assert not ending.done()
    hanging.released.set()
    await ending
