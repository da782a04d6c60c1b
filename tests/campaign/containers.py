"""What containers were given, read from the environment and the files on their node; pure."""

from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Any

from tests.campaign.observations import AgentGrant, Grant, HardwareInstance, RegionLimits
from tests.campaign.workload import DEVICE_CORES, DEVICE_MIB, INIT

_MIB = 1 << 20
NO_INSTANCES: Mapping[str, HardwareInstance] = {}
EXCLUSIVE = 1
"""The number of the sharing policy of a share that has its device to itself."""
REGION_BYTES, REGION_HEAD = 2_008_953, 1856
"""Size of a region file of HAMi-core 1.2, and of its part before the processes."""
_MAGIC, _VERSION = 19920718, (1, 2)
_HEAD, _LIMITS = Struct("<iII"), Struct("<16Q16Q")
_LIMITS_AT = 1600


def grants_of(
    state: Mapping[str, Any],
    node: str,
    uuids: Mapping[int, str],
    at: float,
    instances: Mapping[str, HardwareInstance] = NO_INSTANCES,
) -> Iterator[Grant]:
    """Return what a pod's containers that ran at `at` were given.

    `state` is the simulated container runtime's record of the pod; `uuids` are the node's devices
    by index, since Volcano's gpushare gives indices; `instances` are all that were ever seen.
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
            if device.startswith("MIG-"):
                yield _instance_grant(state["uid"], node, device, instances.get(device))
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


def _instance_grant(pod: str, node: str, uuid: str, instance: HardwareInstance | None) -> Grant:
    """Return what an instance gives; one that no device ever had gives nothing."""
    return Grant(
        pod=pod,
        node=node,
        device=instance.device if instance else uuid,
        mib=instance.mib if instance else 0,
        cores=0,
        instance=uuid,
    )


def _memory_mib(environment: Mapping[str, str], position: int) -> int | None:
    """Return the memory limit of a container's device in MiB; None: it has none."""
    for name in (f"CUDA_DEVICE_MEMORY_LIMIT_{position}", "CUDA_DEVICE_MEMORY_LIMIT"):
        if text := environment.get(name):
            return int(text[:-1]) if text.endswith("m") else -(-int(text) // _MIB)
    allocated = environment.get("VOLCANO_GPU_ALLOCATED")
    return int(allocated) if allocated else None


def region_limits(pod: str, head: bytes) -> RegionLimits | None:
    """Read the limits of a region file from its head; None: it is none, or has no limits."""
    if len(head) < REGION_HEAD or _HEAD.unpack_from(head) != (_MAGIC, *_VERSION):
        return None
    numbers = _LIMITS.unpack_from(head, _LIMITS_AT)
    limited = [
        (size, cores) for size, cores in zip(numbers[:16], numbers[16:], strict=True) if size
    ]
    if not limited:
        return None
    return RegionLimits(
        pod=pod,
        mib=tuple(-(-size // _MIB) for size, _ in limited),
        cores=tuple(cores for _, cores in limited),
    )


def checkpoint_grants(checkpoint: Mapping[str, Any]) -> Iterator[AgentGrant]:
    """Return what an agent's checkpoint records; a container with two resources counts once."""
    seen: set[tuple[str, str]] = set()
    for entry in checkpoint["entries"]:
        allocation, lowered = entry["allocation"], entry.get("lowered")
        key = (allocation["pod"], allocation["container"])
        lease = lowered["lease"] if lowered else allocation["lease"]
        for share in () if key in seen else lease["shares"]:
            if share["container"] != allocation["container"] or share["container"] == INIT:
                continue
            yield AgentGrant(
                pod=allocation["pod"],
                node=checkpoint["node"],
                container=allocation["container"],
                device=share["device"],
                mib=share["memory_mib"],
                cores=0 if share.get("mig") else share["cores_percent"],
                slot=share.get("slot"),
                fence=share["fence"],
                activated_at=allocation["activated_at"],
                exclusive=share.get("whole", False) or share.get("sharing") == EXCLUSIVE,
            )
        seen.add(key)
