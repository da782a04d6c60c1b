"""Limits of containers: at their start, and while leases change; beside a simulated kubelet."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.binder.resize.rules import SizeChange, decide
from services.node_agent.agent_timing import AgentTiming
from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_image import RegionSeed, image_of, seed_of
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.resize.limit_updates import LATER_S
from services.node_agent.resize.limits import ShortageError, check_use
from services.node_agent.service import NodeAgent
from services.node_agent.settings import AgentSettings
from shared.model.devices.device import DeviceUse
from shared.model.devices.node import NodeFacts
from shared.model.events.node_events import ViolationFound
from shared.model.events.request_reply import LimitsReply, LimitsRequest, ResizeRequest
from shared.model.leases.lease import Lease, LeaseState, RequestedUnits, ShareSize
from shared.model.leases.ledger import LedgerNode
from simcluster.node_agent.agent import SimulatedAgentSettings
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, one_node_cluster, share
from tests.support.node_agent.regions import limit_mib, use_memory
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


@asynccontextmanager
async def running(
    cluster: OneNodeCluster, *, mib: int = 4_000
) -> AsyncIterator[tuple[NodeAgent, Lease, Path]]:
    """Run an agent and, on it, a pod whose lease is active; yield its region, too."""
    async with cluster.running() as agent:
        lease = await cluster.run_pod("one", share(0, mib))
        lease = cluster.ledger.grant(structs.replace(lease, state=LeaseState.ACTIVE, version=3))
        await cluster.push_lease(lease)
        yield agent, lease, cluster.region_of(lease)


async def update_limits_of(
    agent: NodeAgent, lease: Lease, resize_id: str = "", *, finished: bool = False
) -> LimitsReply:
    question = LimitsRequest(node=agent.route, lease=lease, resize_id=resize_id, finished=finished)
    return await agent.update_limits(question)


async def test_hami_core_12_a_larger_lease_raises_the_limit_of_the_running_container() -> None:
    async with one_node_cluster() as cluster, running(cluster) as (agent, lease, place):
        use_memory(place, 3_000)
        before = place.read_bytes()
        started = cluster.node.container("one").started_at
        await cluster.push_lease(cluster.ledger.grant(sized(lease, 6_000, 30)))

        assert (await update_limits_of(agent, sized(lease, 6_000, 30))).applied
        assert limit_mib(place) == 6_000
        after = place.read_bytes()
        assert cluster.node.container("one").started_at == started
        recorded = agent.checkpoint.allocations[0].lease
        assert recorded == sized(lease, 6_000, 30), "a rebuild of the ledger restores the new size"
    changed = {n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}
    limits = range(V1_2.memory_limits, V1_2.memory_limits + 8)
    cores = range(V1_2.core_limits, V1_2.core_limits + 16 * 8)
    assert changed <= {*limits, *cores}


async def test_a_larger_lease_raises_no_limit_before_a_binder_has_written_its_copy() -> None:
    async with one_node_cluster(rate=100) as cluster, running(cluster) as (agent, lease, place):
        larger = cluster.ledger.grant(sized(lease, 6_000))
        await cluster.push_lease(larger)
        await agent.limits._follow()
        before = limit_mib(place), agent.checkpoint.allocations[0].lease.shares

        assert (await update_limits_of(agent, larger)).applied

        assert before == (4_000, lease.shares)
        assert limit_mib(place) == 6_000


async def test_a_size_that_the_ledger_lost_and_gave_again_is_set() -> None:
    async with one_node_cluster(rate=100) as cluster, running(cluster) as (agent, lease, place):
        await cluster.push_lease(cluster.ledger.grant(sized(lease, 6_000, later=4)))

        assert (await update_limits_of(agent, sized(lease, 6_000))).applied

        assert limit_mib(place) == 6_000


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
                "device_mib": T4_MIB,
                "requested_units": RequestedUnits(memory_mib=4_000, memory_percent=26),
            },
        ),
    ],
)
async def test_containers_of_every_dialect_that_hami_core_limits_are_resized(
    dialect: str, resource: str, fields: dict[str, Any]
) -> None:
    count = 10 if dialect == "tencent" else 1
    async with one_node_cluster() as cluster, cluster.running() as agent:
        shares = [share(0, 4_000, **fields)]
        lease = cluster.bind(pod("one", limits={resource: count}), *shares, dialect=dialect)
        await cluster.node.phase("one", "Running")
        request = ResizeRequest(pod=lease.pod, memory_mib=2_000, cores_percent=None)
        node = LedgerNode(
            facts=NodeFacts(name=lease.node),
            devices=tuple((device, DeviceUse()) for device in agent.node.devices),
            served=(resource,),
        )
        change = decide(structs.replace(lease, state=LeaseState.ACTIVE), request, node)
        assert isinstance(change, SizeChange), change

        place = cluster.region_of(lease)
        assert (await update_limits_of(agent, change.lease, "resize")).applied
        assert limit_mib(place) == 2_000
        now = cluster.ledger.grant(structs.replace(change.lease, version=9))
        assert (await update_limits_of(agent, now)).applied
        assert limit_mib(place) == 2_000


async def test_a_resized_container_starts_again_with_its_new_limits() -> None:
    async with one_node_cluster() as cluster, cluster.running() as agent:
        lease = cluster.bind(pod("one", limits={NUMBER: 1}, annotations=CRASHING), share(0, 1000))
        await until(lambda: cluster.node.kubelet.state_of("default", "one"))
        place = await until(lambda: cluster.env("one") and cluster.region_of(lease))
        larger = cluster.ledger.grant(sized(lease, 2_000))
        assert (await update_limits_of(agent, larger)).applied
        first = cluster.node.container("one").started_at
        await until(lambda: cluster.node.container("one").started_at > first)

        assert limit_mib(place) == 2_000
        assert cluster.env("one")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m", (
            "the kubelet keeps the variables of Allocate"
        )
        region = read_region(place)
        assert isinstance(region, Region)
        assert not region.slots


@pytest.mark.parametrize("earlier_s", [0.0, 6.0])
async def test_a_restarted_agent_applies_a_resize_made_while_it_was_down(earlier_s: float) -> None:
    """A rebuild of the ledger with a clock that was set back lowers the lease's creation time."""
    async with one_node_cluster() as cluster:
        async with running(cluster) as (_, lease, place):
            earlier = structs.replace(lease, created_at=lease.created_at - earlier_s)
        larger = cluster.ledger.grant(sized(earlier, 6_000))
        async with cluster.running() as agent:
            assert (await update_limits_of(agent, larger)).applied
            assert agent.checkpoint.allocations[0].lease.shares[0].memory_mib == 6_000
        async with cluster.running() as agent:
            assert agent.checkpoint.allocations[0].lease.shares[0].memory_mib == 6_000
            assert limit_mib(place) == 6_000


