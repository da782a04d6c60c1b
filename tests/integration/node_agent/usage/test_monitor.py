"""Limits on disk and the metrics page, of an agent beside a simulated kubelet."""

import contextlib
import socket
import struct
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_image import RegionSeed, image_of
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.settings import AgentSettings
from shared.model.events.node_events import ViolationFound
from shared.model.lease import Lease, LeaseState
from simcluster.node_agent.agent import SimulatedAgentSettings
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, one_node_cluster, share
from tests.support.node_agent.regions import rewritten, use_memory
from tests.support.simcluster.kubelet import pod
from tests.support.waiting import until

MIB = 1 << 20
USED = "vGPU_device_memory_usage_in_bytes"
LIMIT = "vGPU_device_memory_limit_in_bytes"
CRASHING = {"sim.leasehold.dev/run-for": "50ms", "sim.leasehold.dev/exit-code": "3"}


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


async def scraped(address: str) -> dict[str, dict[str, float]]:
    """Return the metrics: by series and pod, the value."""
    async with aiohttp.ClientSession() as client, client.get(f"http://{address}/metrics") as answer:
        text = await answer.text()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            label = one.labels.get(
                "podname", one.labels.get("pod", one.labels.get("deviceidx", ""))
            )
            found.setdefault(one.name, {})[label] = one.value
    return found


async def until_scraped(address: str, holds: Any) -> dict[str, dict[str, float]]:
    page: dict[str, dict[str, float]] = await until(lambda: scraped(address), holds)
    return page


def region_of(cluster: OneNodeCluster, lease: Lease) -> Path:
    name = Path(cluster.env(lease.name)["CUDA_DEVICE_MEMORY_SHARED_CACHE"]).name
    return cluster.root / "agent" / "containers" / f"{lease.pod}_main" / name


async def test_the_limits_of_a_container_are_set_before_it_starts() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        obj = pod("one", limits={NUMBER: 2})
        both = share(1, 2000, cores_percent=50), share(0, 3000, cores_percent=50)
        lease = cluster.bind(obj, *both)
        await cluster.node.phase("one", "Running")
        image = region_of(cluster, lease).read_bytes()

    assert image == image_of(
        RegionSeed(
            memory_bytes=(3000 * MIB, 2000 * MIB), cores_percent=(50, 50), other_cores_percent=50
        )
    )


async def test_metrics_show_a_container_while_its_lease_is_live_and_limits_are_restored(
    address: str,
) -> None:
    async with one_node_cluster(monitor_http=address, rate=100) as cluster, cluster.running():
        lease = await cluster.run_pod("one", share(0, 1000))
        place = region_of(cluster, lease)
        use_memory(place, 300)
        page = await until_scraped(address, lambda page: page.get(USED) == {"one": 300 * MIB})
        with rewritten(place) as image:
            struct.pack_into("<Q", image, V1_2.memory_limits, 80_000 * MIB)
        (violation,) = await until(lambda: cluster.events_of(ViolationFound))
        await until_scraped(
            address, lambda page: page["leasehold_limits_restored_total"].get("") == 1
        )
        region = read_region(place)
        await cluster.push_lease(_ended(lease))
        cluster.ledger.leases.clear()
        after = await until_scraped(address, lambda page: USED not in page)

    assert page[LIMIT] == {"one": 1000 * MIB}
    assert page["leasehold_container_memory_measured_bytes"] == {"one": 300 * MIB}
    assert page["leasehold_container_isolation_lost"] == {"one": 0}
    assert isinstance(region, Region)
    assert region.memory_limits[0] == 1000 * MIB
    assert (violation.pod, violation.name, violation.container) == (lease.pod, "one", "main")
    assert violation.reason == "GpuLimitTampered"
    assert set(page["HostGPUMemoryUsage"]) == set(after["HostGPUMemoryUsage"]) == {"0", "1"}


async def test_hami_core_28_a_restarted_container_has_an_empty_region_with_its_limits() -> None:
    async with one_node_cluster() as cluster, cluster.running():
        lease = cluster.bind(pod("one", limits={NUMBER: 1}, annotations=CRASHING), share(0, 1000))
        place = await until(lambda: _place(cluster, lease))
        use_memory(place, 300)
        region = await until(lambda: _unused(place))

    assert region.memory_limits[0] == 1000 * MIB


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


def _ended(lease: Lease) -> Lease:
    return structs.replace(lease, state=LeaseState.RELEASED, version=9)


def _place(cluster: OneNodeCluster, lease: Lease) -> Path | None:
    found = list(cluster.root.glob(f"agent/containers/{lease.pod}_main/*.cache"))
    return found[0] if found else None


def _unused(place: Path) -> Region | None:
    region = read_region(place)
    return region if isinstance(region, Region) and not region.slots else None


def _waiting(cluster: OneNodeCluster, name: str) -> str:
    """Return why the pod's container does not start, if its status has a reason."""
    statuses = cluster.node.pod(name)["status"].get("containerStatuses", [])
    text = str(statuses)
    return text if "cannot be set" in text else ""
