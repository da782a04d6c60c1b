"""Pods, devices and leases for the tests of dialects, with defaults for everything."""

from collections.abc import Mapping
from typing import Any, TypeVar

from shared.dialects.dialect import ContainerManifest, Paths, PodManifest, Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.model.device import Device, required_cores_percent, required_memory_mib
from shared.model.lease import Lease, Share
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.request import GpuRequest, PodRequest

Amount = TypeVar("Amount", int, int | str)
PATHS = Paths(library="/opt/l/libvgpu.so", preload="/opt/l/preload", containers="/var/c")
RULES = Rules()


def koord(**amounts: Amount) -> dict[str, Amount]:
    """Limits: `shared=1, core=50, ratio=50, memory="8Gi"` or `gpu=50`."""
    names = {
        "gpu": "gpu",
        "shared": "gpu.shared",
        "core": "gpu-core",
        "ratio": "gpu-memory-ratio",
        "memory": "gpu-memory",
    }
    return {f"koordinator.sh/{names[name]}": amount for name, amount in amounts.items()}


def container_with(name: str = "c", /, **facts: Any) -> ContainerManifest:
    """A container, without limits by default."""
    return ContainerManifest(name=name, **facts)


def pod(
    *containers: ContainerManifest, notes: Mapping[str, str] | None = None, scheduler: str = ""
) -> PodManifest:
    """A pod, init containers first."""
    return PodManifest(
        namespace=Namespace("ns"),
        containers=containers,
        annotations=notes or {},
        scheduler=scheduler,
    )


def device(index: int = 0, memory_mib: int = 16384, **facts: Any) -> Device:
    """A device whose UUID ends in its index."""
    known: dict[str, Any] = {"model": "Tesla T4", "slots": 10}
    return Device(
        uuid=DeviceUuid(f"GPU-{index}"), index=index, memory_mib=memory_mib, **(known | facts)
    )


def share_of(request: GpuRequest, on: Device, **facts: Any) -> Share:
    """The share of one device that a placer would choose for a container's request."""
    return Share(
        container=request.container,
        device=on.uuid,
        index=on.index,
        device_mib=on.memory_mib,
        device_model=on.model,
        memory_mib=required_memory_mib(request, on),
        cores_percent=required_cores_percent(request),
        unit_mib=on.unit_mib,
        whole=request.whole,
        slotted=request.slotted,
        init=request.init,
        sharing=request.sharing,
        **facts,
    )


def leased(manifest: PodManifest, *places: tuple[int, ...], rules: Rules = RULES) -> Lease:
    """A pod's lease, with its containers' devices by index, one tuple for each with GPUs."""
    wanted = parse_pod_request(manifest, rules)
    return lease_of(
        wanted,
        *(
            share_of(request, device(index))
            for request, indices in zip(wanted.containers, places, strict=True)
            for index in indices
        ),
    )


def lease_of(wanted: PodRequest, *shares: Share) -> Lease:
    """The lease for a request."""
    return Lease(
        pod=PodUid("u1"),
        namespace=Namespace("ns"),
        name="train",
        node=NodeName("gpu-a"),
        shares=shares,
        dialect=wanted.dialect,
        memo=wanted.memo,
    )