async def test_a_limit_below_the_memory_in_use_is_refused() -> None:
    async with one_node_cluster() as cluster, running(cluster) as (agent, lease, place):
        use_memory(place, 3_000)

        refused = await update_limits_of(agent, sized(lease, 2_999, later=0), "resize")
        done = await update_limits_of(agent, sized(lease, 3_000, later=0), "resize")

        assert (refused.applied, refused.in_use_mib) == (False, 3_000)
        assert "3000 MiB of GPU 0" in refused.reason
        assert "would be 2999" in refused.reason
        assert done.applied
        assert limit_mib(place) == 3_000
        (one,) = agent.checkpoint.allocations
        assert one.lease == structs.replace(
            lease, version=2, state=LeaseState.BOUND, activated_at=one.activated_at
        ), "the ledger has not changed the lease yet"


async def test_memory_allocated_while_a_limit_is_lowered_restores_the_limit() -> None:
    async with (
        one_node_cluster(timing=AgentTiming(limit_settle_s=1.0)) as cluster,
        running(cluster) as (agent, lease, place),
    ):
        resize = asyncio.create_task(
            update_limits_of(agent, sized(lease, 1_000, later=0), "resize")
        )
        await until(lambda: limit_mib(place) == 1_000)
        use_memory(place, 3_500)  # a call from before the change
        image = bytearray(place.read_bytes())
        image[V1_2.memory_limits : V1_2.memory_limits + 8] = (1_000 * MIB).to_bytes(8, "little")
        place.write_bytes(image)

        recorded = await resize

        assert (recorded.applied, recorded.in_use_mib) == (False, 3_500)
        assert limit_mib(place) == 4_000


