"""The partitioner in a process of its own, and the requests that it refuses."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.mig.gpu_models import GPU_MODELS
from services.node_agent.mig.instances import InUseError, MigInstance
from services.node_agent.mig.layouts import KNOWN_GEOMETRIES, layouts_for
from services.node_agent.partition.partition_client import RemotePartitioner
from services.node_agent.partition.partition_server import PartitionServer
from services.node_agent.time_slices.slice_setter import RemoteSliceSetter, SetTimeSlices
from shared.model.devices.device import MigLayout, MigProfile
from shared.model.devices.time_slices import Interval
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import DeviceUuid, NodeName
from simcluster.node_agent.gpus import SimulatedGpus, uuid_of
from tests.support.node_agent.agent import NUMBER, OneNodeCluster, one_node_cluster, share
from tests.support.node_agent.mig import mig_share
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

A100, T4 = (uuid_of(NodeName(NODE), index) for index in range(2))
LAYOUTS = {
    layout.name: layout
    for layout in layouts_for(
        GPU_MODELS["A100-40GB"].product, GPU_MODELS["A100-40GB"].mig, KNOWN_GEOMETRIES
    )[0]
}


@asynccontextmanager
async def partitioner(root: Path, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run one as its container does, with the simulated GPUs of `root`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "simcluster.node_agent.partitioner", "--node", NODE),
        *("--gpus", "1xA100-40GB:mig+1xT4", "--state-dir", str(root)),
        *("--socket", str(root / "p.sock"), "--log-level", "warning", *flags),
    )
    try:
        await until((root / "p.sock").exists)
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def client_of(root: Path) -> RemotePartitioner:
    unused: Any = None
    return RemotePartitioner(unused, root / "p.sock")


@asynccontextmanager
async def node() -> AsyncIterator[OneNodeCluster]:
    async with one_node_cluster("1xA100-40GB:mig+1xT4") as cluster:
        cluster.changes |= {
            "partition_socket": cluster.root / "p.sock",
            "mig_file": cluster.root / "simulated-mig.json",
        }
        yield cluster


async def test_the_partitioner_partitions_devices_for_an_unprivileged_agent() -> None:
    async with node() as cluster, partitioner(cluster.root), cluster.running():
        await cluster.run_pod("one", mig_share("group3"))
        seen = await client_of(cluster.root).read_device(A100)

    assert [one.profile for one in seen.instances] == ["3g.20gb", "3g.20gb"]
    assert cluster.env("one")["NVIDIA_VISIBLE_DEVICES"] in {one.uuid for one in seen.instances}


async def test_without_the_partitioner_devices_are_kept_and_pods_fail_with_the_reason() -> None:
    async with node() as cluster, cluster.running(registered=False) as agent:
        async with partitioner(cluster.root):
            await until(lambda: len(agent.node.devices) == 2 and agent.node.devices[0].layouts)
            await until(lambda: cluster.is_served(agent))
        cluster.bind(pod("one", limits={NUMBER: 1}), mig_share("group3"))
        cluster.bind(pod("share", limits={NUMBER: 1}), share(1, 2000))
        await cluster.node.phase("one", "Failed")
        await cluster.node.phase("share", "Running")
        kept = agent.node.devices[0].layouts
        async with partitioner(cluster.root):
            await cluster.run_pod("two", mig_share("group3", fence=2))

    assert kept
    assert "no partitioner responds" in cluster.message("one")


@asynccontextmanager
async def served(
    tmp_path: Path, *, uid: int | None = None, set_time_slices: SetTimeSlices | None = None
) -> AsyncIterator[RemotePartitioner]:
    tmp_path.mkdir(exist_ok=True)
    gpus = SimulatedGpus(
        NodeName(NODE), "1xA100-40GB:mig+1xT4", tmp_path / "faults.json", tmp_path / "mig.json"
    )
    agent_uid = os.geteuid() if uid is None else uid
    server = PartitionServer(gpus, agent_uid=agent_uid, set_time_slices=set_time_slices)
    async with server.serve(tmp_path / "p.sock"):
        yield client_of(tmp_path)


async def test_only_the_agents_user_is_served(tmp_path: Path) -> None:
    async with served(tmp_path, uid=os.geteuid() + 1) as remote:
        with pytest.raises(UnavailableError, match="serves user"):
            await remote.read_device(A100)

    async with served(tmp_path) as remote:
        assert (tmp_path / "p.sock").stat().st_mode & 0o777 == 0o600
        assert (await remote.read_device(A100)).state is not None


async def test_an_instance_in_use_stays_whatever_the_request(tmp_path: Path) -> None:
    async with served(tmp_path) as remote:
        before = await remote.partition(A100, LAYOUTS["group1"], (), ())
        (tmp_path / "faults.json").write_text(json.dumps({"0": "busy"}))
        with pytest.raises(InUseError, match="in use"):
            await remote.partition(A100, LAYOUTS["group4"], (), ())
        (tmp_path / "faults.json").write_text("{}")
        with pytest.raises(InUseError, match="in use"):
            await remote.partition(A100, LAYOUTS["group4"], (), [before[0].uuid])
        after = await remote.instances(A100)

    assert uuids(after) == uuids(before)


async def test_time_slices_are_set_for_an_agent_and_not_in_mig_mode(tmp_path: Path) -> None:
    done: list[tuple[DeviceUuid, Interval]] = []

    async def set_slices(device: DeviceUuid, interval: Interval) -> None:
        if interval == "Long":
            raise UnavailableError("nvidia-smi failed")
        done.append((device, interval))

    async with served(tmp_path, set_time_slices=set_slices):
        remote = RemoteSliceSetter(tmp_path / "p.sock").set
        await remote(T4, "Short")
        with pytest.raises(UnavailableError, match="nvidia-smi failed"):
            await remote(T4, "Long")
        with pytest.raises(RequestError, match="in MIG mode: its instances have no time slices"):
            await remote(A100, "Short")
        with pytest.raises(RequestError, match="is not on this node"):
            await remote(DeviceUuid("GPU-other"), "Short")

    assert done == [(T4, "Short")]


UNKNOWN_PROFILE = MigLayout(name="x", profiles=(MigProfile(name="9g.90gb", memory_mib=1, count=1),))
TOO_MANY_INSTANCES = MigLayout(
    name="x", profiles=(MigProfile(name="1g.5gb", memory_mib=1, count=16),) * 5
)


@pytest.mark.parametrize(
    ("device", "layout", "message"),
    [
        (T4, LAYOUTS["group1"], "is not in MIG mode"),
        (DeviceUuid("GPU-other"), LAYOUTS["group1"], "is not on this node"),
        (A100, UNKNOWN_PROFILE, "the device supports"),
        (A100, TOO_MANY_INSTANCES, "a layout cannot have 80 instances"),
    ],
)
async def test_invalid_requests_are_refused(
    tmp_path: Path, device: DeviceUuid, layout: MigLayout, message: str
) -> None:
    async with served(tmp_path) as remote:
        with pytest.raises(RequestError, match=message):
            await remote.partition(device, layout, (), ())


async def test_invalid_lines_are_refused_and_the_next_request_is_served(tmp_path: Path) -> None:
    async with served(tmp_path) as remote:
        for line in (b"{}\n", b"\xff\n", b'{"type":"Reset"}\n', b"[" * 1_000 + b"\n"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "p.sock")
            writer.write(line)
            assert b"invalid request" in await reader.readline()
            writer.close()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "p.sock")
        writer.write(b"x" * 1_000_000)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()

        assert (await remote.read_device(A100)).state is not None


async def test_a_started_change_whose_caller_has_given_up_is_finished_before_instances_are_listed(
    tmp_path: Path,
) -> None:
    for name in ("listed", "closed"):
        file = tmp_path / name / "mig.json"
        async with served(file.parent) as remote:
            change = asyncio.create_task(remote.partition(A100, LAYOUTS["group1"], (), ()))
            async with asyncio.timeout(30):
                while not file.exists():
                    await asyncio.sleep(0)
            change.cancel()
            if name == "listed":
                assert len(uuids(await remote.instances(A100))) == 7
        gpus = SimulatedGpus(NodeName(NODE), "1xA100-40GB:mig", None, file)
        assert len(uuids(await gpus.instances(A100))) == 7


def uuids(instances: tuple[MigInstance, ...]) -> set[str]:
    return {one.uuid for one in instances if one.uuid}
