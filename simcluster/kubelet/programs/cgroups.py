"""The node's cgroups, version 2, as directories, and the hooks that CDI devices have called."""

import asyncio
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from simcluster.apimachinery.objects import Json
from simcluster.kubelet.containers.cdi_files import read_specifications
from simcluster.kubelet.programs.process_table import cgroup
from simcluster.kubelet.programs.processes import StartError
from simcluster.kubelet.settings import NodeFiles, replace_file

CONTROLLERS = "cpu memory pids dmem\n"
VARIABLE = "GPU_DRIVER_CGROUP"
"""By which the simulated GPUs' driver knows the cgroup of a program."""
HOOK = "createRuntime"
FIRST_PID = 1 << 23
"""Above the PIDs of the machine: a simulated container's first process does not exist."""


class Cgroups:
    """Makes and removes cgroups as a kubelet and containerd do, with systemd as their driver.

    A program on the node limits memory there. The kernel's other files are missing.
    """

    def __init__(self, files: NodeFiles) -> None:
        self.root = files.cgroups
        self._proc = files.proc
        self._cdi = files.cdi
        self._bundles = files.bundles
        self._pids = itertools.count(FIRST_PID)
        self._make(self.root / "kubepods.slice")

    def make_pod(self, pod_uid: str) -> None:
        """Make the cgroup of a pod, before its first container is prepared."""
        self._make(self._container(pod_uid, "").parent)

    def remove_pod(self, pod_uid: str) -> None:
        """Remove the cgroup of a pod that has ended."""
        shutil.rmtree(self._container(pod_uid, "").parent, ignore_errors=True)

    def environment(self, pod_uid: str, container_id: str) -> dict[str, str]:
        """Return what a container's programs need, so that the driver knows their cgroup."""
        return {VARIABLE: str(self._container(pod_uid, container_id))}

    async def create(self, pod_uid: str, container_id: str, devices: Iterable[str]) -> None:
        """Make a container's cgroup and run the hooks of its CDI devices, before its command.

        Raises StartError if a hook fails.
        """
        await asyncio.to_thread(self._make, self._container(pod_uid, container_id))
        entry = self._proc / str(next(self._pids))
        entry.mkdir(parents=True)
        try:
            (entry / "cgroup").write_text(cgroup(pod_uid, container_id))
            for hook in self._hooks(set(devices)):
                await self._run(hook, container_id.rpartition("/")[2], int(entry.name))
        except StartError:
            self.remove(pod_uid, container_id)
            raise
        finally:
            shutil.rmtree(entry, ignore_errors=True)

    def remove(self, pod_uid: str, container_id: str) -> None:
        """Remove the cgroup of a container that has ended."""
        shutil.rmtree(self._container(pod_uid, container_id), ignore_errors=True)

    def _container(self, pod_uid: str, container_id: str) -> Path:
        return self.root / cgroup(pod_uid, container_id).strip().removeprefix("0::/")

    def _make(self, path: Path) -> None:
        for directory in reversed([path, *path.parents]):
            control = directory / "cgroup.subtree_control"
            if directory.is_relative_to(self.root) and not control.exists():
                directory.mkdir(parents=True, exist_ok=True)
                replace_file(control, CONTROLLERS.encode())

    def _hooks(self, devices: set[str]) -> list[Json]:
        return [
            hook
            for specification in read_specifications(self._cdi)
            for device in specification["devices"]
            if f"{specification['kind']}={device['name']}" in devices
            for hook in device["containerEdits"].get("hooks") or ()
            if hook["hookName"] == HOOK
        ]

    async def _run(self, hook: Json, container_id: str, pid: int) -> None:
        """Run a hook: https://github.com/opencontainers/runtime-spec/blob/main/config.md."""
        state = {
            "ociVersion": "1.2.1",
            "id": container_id,
            "status": "created",
            "pid": pid,
            "bundle": str(self._bundles / container_id),
        }
        done = await asyncio.to_thread(  # under uvloop, fork beside gRPC can end this process
            subprocess.run,
            [hook["path"], *hook["args"][1:]],
            input=json.dumps(state).encode(),
            stderr=subprocess.PIPE,
            env=dict(entry.split("=", 1) for entry in hook.get("env") or ()),
            check=False,
        )
        if done.returncode:
            raise StartError(f"error running createRuntime hook: {done.stderr.decode().strip()}")
