"""Sizes of running containers whose memory the driver holds: an agent replies, its driver sets."""

import asyncio
import math
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest
from msgspec import structs

from services.node_agent.enforcers.driver import DriverLimits
from services.node_agent.gpus.memory_limits import Accounting
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.events.request_reply import LimitsReply, LimitsRequest
from shared.model.leases.lease import MIB, Lease, LeaseState, ShareSize
from simcluster.gpu_driver.control import VARIABLE, control
from simcluster.kubelet.programs.cgroups import VARIABLE as CGROUP
from tests.integration.node_agent.test_blindness import failing
from tests.support.gpu_driver import GpuDriver
from tests.support.node_agent.agent import OneNodeCluster, share
from tests.support.node_agent.judged_node import driver_limits
from tests.support.node_agent.mixed_node import limited_cluster
from tests.support.node_agent.regions import limit_mib, rewritten
from tests.support.waiting import until

HELD: dict[str, Any] = {"memory": "driver", "compute": "hami-core", "mode": "driver"}
BOTH = pytest.mark.parametrize("accounting", list(Accounting))


@asynccontextmanager
async def pod_of(hook: Path, accounting: str) -> AsyncIterator[tuple[OneNodeCluster, Lease]]:
    """Run a pod that has 4,000 MiB by the driver, and 10 % of the cores by HAMi-core."""
    async with limited_cluster("1xT4", hook, accounting) as cluster:
        lease = await cluster.run_pod("one", share(0, 4_000, **HELD))
        lease = cluster.ledger.grant(structs.replace(lease, state=LeaseState.ACTIVE, version=3))
        await cluster.push_lease(lease)
        yield cluster, lease


def sized(lease: Lease, mib: int) -> Lease:
    shares = (structs.replace(lease.shares[0], memory_mib=mib),)
    return structs.replace(lease, shares=shares, version=lease.version + 1, resized_at=1.0)


async def request(cluster: OneNodeCluster, lease: Lease, resize_id: str = "") -> LimitsReply:
    assert cluster.agent is not None
    return await cluster.agent.update_limits(
        LimitsRequest(node=cluster.agent.route, lease=lease, resize_id=resize_id)
    )


