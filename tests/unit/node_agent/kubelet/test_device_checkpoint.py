"""Which amounts in node status a kubelet allocates by device plugin."""

import json
from pathlib import Path

from services.node_agent.kubelet.device_checkpoint import FILE_NAME, PluginResources
from tests.support.node_agent.agent import MEMORY
from tests.support.node_agent.node import FakeKubelet, node_of


async def test_new_amounts_are_examined_although_the_kubelets_checkpoint_is_unchanged(
    tmp_path: Path,
) -> None:
    content = {"Data": {"RegisteredDevices": {MEMORY: ["0"]}}}
    (tmp_path / FILE_NAME).write_text(json.dumps(content))

    async def none_allocatable(_: str) -> int:
        return 0

    resources = PluginResources(node_of(FakeKubelet()), tmp_path, none_allocatable)
    await resources.refresh(frozenset())
    await resources.refresh(frozenset({MEMORY}))

    assert resources.since.keys() == {MEMORY}
