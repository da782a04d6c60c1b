"""Bundles of containers as containerd and CRI-O leave them on a node."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.node_agent.container_runtime.bundles import BUNDLES

CONTAINERD = BUNDLES[0]
CRIO = BUNDLES[2]
ALL_DEVICES = {"allow": True, "access": "rwm"}
USUAL = [
    {"allow": False, "access": "rwm"},
    {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rwm"},
    {"allow": True, "type": "c", "major": 136, "access": "rwm"},
    {"allow": True, "type": "c", "access": "m"},
    {"allow": True, "type": "b", "access": "rwm"},
]
ROOT_MOUNT = "1021 876 0:87 / / rw,relatime master:313 - overlay overlay rw,lowerdir=/var/lib/c\n"


def rule(minor: int) -> dict[str, Any]:
    """Return the rule that lets a container open a device of the driver."""
    return {"allow": True, "type": "c", "major": 195, "minor": minor, "access": "rw"}


def node(minor: int, path: str = "") -> dict[str, Any]:
    """Return a device node of the driver."""
    return {"path": path or f"/dev/nvidia{minor}", "type": "c", "major": 195, "minor": minor}


def hook_mount(path: str) -> str:
    """Return the mount of a device that NVIDIA's hook makes."""
    return f"1101 1021 0:5 {path.removeprefix('/dev')} {path} ro,nosuid - devtmpfs udev rw\n"


@dataclass(frozen=True, slots=True)
class Bundles:
    """The bundles below one root, and the processes of their containers."""

    root: Path

    @property
    def proc(self) -> Path:
        return self.root / "proc"

    def add(
        self,
        pod: str,
        container_id: str,
        *,
        devices: Sequence[dict[str, Any]] = (),
        rules: Sequence[dict[str, Any]] = (),
        mounts: Sequence[str] = (),
        mountinfo: str = "",
        created: bool = True,
        below: str = CONTAINERD,
        cgroup: str = "",
    ) -> Path:
        """Write a container's bundle; its devices have rules, as runtimes write them."""
        folder = self.root / below / container_id
        files = folder / "userdata" if below == CRIO else folder
        files.mkdir(parents=True, exist_ok=True)
        named = pod.replace("-", "_")
        document = {
            "ociVersion": "1.2.1",
            "process": {"args": ["sleep"], "env": ["NVIDIA_VISIBLE_DEVICES=all"], "cwd": "/"},
            "mounts": [{"destination": place, "type": "bind", "source": place} for place in mounts],
            "linux": {
                "cgroupsPath": cgroup
                or f"kubepods-burstable-pod{named}.slice:cri-containerd:{container_id}",
                "devices": list(devices),
                "resources": {
                    "devices": [*USUAL, *(rule(device["minor"]) for device in devices), *rules],
                    "memory": {"limit": 1 << 30},
                },
            },
        }
        (files / "config.json").write_text(json.dumps(document))
        if created:
            pid = str(10_000 + int(container_id, 16) % 1_000_000)
            (files / ("pidfile" if below == CRIO else "init.pid")).write_text(pid)
            process = self.proc / pid
            process.mkdir(parents=True, exist_ok=True)
            (process / "mountinfo").write_text(ROOT_MOUNT + mountinfo)
        return folder

    def remove(self, container_id: str, below: str = CONTAINERD) -> None:
        """Remove a bundle, as when its container has ended."""
        shutil.rmtree(self.root / below / container_id)
