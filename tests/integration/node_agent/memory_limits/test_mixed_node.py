"""A node with GPUs that the driver, HAMi-core, MIG, one pod each, or nothing holds."""

from pathlib import Path

import pytest

from simcluster.gpu_driver.control import VARIABLE, control
from tests.support.node_agent.judged_node import KINDS
from tests.support.node_agent.mixed_node import mixed_node
from tests.support.waiting import until

PODS = 100
PER_MINUTE = 300.0


@pytest.mark.parametrize("accounting", ["dmem"])
async def test_pods_of_each_kind_have_the_limits_of_their_leases_while_others_come_and_go(
    driver_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accounting: str
) -> None:
    assert driver_folder.is_dir()
    monkeypatch.setenv(VARIABLE, "")  # the agent sets it
    async with mixed_node(tmp_path / "hook", accounting) as node:
        await node.run(PODS, per_minute=PER_MINUTE)

        assert node.wrong == []
        assert len(node.judged) == len(node.start_s) == PODS
        assert set(node.judged.values()) == set(KINDS)
        assert not node.cluster.refused
        state = node.cluster.node.kubelet.files.gpu_state
        await node.agent.clean_up()
        await until(lambda: "limit " not in control(state, "limits"))
