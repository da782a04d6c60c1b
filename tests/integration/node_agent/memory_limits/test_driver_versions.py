"""A driver that is upgraded to one that limits memory, and downgraded, while pods run."""

from pathlib import Path
from typing import Any

import pytest

from shared.model.leases.lease import MIB
from simcluster.gpu_driver.control import VARIABLE, control
from simcluster.kubelet.programs.cgroups import VARIABLE as CGROUP
from tests.support.node_agent.agent import share
from tests.support.node_agent.judged_node import driver_limits
from tests.support.node_agent.mixed_node import cluster_with_driver
from tests.support.node_agent.regions import limit_mib
from tests.support.waiting import until

BY_DRIVER: dict[str, Any] = {"memory": "driver", "compute": "hami-core", "mode": "driver"}


async def test_running_pods_keep_what_holds_them_and_new_ones_get_what_the_driver_offers(
    driver_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")  # the agent sets it
    async with cluster_with_driver("2xT4", tmp_path / "hook") as cluster:
        gpu_state = cluster.node.kubelet.files.gpu_state
        async with cluster.running() as agent:
            assert "driver" not in agent.node.devices[0].offer.memory
            first = await cluster.run_pod("first", share(0, 1_000))
        region = cluster.region_of(first)

        control(gpu_state, "accounting", "dmem")
        async with cluster.running() as agent:
            await until(lambda: "driver" in agent.node.devices[0].offer.memory)
            await agent.usage.audit.audit()
            before = driver_limits(gpu_state)
            second = await cluster.run_pod("second", share(1, 2_000, fence=2, **BY_DRIVER))
            await agent.usage.audit.audit()

            own = cluster.env("second")[CGROUP]
            places = ((second.shares[0].device, place) for place in (own, str(Path(own).parent)))
            assert before == {}, "nothing changes for the pod that runs"
            assert driver_limits(gpu_state) == dict.fromkeys(places, 2_000 * MIB)
            assert limit_mib(region) == 1_000
            assert not agent.usage.audit.violations

        control(gpu_state, "accounting", "none")
        async with cluster.running() as agent:
            assert "driver" not in agent.node.devices[0].offer.memory
            await cluster.fail_pod("third", share(0, 3_000, slot=1, fence=3, **BY_DRIVER))
            await agent.usage.audit.audit()

            assert "older than R615" in cluster.message("third")
            lost = [
                (violation.name, violation.reason) for violation in agent.usage.audit.violations
            ]
            assert set(lost) == {("second", "GpuLimitMissing")}
            assert limit_mib(region) == 1_000
            assert cluster.node.pod("first")["status"]["phase"] == "Running"
