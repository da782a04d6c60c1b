"""The OCI bundles of a node's containers, which the simulated container runtime keeps.

Each has the specification of one container, as containerd's have, with the parts that show which
devices the container may open.
"""

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

DRIVER = 195
"""Major number of NVIDIA's devices."""
_NO_PROCESS = "0"
"""Most simulated containers have no process; none has mounts of devices."""


class Bundles:
    """The bundles of one node, a directory for each container."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def add(
        self,
        pod_uid: str,
        container_id: str,
        gpus: Iterable[int],
        *,
        env: Mapping[str, str],
        privileged: bool,
    ) -> None:
        """Write the bundle of a new container."""
        bundle = self._place(container_id)
        bundle.mkdir(parents=True, exist_ok=True)
        specification = _specification(pod_uid, bundle.name, gpus, privileged=privileged)
        variables = [f"{name}={value}" for name, value in env.items()]
        specification["process"] = {"env": variables}
        (bundle / "config.json").write_text(json.dumps(specification))
        (bundle / "init.pid").write_text(_NO_PROCESS)

    def remove(self, container_id: str) -> None:
        """Remove the bundle of a container that has ended."""
        if container_id:
            shutil.rmtree(self._place(container_id), ignore_errors=True)

    def retain(self, container_ids: Collection[str]) -> None:
        """Remove the bundles of all other containers."""
        kept = {self._place(container_id) for container_id in container_ids}
        for bundle in self._directory.glob("*"):
            if bundle not in kept:
                shutil.rmtree(bundle, ignore_errors=True)

    def _place(self, container_id: str) -> Path:
        return self._directory / container_id.rpartition("/")[2]


def _specification(
    pod_uid: str, name: str, gpus: Iterable[int], *, privileged: bool
) -> dict[str, Any]:
    nodes = [
        {"path": f"/dev/nvidia{minor}", "type": "c", "major": DRIVER, "minor": minor}
        for minor in gpus
    ]
    rules: list[dict[str, Any]] = [{"allow": privileged, "access": "rwm"}]
    rules += [
        {"allow": True, "type": "c", "major": DRIVER, "minor": node["minor"], "access": "rw"}
        for node in nodes
    ]
    pod = f"kubepods-pod{pod_uid.replace('-', '_')}.slice"
    return {
        "ociVersion": "1.2.1",
        "linux": {
            "cgroupsPath": f"{pod}:cri-containerd:{name}",
            "devices": nodes,
            "resources": {"devices": rules},
        },
    }
