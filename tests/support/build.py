"""Builders of values for tests: each hides what the test is not about."""

import random
from collections.abc import Callable, Mapping
from typing import Any

from shared.model.devices.device import Device, DeviceUse, MigLayout, MigProfile
from shared.model.devices.node import NodeFacts
from shared.model.events.node_events import Allocation
from shared.model.events.pod_events import PodQueued
from shared.model.leases.lease import Lease, Share, ShareMeasurement
from shared.model.leases.ledger import LedgerNode
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.request import GpuRequest, NodeRequirements, PodRequest

V100_MIB = 32768
TRIGGER = "volcano.sh/vgpu-number"
PLENTY = {"cpu": 64_000, "memory": 256 << 30, "ephemeral-storage": 1 << 40, "pods": 110}


def device(uuid: str = "GPU-a", index: int = 0, **fields: Any) -> Device:
    """A healthy V100 of 32 GiB with ten slots, unless changed."""
    defaults: dict[str, Any] = {
        "model": "Tesla V100-SXM2-32GB",
        "memory_mib": V100_MIB,
        "slots": 10,
    }
    return Device(uuid=DeviceUuid(uuid), index=index, **(defaults | fields))


def devices(count: int, node: str = "", **fields: Any) -> tuple[Device, ...]:
    """Devices GPU-<node>-0, GPU-<node>-1, ... of one node."""
    return tuple(
        device(f"GPU-{node}-{index}" if node else f"GPU-{index}", index, **fields)
        for index in range(count)
    )


def mig_layout(name: str, *profiles: tuple[str, int, int] | tuple[int, int]) -> MigLayout:
    """A layout of instances, given by their MiB and count, after their name unless it is that."""
    named = (
        profile if len(profile) == 3 else (f"{profile[0]}mib", *profile) for profile in profiles
    )
    made = (MigProfile(name=name, memory_mib=mib, count=count) for name, mib, count in named)
    return MigLayout(name=name, profiles=tuple(made))


def use(
    memory_mib: int = 0, cores_percent: int = 0, shares: int = 1, fence: int = 1, *tags: str
) -> DeviceUse:
    """What one share, or `shares`, take of a device."""
    return DeviceUse(
        memory_mib=memory_mib,
        cores_percent=cores_percent,
        shares=shares,
        fence=fence,
        anti_affinity_groups=frozenset(tags),
        mode="hami-core" if shares else "",
    )


def facts(name: str = "n1", **fields: Any) -> NodeFacts:
    """A large node without taints."""
    return NodeFacts(name=NodeName(name), **({"allocatable": PLENTY} | fields))


def ledger_node(
    name: str = "n1",
    *held: Device | tuple[Device, DeviceUse],
    served: tuple[str, ...] = (TRIGGER,),
    used: Mapping[str, int] | None = None,
    version: int = 1,
    **fields: Any,
) -> LedgerNode:
    """A node with devices, given alone when idle or with their use; `fields` are its facts."""
    return LedgerNode(
        facts=facts(name, **fields),
        version=version,
        used=used or {},
        devices=tuple((d, DeviceUse()) if isinstance(d, Device) else d for d in held),
        served=served,
    )


def gpu(
    container: str = "main", gpus: int = 1, memory: int | None = None, **fields: Any
) -> GpuRequest:
    """One container's request; `memory` is in the node's units."""
    return GpuRequest(container=container, gpus=gpus, memory_units=memory, **fields)


def request(*containers: GpuRequest, **fields: Any) -> PodRequest:
    """A request in the Volcano vGPU dialect; `fields` replace the defaults."""
    defaults: dict[str, Any] = {
        "dialect": "volcano-vgpu" if containers else "",
        "triggers": (TRIGGER,) if containers else (),
        "resources": {"cpu": 100, "memory": 1 << 20, "pods": 1},
        "node_requirements": NodeRequirements(),
    }
    return PodRequest(containers=containers, **(defaults | fields))


def pod_queued(pod: str = "uid-1", wanted: PodRequest | None = None, **fields: Any) -> PodQueued:
    """A pod that waits."""
    return PodQueued(
        pod=PodUid(pod),
        namespace=Namespace(fields.pop("namespace", "default")),
        name=fields.pop("name", pod),
        resource_version=fields.pop("resource_version", "1"),
        request=wanted if wanted is not None else request(gpu(memory=1000)),
        **fields,
    )


def share(uuid: str = "GPU-a", index: int = 0, container: str = "main", **fields: Any) -> Share:
    """One container's part of a device."""
    defaults: dict[str, Any] = {"device_mib": V100_MIB, "memory_mib": 1000, "cores_percent": 0}
    return Share(container=container, device=DeviceUuid(uuid), index=index, **(defaults | fields))


def lease(pod: str = "uid-1", node: str = "n1", *shares: Share, **fields: Any) -> Lease:
    """A reserved lease."""
    return Lease(
        pod=PodUid(pod),
        namespace=Namespace(fields.pop("namespace", "default")),
        name=fields.pop("name", pod),
        node=NodeName(node),
        shares=shares,
        **fields,
    )


def measurement(held: Lease, **amounts: Any) -> ShareMeasurement:
    """What an agent measures of the only share of a lease."""
    (share,) = held.shares
    return ShareMeasurement(
        pod=held.pod,
        namespace=held.namespace,
        name=held.name,
        container=share.container,
        device=share.device,
        **amounts,
    )


def allocation_of(
    lease: Lease,
    *,
    container: str = "main",
    resource: str = "r",
    device_ids: tuple[str, ...] = ("x",),
    activated_at: float = 0.0,
) -> Allocation:
    """The allocation of one container of the lease's pod."""
    return Allocation(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        container=container,
        resource=resource,
        device_ids=device_ids,
        lease=lease,
        activated_at=activated_at,
    )


def dice(seed: int = 1) -> Callable[[], float]:
    """A source of chance that falls the same way every time."""
    return random.Random(seed).random  # noqa: S311
