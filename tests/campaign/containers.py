"""What containers were given, read from the environment and the files on their node; pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from tests.campaign.observations import AgentGrant, Grant
from tests.campaign.workload import DEVICE_CORES, DEVICE_MIB, INIT

_MIB = 1 << 20


def grants_of(
    state: Mapping[str, Any], node: str, uuids: Mapping[int, str], at: float
) -> Iterator[Grant]:
    """Return what a pod's containers that ran at `at` were given.

    `state` is the simulated container runtime's record of the pod; `uuids` are the node's devices
    by index, since Volcano's gpushare gives indices.
    """
    for container in state["containers"].values():
        if container["phase"] != "running" or container["started_at"] > at:
            continue
        environment = container["env"]
        devices = [
            each for each in environment.get("NVIDIA_VISIBLE_DEVICES", "").split(",") if each
        ]
        for position, device in enumerate(devices):
            if device in {"none", "void"}:
                continue
            memory = _memory_mib(environment, position)
            cores = int(environment.get("CUDA_DEVICE_SM_LIMIT", 0))
            yield Grant(
                pod=state["uid"],
                node=node,
                device=uuids.get(int(device), device) if device.isdecimal() else device,
                mib=DEVICE_MIB if memory is None else memory,
                cores=DEVICE_CORES if memory is None else cores,
                exclusive=memory is None,
            )


def _memory_mib(environment: Mapping[str, str], position: int) -> int | None:
    """Return the memory limit of a container's device in MiB; None: it has none."""
    for name in (f"CUDA_DEVICE_MEMORY_LIMIT_{position}", "CUDA_DEVICE_MEMORY_LIMIT"):
        if text := environment.get(name):
            return int(text[:-1]) if text.endswith("m") else -(-int(text) // _MIB)
    allocated = environment.get("VOLCANO_GPU_ALLOCATED")
    return int(allocated) if allocated else None


def checkpoint_grants(checkpoint: Mapping[str, Any]) -> Iterator[AgentGrant]:
    """Return what an agent's checkpoint records."""
    for entry in checkpoint["entries"]:
        allocation = entry["allocation"]
        for share in allocation["lease"]["shares"]:
            if share["container"] != allocation["container"] or share["container"] == INIT:
                continue
            yield AgentGrant(
                pod=allocation["pod"],
                node=checkpoint["node"],
                container=allocation["container"],
                device=share["device"],
                mib=share["memory_mib"],
                cores=share["cores_percent"],
                slot=share["slot"],
                fence=share["fence"],
                activated_at=allocation["activated_at"],
            )
