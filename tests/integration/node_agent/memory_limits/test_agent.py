"""An agent whose driver limits memory, beside a simulated kubelet: from the pod's first call on."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.memory_limits import container_limits
from services.node_agent.memory_limits.build_hook import build_hook
from shared.model.errors import UnavailableError
from shared.model.leases.lease import Lease
from simcluster.gpu_driver.control import VARIABLE, control
from simcluster.kubelet.programs.cgroups import VARIABLE as CGROUP
from simcluster.node_agent.driver import STATE
from tests.integration.node_agent.memory_limits.conftest import ID
from tests.support.cgroups import CgroupTree
from tests.support.gpu_driver import MIB
from tests.support.node_agent.agent import (
    NUMBER,
    OneNodeCluster,
    lease_of,
    one_node_cluster,
    share,
)
from tests.support.simcluster.kubelet import pod
from tests.support.waiting import until


@pytest.fixture
async def cluster(
    driver_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OneNodeCluster]:
    """A node whose driver is R615, with cgroups that a test makes."""
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")  # the agent sets it
    try:
        hook = build_hook(tmp_path / "hook")
    except UnavailableError as error:
        pytest.skip(str(error))
    async with one_node_cluster("1xT4") as cluster:
        CgroupTree(root=cluster.root / "cgroup").make("kubepods.slice")
        (cluster.root / "proc").mkdir()
        cluster.changes |= {
            "gpu_driver_dir": cluster.root / "gpus",
            "cgroup_root": cluster.root / "cgroup",
            "proc_dir": cluster.root / "proc",
            "bundle_dir": (str(cluster.root / "bundles"),),
            "limit_hook": hook,
            "device_list_strategy": ("cdi-cri",),
            "cdi_dir": cluster.node.kubelet.files.cdi,
        }
        yield cluster


def tree(cluster: OneNodeCluster) -> CgroupTree:
    return CgroupTree(root=cluster.root / "cgroup")


def set_accounting(cluster: OneNodeCluster, which: str) -> None:
    control(cluster.root / "gpus" / STATE, "accounting", which)


def limits(cluster: OneNodeCluster) -> dict[Path, int]:
    rows = control(cluster.root / "gpus" / STATE, "limits").splitlines()
    words = (row.split() for row in rows if row.startswith("limit "))
    return {Path(row[2]): int(row[row.index("hard") + 1]) for row in words}


def driver_lease(uid: str, name: str, memory_mib: int = 2000) -> Lease:
    held: dict[str, Any] = {"memory": "driver", "compute": "none", "mode": "driver", "fence": 7}
    return lease_of(uid, share(memory_mib=memory_mib, **held), name=name)


async def offered(cluster: OneNodeCluster) -> tuple[str, ...]:
    assert cluster.agent is not None
    await cluster.agent.watcher.probe()
    return cluster.agent.node.devices[0].offer.memory


async def cleaned(cluster: OneNodeCluster) -> bool:
    """Have the agent clean up; return whether no limit is left."""
    assert cluster.agent is not None
    await cluster.agent.clean_up()
    return not limits(cluster)


async def call_hook(cluster: OneNodeCluster, lease: Lease, pid: int) -> tuple[int, str]:
    """Call the hook that the container's CDI file names, as a runtime does."""
    (file,) = cluster.node.kubelet.files.cdi.glob(f"*limits-{lease.pod}-main.json")
    (device,) = json.loads(file.read_text())["devices"]
    (hook,) = device["containerEdits"]["hooks"]
    process = await asyncio.create_subprocess_exec(
        hook["path"],
        *hook["args"][1:],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
    )
    state = json.dumps({"id": ID, "pid": pid, "bundle": "/b"}).encode()
    _, errors = await process.communicate(state)
    assert process.returncode is not None
    return process.returncode, errors.decode()


async def test_an_agent_that_is_limited_is_not_ready_and_reports_no_smaller_gpu(
    cluster: OneNodeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_limits, "TRY_S", 0.0)
    own = tree(cluster).make("system.slice/agent.service")
    (cluster.root / "proc" / str(os.getpid())).mkdir()
    (cluster.root / "proc" / str(os.getpid()) / "cgroup").write_text(
        f"0::/{'/'.join(own.parts[-2:])}"
    )
    async with cluster.running():
        set_accounting(cluster, "dmem")
    async with cluster.running() as agent:
        assert await offered(cluster) == ("driver", "hami-core")
        [before] = agent.node.devices
        state = cluster.root / "gpus" / STATE
        control(state, "limit", before.uuid, str(own), "0", str(4_000 * MIB))
        monkeypatch.setenv(CGROUP, str(own))
        [smaller] = await agent.watcher.driver.discover()
        assert smaller.memory_mib == 4_000

        with pytest.raises(UnavailableError, match="limits this agent itself to 4000 MiB"):
            await agent.watcher.probe()

        await until(lambda: "limits this agent itself" in str(agent.probes["gpus"]()))
        [device] = agent.node.devices
        assert device.memory_mib == before.memory_mib
        control(state, "limit", before.uuid, str(own), "0", "max")
        monkeypatch.delenv(CGROUP)
        await until(lambda: agent.probes["gpus"]() is None)


async def test_a_pod_and_its_container_are_limited_before_they_run(
    cluster: OneNodeCluster,
) -> None:
    async with cluster.running() as agent:
        assert await offered(cluster) == ("hami-core",)
        reasons = {missing.name: missing.reason for missing in agent.node.devices[0].missing}
        assert "older than R615" in reasons["driver"]
        set_accounting(cluster, "dmem")
    async with cluster.running():
        assert await offered(cluster) == ("driver", "hami-core")
        created = cluster.node.create(pod("one", limits={NUMBER: 1}))["metadata"]
        lease = cluster.ledger.grant(driver_lease(created["uid"], "one"))
        await until(
            lambda: str(cluster.node.pod("one")["status"]), lambda text: "has no cgroup" in text
        )
        assert cluster.node.pod("one")["status"]["phase"] == "Pending"
        directory = tree(cluster).make_pod(lease.pod)
        await until(
            lambda: str(cluster.node.pod("one")["status"]), lambda text: "'running'" in text
        )

        assert limits(cluster) == {directory: 2000 * MIB}
        names = cluster.node.kubelet.files.cdi.iterdir()
        assert any(f"limits-{lease.pod}-main" in path.name for path in names)
        assert not [name for name in cluster.env("one") if name.startswith("CUDA_DEVICE")]

        container = tree(cluster).make_container(directory, ID)
        (cluster.root / "proc" / "77").mkdir(parents=True)
        path = f"0::/{container.relative_to(tree(cluster).root)}\n"
        (cluster.root / "proc" / "77" / "cgroup").write_text(path)
        (cluster.root / "bundles" / ID).mkdir(parents=True)
        (cluster.root / "bundles" / ID / "config.json").write_text("{}")
        assert (await call_hook(cluster, lease, 78))[0] == 1
        assert limits(cluster) == {directory: 2000 * MIB}
        assert await call_hook(cluster, lease, 77) == (0, "")
        assert limits(cluster) == {directory: 2000 * MIB, container: 2000 * MIB}

    control(cluster.root / "gpus" / STATE, "forget-limits")
    assert (await call_hook(cluster, lease, 77))[0] == 1  # without an agent
    async with cluster.running():
        await until(lambda: limits(cluster).get(directory) == 2000 * MIB)
        shutil.rmtree(cluster.root / "proc" / "77")
        await cluster.delete_pod("one")
        await cluster.release(lease)
        await until(lambda: cleaned(cluster))