def held_mib(cluster: OneNodeCluster) -> set[int]:
    """Return the limits of the pod and its container, in MiB."""
    gpu_state = cluster.node.kubelet.files.gpu_state
    return {amount // MIB for amount in driver_limits(gpu_state).values()}


@BOTH
async def test_less_than_is_in_use_is_not_set_until_less_is_in_use(
    driver_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accounting: Accounting
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    async with pod_of(tmp_path / "hook", accounting) as (cluster, lease):
        driver = GpuDriver(folder=driver_folder, state=cluster.node.kubelet.files.gpu_state)
        load = driver.load(**{CGROUP: cluster.env("one")[CGROUP]})
        assert load.fits("3g")
        assert cluster.agent is not None
        checkpoint = cluster.agent.checkpoint
        recorded: list[bool] = []
        save = checkpoint.save

        async def noted(entry: CheckpointEntry, **more: Any) -> None:
            recorded.append(entry.lowered is not None)
            await save(entry, **more)

        monkeypatch.setattr(checkpoint, "save", noted)

        refused = await request(cluster, sized(lease, 2_000), "first")

        assert not refused.applied
        assert not any(recorded)  # else a scan would write it into the library's region meanwhile
        assert refused.in_use_mib >= 3 * 1024
        assert held_mib(cluster) == {4_000}
        (entry,) = checkpoint.entries
        assert (entry.lease.shares, entry.lowered) == (lease.shares, None)
        assert limit_mib(cluster.region_of(lease)) == 4_000
        load.kill()

        smaller = await request(cluster, sized(lease, 2_000), "second")

        assert smaller.applied, smaller.reason
        assert held_mib(cluster) == {2_000}
        assert limit_mib(cluster.region_of(lease)) == 2_000
        driver.close()


@BOTH
async def test_more_that_the_driver_does_not_set_is_given_back(
    driver_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accounting: Accounting
) -> None:
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")
    async with pod_of(tmp_path / "hook", accounting) as (cluster, lease):
        state = cluster.node.kubelet.files.gpu_state
        larger = cluster.ledger.grant(sized(lease, 6_000))
        await cluster.push_lease(larger)
        control(state, "limits-error", str(pynvml.NVML_ERROR_UNKNOWN))

        reply = await request(cluster, larger)

        assert not reply.applied
        assert reply.kept == ShareSize(memory_mib=4_000, cores_percent=10)
        assert cluster.agent is not None
        (entry,) = cluster.agent.checkpoint.entries
        assert entry.lease.shares[0].memory_mib == 4_000
        control(state, "limits-error", "0")
        assert held_mib(cluster) == {4_000}

        assert (await request(cluster, larger)).applied
        assert held_mib(cluster) == {6_000}
        assert limit_mib(cluster.region_of(lease)) == 6_000


@pytest.mark.parametrize("code", [403, 500])
async def test_more_waits_while_the_kubelet_does_not_list_the_containers_of_an_earlier_agent(
    driver_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")
    async with pod_of(tmp_path / "hook", "dmem") as (cluster, lease):
        agent = cluster.agent
        assert agent is not None
        driver = agent.node.enforcers.by_name["driver"]
        assert isinstance(driver, DriverLimits)
        assert driver.limits is not None
        driver.limits._started.clear()  # as after a restart
        larger = cluster.ledger.grant(sized(lease, 6_000))
        await cluster.push_lease(larger)
        with monkeypatch.context() as denied:
            denied.setattr(
                type(cluster.node.kubelet.endpoint),
                "_check_allowed",
                lambda *_: (_ for _ in ()).throw(failing(code)),
            )
            driver.limits.listed.read_at = -math.inf

            reply = await request(cluster, larger)

            assert not reply.applied
            assert "cannot be seen" in reply.reason
            assert f"failed: {code}" in reply.reason
            assert reply.kept == ShareSize(memory_mib=4_000, cores_percent=10)
            (entry,) = agent.checkpoint.entries
            assert entry.lease.shares[0].memory_mib == 4_000
            assert held_mib(cluster) == {4_000}
            await agent.usage.audit.audit()
            assert not agent.usage.audit.violations
        driver.limits.listed.read_at = -math.inf

        assert (await request(cluster, larger)).applied
        assert held_mib(cluster) == {6_000}


async def test_a_pod_starts_while_the_driver_does_not_respond_for_the_gpu_of_another_one(
    driver_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hook waits for 5 s at most."""
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")
    async with limited_cluster("2xT4", tmp_path / "hook", "dmem") as cluster:
        agent = cluster.agent
        assert agent is not None
        first = await cluster.run_pod("one", share(0, 4_000, **HELD))
        state = cluster.node.kubelet.files.gpu_state
        control(state, "set", first.shares[0].device, "hang", "1")
        auditing = asyncio.create_task(agent.usage.audit.audit())
        await until(lambda: agent.checkpoint.changing.is_held(first.pod))

        second = await cluster.run_pod("two", share(1, 2_000, fence=2, **HELD))

        assert agent.checkpoint.changing.is_held(first.pod)
        assert {
            amount // MIB
            for (device, _), amount in driver_limits(cluster.node.kubelet.files.gpu_state).items()
            if device == second.shares[0].device
        } == {2_000}
        control(state, "set", first.shares[0].device, "hang", "0")
        await auditing


async def test_the_driver_and_hami_core_have_equal_limits_and_a_difference_is_repaired(
    driver_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")
    async with pod_of(tmp_path / "hook", "dmem") as (cluster, lease):
        agent = cluster.agent
        assert agent is not None
        await agent.usage.audit.audit()
        assert not agent.usage.audit.violations
        own = cluster.env("one")[CGROUP]
        state = cluster.node.kubelet.files.gpu_state
        control(state, "limit", lease.shares[0].device, own, "0", str(9_000 * MIB))

        await agent.usage.audit.audit()

        (violation,) = agent.usage.audit.violations
        assert violation.reason == "GpuLimitDiffers"
        assert "9000 MiB" in violation.message
        assert "4000 MiB" in violation.message
        assert held_mib(cluster) == {4_000}
        assert limit_mib(cluster.region_of(lease)) == 4_000
        await until(lambda: not agent.node.enforcers.findings)

        control(state, "limit", lease.shares[0].device, own, "0", str(9_000 * MIB))
        control(state, "limit", lease.shares[0].device, str(Path(own).parent), "0", "max")
        with rewritten(cluster.region_of(lease)) as image:
            struct.pack_into("<Q", image, V1_2.memory_limits, 7_000 * MIB)
        await agent.usage.audit.audit()
        await agent.usage.scan()

        differences = {
            violation.reason: violation.message for violation in agent.usage.audit.violations
        }
        assert differences.keys() == {"GpuLimitDiffers", "GpuLimitMissing", "GpuLimitTampered"}
        metrics = {
            sample.labels["reason"]: sample.value
            for family in agent.usage.collect()
            for sample in family.samples
            if family.name == "leasehold_violations"
        }
        assert metrics == dict.fromkeys(differences, 1)
        (shown,) = agent.usage.report({}).shares
        for words in ("has 9000 MiB", "has no limit", "to 7000.0 MiB"):
            assert words in shown.held_difference, "explain and the page show it"
        assert held_mib(cluster) == {4_000}
        assert limit_mib(cluster.region_of(lease)) == 4_000

        reply = await request(cluster, sized(lease, 2_000))

        assert reply.applied, reply.reason
        assert held_mib(cluster) == {limit_mib(cluster.region_of(lease))} == {2_000}
