"""Pods, devices and leases for the tests of the Volcano dialects."""

from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerManifest, PodManifest
from shared.model.lease import Lease, Share
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid

VGPU = DIALECTS["volcano-vgpu"]
SHARE = DIALECTS["volcano-gpushare"]


def manifest_of(*containers: ContainerManifest, **annotations: str) -> PodManifest:
    return PodManifest(namespace=Namespace("ns"), containers=containers, annotations=annotations)


def vgpu(name: str = "c", /, **amounts: int) -> ContainerManifest:
    limits = {f"volcano.sh/vgpu-{key.replace('_', '-')}": n for key, n in amounts.items()}
    return ContainerManifest(name=name, limits=limits)


def gpushare(name: str = "c", *, init: bool = False, **amounts: int) -> ContainerManifest:
    limits = {f"volcano.sh/gpu-{key}": n for key, n in amounts.items()}
    return ContainerManifest(name=name, limits=limits, init=init)


def share(container: str, gpu: str, memory: int, cores: int, index: int = 0) -> Share:
    return Share(
        container=container,
        device=DeviceUuid(gpu),
        index=index,
        device_mib=11_178,
        memory_mib=memory,
        cores_percent=cores,
    )


def lease(*shares: Share, dialect: str = "volcano-vgpu") -> Lease:
    return Lease(
        pod=PodUid("u1"),
        namespace=Namespace("ns"),
        name="train",
        node=NodeName("gpu-a"),
        shares=shares,
        dialect=dialect,
    )
