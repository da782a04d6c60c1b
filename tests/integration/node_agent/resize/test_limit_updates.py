"""Limits of running containers that follow their leases, by an agent beside a simulated kubelet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.binder.resize.rules import SizeChange, decide
from services.node_agent.agent_timing import AgentTiming
from services.node_agent.isolation.region import Region, RegionPath
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.service import NodeAgent
from shared.model.device import DeviceUse
from shared.model.events.node_events import ViolationFound
from shared.model.events.request_reply import LimitsReply, LimitsRequest, ResizeRequest
from shared.model.lease import Lease, LeaseState, RequestedUnits, ShareSize
from shared.model.ledger import LedgerNode
from shared.model.node import NodeFacts
from tests.support.node_agent.agent import NUMBER, Site, share, site
from tests.support.node_agent.regions import path_of, process
from tests.support.simcluster.kubelet import pod
from tests.support.waiting import until

MIB = 1 << 20
MEMORY = "volcano.sh/vgpu-memory"
CRASHING = {"sim.leasehold.dev/run-for": "50ms", "sim.leasehold.dev/exit-code": "3"}
T4_MIB = 15_360


def sized(lease: Lease, mib: int, cores: int = 10, *, later: int = 1) -> Lease:
    """Return a lease as it is after a resize; `later` is by how much its version is higher."""
    shares = tuple(
        structs.replace(
            each,
            memory_mib=mib,
            cores_percent=cores,
            requested_size=each.requested_size
            or ShareSize(memory_mib=each.memory_mib, cores_percent=10),
        )
        for each in lease.shares
    )
    return structs.replace(lease, shares=shares, version=lease.version + later, resized_at=1.0)


def region_of(at: Site, lease: Lease) -> RegionPath:
    name = Path(at.env(lease.name)["CUDA_DEVICE_MEMORY_SHARED_CACHE"]).name
    return RegionPath(
        directory=str(at.root / "agent" / "containers" / f"{lease.pod}_main"), name=name
    )


def limit_mib(place: RegionPath) -> int:
    region = read_region(place)
    assert isinstance(region, Region)
    return region.memory_limits[0] // MIB


def use(place: RegionPath, mib: int) -> None:
    """Have a process of the container use memory."""
    image = bytearray(path_of(place).read_bytes())
    process(image, 0, 7, totals=(mib * MIB,))
    with path_of(place).open("r+b") as file:
        file.write(image)


@asynccontextmanager
async def running(at: Site, *, mib: int = 4_000) -> AsyncIterator[tuple[NodeAgent, Lease]]:
    """Run an agent and, on it, a pod whose lease is active."""
    async with at.running() as agent:
        lease = at.bind(pod("one", limits={NUMBER: 1}), share(0, mib))
        await at.node.phase("one", "Running")
        lease = at.ledger.grant(structs.replace(lease, state=LeaseState.ACTIVE, version=3))
        await at.tell(lease)
        yield agent, lease


async def ask(agent: NodeAgent, lease: Lease, turn: str = "", *, over: bool = False) -> LimitsReply:
    question = LimitsRequest(node=agent.route, lease=lease, resize_id=turn, finished=over)
    return await agent.update_limits(question)


async def test_hami_core_12_a_larger_lease_raises_the_limit_of_the_running_container() -> None:
    async with site() as at, running(at) as (agent, lease):
        place = region_of(at, lease)
        use(place, 3_000)
        before = path_of(place).read_bytes()
        await at.tell(at.ledger.grant(sized(lease, 6_000, 30)))
        await until(lambda: limit_mib(place) == 6_000)
        after = path_of(place).read_bytes()
        started = at.node.container("one").started_at

        assert (await ask(agent, sized(lease, 6_000, 30))).applied
        assert at.node.container("one").started_at == started
        told = agent.checkpoint.allocations[0].lease
        assert told == sized(lease, 6_000, 30), "a rebuilt ledger learns of the new size"
    changed = {n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}
    limits = range(V1_2.memory_limits, V1_2.memory_limits + 8)
    cores = range(V1_2.core_limits, V1_2.core_limits + 16 * 8)
    assert changed <= {*limits, *cores}


@pytest.mark.parametrize(
    ("dialect", "resource", "fields"),
    [
        ("nvidia", "nvidia.com/gpu", {}),
        ("tencent", "tencent.com/vcuda-core", {"slotted": False}),
        (
            "koordinator",
            "koordinator.sh/gpu.shared",
            {
                "slots": 100,
                "requested_units": RequestedUnits(
                    memory_mib=4_000, device_mib=T4_MIB, memory_percent=26
                ),
            },
        ),
    ],
)
async def test_containers_of_every_dialect_that_hami_core_holds_are_resized(
    dialect: str, resource: str, fields: dict[str, Any]
) -> None:
    count = 10 if dialect == "tencent" else 1
    async with site() as at, at.running() as agent:
        shares = [share(0, 4_000, **fields)]
        lease = at.bind(pod("one", limits={resource: count}), *shares, dialect=dialect)
        await at.node.phase("one", "Running")
        place = region_of(at, lease)
        asked = ResizeRequest(pod=lease.pod, memory_mib=2_000, cores_percent=None)
        node = LedgerNode(
            facts=NodeFacts(name=lease.node),
            devices=tuple((device, DeviceUse()) for device in agent.state.devices),
            served=(resource,),
        )
        change = decide(structs.replace(lease, state=LeaseState.ACTIVE), asked, node)
        assert isinstance(change, SizeChange), change

        assert (await ask(agent, change.lease, "turn")).applied
        assert limit_mib(place) == 2_000
        now = at.ledger.grant(structs.replace(change.lease, version=9))
        assert (await ask(agent, now)).applied
        assert limit_mib(place) == 2_000


async def test_a_resized_container_starts_again_with_its_new_limits() -> None:
    async with site() as at, at.running() as agent:
        lease = at.bind(pod("one", limits={NUMBER: 1}, annotations=CRASHING), share(0, 1000))
        await until(lambda: at.node.kubelet.state_of("default", "one"))
        place = await until(lambda: at.env("one") and region_of(at, lease))
        larger = at.ledger.grant(sized(lease, 2_000))
        assert (await ask(agent, larger)).applied
        first = at.node.container("one").started_at
        await until(lambda: at.node.container("one").started_at > first)

        assert limit_mib(place) == 2_000
        assert at.env("one")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m", "the kubelet keeps its word"
        region = read_region(place)
        assert isinstance(region, Region)
        assert not region.pids


async def test_an_agent_that_was_away_learns_of_a_resize_when_it_is_back() -> None:
    async with site() as at:
        async with running(at) as (_, lease):
            place = region_of(at, lease)
        at.ledger.grant(sized(lease, 6_000))
        async with at.running() as agent:
            await until(lambda: limit_mib(place) == 6_000)
            assert agent.checkpoint.allocations[0].lease.shares[0].memory_mib == 6_000
        async with at.running() as agent:
            assert agent.checkpoint.allocations[0].lease.shares[0].memory_mib == 6_000
            assert limit_mib(place) == 6_000


async def test_a_container_is_not_held_to_less_than_it_has_in_use() -> None:
    async with site() as at, running(at) as (agent, lease):
        place = region_of(at, lease)
        use(place, 3_000)

        refused = await ask(agent, sized(lease, 2_999, later=0), "turn")
        done = await ask(agent, sized(lease, 3_000, later=0), "turn")

        assert (refused.applied, refused.in_use_mib) == (False, 3_000)
        assert "3000 MiB of GPU 0" in refused.reason
        assert "would be 2999" in refused.reason
        assert done.applied
        assert limit_mib(place) == 3_000
        assert agent.checkpoint.allocations[0].lease == structs.replace(
            lease, version=2, state=LeaseState.BOUND
        ), "the ledger has not decided yet"


async def test_what_is_allocated_while_a_limit_is_lowered_raises_it_again() -> None:
    async with site(timing=AgentTiming(limit_settle_s=1.0)) as at, running(at) as (agent, lease):
        place = region_of(at, lease)
        asking = asyncio.create_task(ask(agent, sized(lease, 1_000, later=0), "turn"))
        await until(lambda: limit_mib(place) == 1_000)
        use(place, 3_500)  # it had asked before
        image = bytearray(path_of(place).read_bytes())
        image[V1_2.memory_limits : V1_2.memory_limits + 8] = (1_000 * MIB).to_bytes(8, "little")
        path_of(place).write_bytes(image)

        told = await asking

        assert (told.applied, told.in_use_mib) == (False, 3_500)
        assert limit_mib(place) == 4_000


async def test_a_turn_that_comes_to_nothing_raises_the_limit_again() -> None:
    async with site() as at, running(at) as (agent, lease):
        place = region_of(at, lease)
        smaller = sized(lease, 1_000, later=0)
        await ask(agent, smaller, "turn")
        await ask(agent, lease, "another", over=True)
        assert limit_mib(place) == 1_000, "another's turn is not this one"

        await ask(agent, lease, "turn", over=True)

        assert limit_mib(place) == 4_000


async def test_a_lowered_limit_stays_until_the_ledger_says_that_the_lease_did_not_change() -> None:
    async with (
        site(timing=AgentTiming(limit_look_s=0.02, limit_hold_s=0.1)) as at,
        running(at) as (agent, lease),
    ):
        place = region_of(at, lease)
        at.ledger.silent = True
        before = len(at.ledger.questions)
        await ask(agent, sized(lease, 1_000, later=0), "turn")
        await until(lambda: len(at.ledger.questions) > before + 5)
        assert limit_mib(place) == 1_000, "nobody has said what became of it"

        at.ledger.silent = False

        await until(lambda: limit_mib(place) == 4_000)


async def test_a_smaller_lease_whose_news_are_lost_is_asked_for() -> None:
    async with (
        site(timing=AgentTiming(limit_look_s=0.02, limit_hold_s=0.1)) as at,
        running(at) as (agent, lease),
    ):
        place = region_of(at, lease)
        at.ledger.grant(sized(lease, 1_000))
        assert (await ask(agent, sized(lease, 1_000, later=0), "turn")).applied

        await until(lambda: agent.checkpoint.entries[0].lowered is None)

        assert agent.checkpoint.allocations[0].lease == sized(lease, 1_000)
        assert limit_mib(place) == 1_000


async def test_an_agent_killed_while_a_limit_is_lowered_keeps_to_it() -> None:
    async with site(timing=AgentTiming(usage_look_s=0.02)) as at:
        async with running(at) as (agent, lease):
            place = region_of(at, lease)
            assert (await ask(agent, sized(lease, 1_000, later=0), "turn")).applied
        async with at.running() as agent:
            await until(lambda: agent.leases.synced and agent.usage.snapshot.containers)  # type: ignore[attr-defined]
            assert limit_mib(place) == 1_000

            await at.tell(at.ledger.grant(sized(lease, 1_000)))

            await until(lambda: agent.checkpoint.entries[0].lowered is None)
            assert limit_mib(place) == 1_000
            assert not at.heard(ViolationFound)


async def test_no_resize_is_taken_for_tampering() -> None:
    async with site(timing=AgentTiming(usage_look_s=0.001)) as at, running(at) as (agent, lease):
        place = region_of(at, lease)
        for step in range(1, 21):
            mib = 4_000 + 100 * (step % 5)
            proposed = sized(lease, mib - 50, later=step - 1)
            await ask(agent, proposed, f"turn-{step}")
            assert (await ask(agent, at.ledger.grant(sized(lease, mib, later=step)))).applied
            assert limit_mib(place) == mib
        seen = agent.usage.snapshot.scanned_at  # type: ignore[attr-defined]
        await until(lambda: agent.usage.snapshot.scanned_at > seen)  # type: ignore[attr-defined]

        assert agent.usage.restored == 0  # type: ignore[attr-defined]
        assert not at.heard(ViolationFound)


async def test_the_kubelet_may_admit_pods_into_what_a_smaller_lease_has_left() -> None:
    async with site(gpus="1xT4") as at, running(at, mib=12_000) as (agent, lease):
        await at.node.allocatable(MEMORY, T4_MIB)
        small = pod("two", limits={NUMBER: 1, MEMORY: 10_000})
        await ask(agent, sized(lease, 4_000, later=0), "turn")
        await at.node.allocatable(MEMORY, T4_MIB + 8_000)
        await at.tell(at.ledger.grant(sized(lease, 4_000)))
        at.bind(small, share(0, 10_000, slot=1, fence=2))
        await at.node.phase("two", "Running")

        assert not at.refused