async def test_an_abandoned_resize_restores_the_limit() -> None:
    async with one_node_cluster() as cluster, running(cluster) as (agent, lease, place):
        smaller = sized(lease, 1_000, later=0)
        await update_limits_of(agent, smaller, "resize")
        await update_limits_of(agent, lease, "another", finished=True)
        assert limit_mib(place) == 1_000, "another resize does not end this one"

        await update_limits_of(agent, lease, "resize", finished=True)

        assert limit_mib(place) == 4_000


@pytest.mark.parametrize(
    ("ledger", "mib"),
    [("has it unchanged", 4_000), ("has lost it", 1_000), ("has it smaller", 1_000)],
)
async def test_a_lowered_limit_stays_until_the_ledger_replies_what_the_lease_is(
    ledger: str, mib: int
) -> None:
    """Another pod may have the rest of the device: a lost lease is restored as it is reported."""
    async with one_node_cluster(rate=100) as cluster, running(cluster) as (agent, lease, place):
        kept = agent.checkpoint.allocations[0].lease
        smaller = sized(lease, 1_000, later=0)
        if ledger == "has lost it":
            cluster.ledger.leases.clear()
            # Later than what a rebuild may find on the pod: the ledger restores what is here.
            kept = structs.replace(smaller, resized_at=smaller.resized_at + LATER_S)
        elif ledger == "has it smaller":
            kept = cluster.ledger.grant(sized(lease, 1_000))
        cluster.ledger.unavailable = True
        before = len(cluster.ledger.requests)
        assert (await update_limits_of(agent, smaller, "resize")).applied
        await until(lambda: len(cluster.ledger.requests) > before + 5)
        assert limit_mib(place) == 1_000, "the outcome of the resize is unknown"

        cluster.ledger.unavailable = False
        await until(lambda: agent.checkpoint.entries[0].lowered is None)

        assert agent.checkpoint.allocations[0].lease == kept
        await until(lambda: limit_mib(place) == mib)


async def test_a_lowered_limit_stays_if_others_have_the_rest_whatever_the_ledger_says() -> None:
    """The ledger was rolled back to before the resize, and to before the other pod."""
    async with one_node_cluster(rate=100) as cluster, running(cluster) as (agent, lease, place):
        cluster.ledger.unavailable = True
        await update_limits_of(agent, sized(lease, 1_000, later=0), "resize")
        await cluster.run_pod("two", share(0, 14_000, slot=1, fence=2))
        cluster.ledger.unavailable = False

        await until(lambda: all(entry.lowered is None for entry in agent.checkpoint.entries))

        [kept] = [each for each in agent.checkpoint.allocations if each.pod == lease.pod]
        assert kept.lease.shares[0].memory_mib == 1_000
        assert kept.lease.resized_at > lease.resized_at, "the ledger restores it as it is here"
        assert limit_mib(place) == 1_000


async def test_a_size_beyond_what_others_leave_can_be_taken_back_without_a_larger_limit() -> None:
    """The ledger had lost the other pod's lease when the first one grew."""
    async with one_node_cluster() as cluster, running(cluster) as (agent, lease, place):
        other = await cluster.run_pod("two", share(0, 8_000, slot=1, fence=2))
        grown = cluster.ledger.grant(sized(lease, 12_000))

        refused = await update_limits_of(agent, grown)
        assert "default/two" in refused.reason
        assert refused.container == "main"
        assert refused.kept == ShareSize(memory_mib=4_000, cores_percent=10)
        smaller = sized(grown, 4_000, later=0)
        assert (await update_limits_of(agent, smaller, "resize")).applied
        await agent.checkpoint.forget((other.pod,))
        assert not (await update_limits_of(agent, grown)).applied
        assert limit_mib(place) == 4_000, "it may be taken back at any moment"
        assert (await update_limits_of(agent, sized(smaller, 4_000))).applied
        assert limit_mib(place) == 4_000


async def test_a_restarted_agent_keeps_a_lowered_limit() -> None:
    async with one_node_cluster() as cluster:
        async with running(cluster) as (agent, lease, place):
            assert (await update_limits_of(agent, sized(lease, 1_000, later=0), "resize")).applied
        async with cluster.running() as agent:
            await until(lambda: agent.leases.synced and agent.usage.snapshot.containers)
            assert limit_mib(place) == 1_000

            await cluster.push_lease(cluster.ledger.grant(sized(lease, 1_000)))

            await until(lambda: agent.checkpoint.entries[0].lowered is None)
            assert limit_mib(place) == 1_000
            assert not cluster.events_of(ViolationFound)


