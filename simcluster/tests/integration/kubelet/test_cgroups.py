"""Cgroups of pods and containers, and the hooks that the simulated container runtime runs there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simcluster.kubelet.programs.cgroups import Cgroups
from simcluster.kubelet.programs.processes import StartError
from simcluster.kubelet.settings import NodeFiles
from tests.support.simcluster.kubelet import FAST, one_kubelet, pod
from tests.support.waiting import until

POD = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
ID = "a" * 64
HOOK = """#!/bin/sh
state=$(cat)
pid=$(echo "$state" | sed 's/.*"pid": \\([0-9]*\\).*/\\1/')
cat "$2/$pid/cgroup" > "$1"
exit "$3"
"""


def with_hook(files: NodeFiles, status: int) -> Path:
    """Give the CDI device `example.com/a=one` a hook; return the file that it writes."""
    program = files.root / "hook"
    program.write_text(HOOK)
    program.chmod(0o755)
    seen = files.root / "seen"
    args = ["hook", str(seen), str(files.proc), str(status)]
    hook = {"hookName": "createRuntime", "path": str(program), "args": args}
    device = {"name": "one", "containerEdits": {"hooks": [hook]}}
    files.cdi.mkdir(parents=True, exist_ok=True)
    specification = {"kind": "example.com/a", "devices": [device]}
    (files.cdi / "a.json").write_text(json.dumps(specification))
    return seen


async def test_a_hook_finds_the_cgroup_of_the_container_and_may_refuse_it(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    cgroups = Cgroups(files)
    cgroups.make_pod(POD)
    seen = with_hook(files, 0)

    await cgroups.create(POD, f"containerd://{ID}", ["example.com/a=one", "example.com/a=two"])

    own = files.cgroups / seen.read_text().strip().removeprefix("0::/")
    assert own.name == f"cri-containerd-{ID}.scope"
    assert "dmem" in (own.parent / "cgroup.subtree_control").read_text()
    assert list(files.proc.iterdir()) == []
    assert str(own) in cgroups.environment(POD, ID).values()
    cgroups.remove(POD, ID)
    assert not own.exists()
    with_hook(files, 3)
    await cgroups.create(POD, ID, [])
    with pytest.raises(StartError, match="createRuntime hook"):
        await cgroups.create(POD, ID, ["example.com/a=one"])
    assert not own.exists()


async def test_pods_have_cgroups_until_they_end_where_the_settings_say_so() -> None:
    async with one_kubelet(replace(FAST, cgroups=True)) as node:
        created = node.create(pod("one", terminationGracePeriodSeconds=0))
        await node.phase("one", "Running")
        uid = created["metadata"]["uid"].replace("-", "_")
        directory = node.kubelet.files.cgroups / "kubepods.slice" / f"kubepods-pod{uid}.slice"
        assert len([path for path in directory.iterdir() if path.is_dir()]) == 1

        node.store.delete("pods", "default", "one", grace_s=0)

        await until(lambda: not directory.exists())
    async with one_kubelet() as node:
        node.create(pod("one"))
        await node.phase("one", "Running")
        assert not node.kubelet.files.cgroups.exists()