async def test_a_resize_is_not_reported_as_tampering() -> None:
    async with one_node_cluster(rate=50) as cluster, running(cluster) as (agent, lease, place):
        for step in range(1, 21):
            mib = 4_000 + 100 * (step % 5)
            proposed = sized(lease, mib - 50, later=step - 1)
            await update_limits_of(agent, proposed, f"resize-{step}")
            assert (
                await update_limits_of(agent, cluster.ledger.grant(sized(lease, mib, later=step)))
            ).applied
            assert limit_mib(place) == mib
        seen = agent.usage.snapshot.scanned_at
        await until(lambda: agent.usage.snapshot.scanned_at > seen)

        assert agent.usage.restored == 0
        assert not cluster.events_of(ViolationFound)


async def test_memory_freed_by_a_smaller_lease_is_allocatable() -> None:
    async with (
        one_node_cluster(gpus="1xT4") as cluster,
        running(cluster, mib=12_000) as (agent, lease, _),
    ):
        await cluster.node.allocatable(MEMORY, T4_MIB)
        small = pod("two", limits={NUMBER: 1, MEMORY: 10_000})
        await update_limits_of(agent, sized(lease, 4_000, later=0), "resize")
        await cluster.node.allocatable(MEMORY, T4_MIB + 8_000)
        await cluster.push_lease(cluster.ledger.grant(sized(lease, 4_000)))
        cluster.bind(small, share(0, 10_000, slot=1, fence=2))
        await cluster.node.phase("two", "Running")

        assert not cluster.refused


async def test_memory_of_a_killed_process_does_not_prevent_a_lower_limit() -> None:
    async with one_node_cluster() as cluster, running(cluster) as (agent, _, place):
        use_memory(place, 3_000)
        region = read_region(place)
        entry = agent.checkpoint.entries[0]
        assert isinstance(region, Region)
        seed = seed_of(entry.limits.environment)
        lower = replace(seed, memory_bytes=(1_000 * MIB,))

        with pytest.raises(ShortageError) as of_running:
            check_use(entry, region, lower, None, {7})
        check_use(entry, region, lower, None, frozenset())  # of a killed one

    assert of_running.value.used_mib == 3_000


# At the start of a container


async def test_the_limits_of_a_container_are_set_before_it_starts() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        obj = pod("one", limits={NUMBER: 2})
        both = share(1, 2000, cores_percent=50), share(0, 3000, cores_percent=50)
        lease = cluster.bind(obj, *both)
        await cluster.node.phase("one", "Running")
        image = cluster.region_of(lease).read_bytes()

    assert image == image_of(
        RegionSeed(
            memory_bytes=(3000 * MIB, 2000 * MIB), cores_percent=(50, 50), other_cores_percent=50
        )
    )


async def test_a_container_whose_limits_cannot_be_set_again_does_not_start() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        lease = cluster.bind(pod("one", limits={NUMBER: 1}, annotations=CRASHING), share(0, 1000))
        place = await until(lambda: _place(cluster, lease))
        while not place.is_dir():  # a start may be putting a fresh one there
            place.unlink(missing_ok=True)
            with contextlib.suppress(FileExistsError):
                (place / "full").mkdir(parents=True)
        why = await until(lambda: _waiting(cluster, "one"))

    assert "limits of the container cannot be set" in why


def test_metrics_of_real_gpus_are_on_the_published_port() -> None:
    assert AgentSettings().monitor_address == "0.0.0.0:9394"
    assert AgentSettings(monitor_http="127.0.0.1:0").monitor_address == "127.0.0.1:0"
    assert SimulatedAgentSettings().monitor_address is None


def _place(cluster: OneNodeCluster, lease: Lease) -> Path | None:
    found = list(cluster.root.glob(f"agent/containers/{lease.pod}_main/*.cache"))
    return found[0] if found else None


def _waiting(cluster: OneNodeCluster, name: str) -> str:
    """Return why the pod's container does not start, if its status has a reason."""
    statuses = cluster.node.pod(name)["status"].get("containerStatuses", [])
    text = str(statuses)
    return text if "cannot be set" in text else ""
