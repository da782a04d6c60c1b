"""Pods, devices and leases for the tests of dialects, with defaults for everything."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from shared.dialects.dialect import ContainerManifest, Paths, PodManifest, Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.model.devices.device import Device, required_memory_mib
from shared.model.leases.lease import Lease, Share
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.request import PodRequest
from shared.placing.choice.device_choice import share_of

Amount = TypeVar("Amount", int, int | str)
Limits = Callable[..., dict[str, int]]
WORDS = {
    "node": "hami.io/node-scheduler-policy",
    "devices": "hami.io/gpu-scheduler-policy",
    "weights": "hami.io/device-scoring-weights",
    "numa": "nvidia.com/numa-bind",
    "mode": "nvidia.com/vgpu-mode",
    "use": "nvidia.com/use-gputype",
    "nouse": "nvidia.com/nouse-gputype",
    "uuid": "nvidia.com/use-gpuuuid",
    "nouuid": "nvidia.com/nouse-gpuuuid",
    "vgpu_uuid": "volcano.sh/vgpu-use-gpuuuid",
    "vgpu_nouuid": "volcano.sh/vgpu-nouse-gpuuuid",
    "spread": "volcano.sh/vgpu-podgroup-policy",
    "group": "scheduling.k8s.io/group-name",
    "limit": "tencent.com/vcuda-core-limit",
}
PATHS = Paths(library="/opt/l/libvgpu.so", preload="/opt/l/preload", containers="/var/c")
RULES = Rules()


def _limits(prefix: str, /, **amounts: int) -> dict[str, int]:
    return {f"{prefix}{key.replace('_', '-')}": amount for key, amount in amounts.items()}


vgpu: Limits = partial(_limits, "volcano.sh/vgpu-")
gpushare: Limits = partial(_limits, "volcano.sh/gpu-")
vcuda: Limits = partial(_limits, "tencent.com/vcuda-")
hami: Limits = partial(_limits, "nvidia.com/")


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


def noted(**words: str) -> dict[str, Any]:
    """Annotations, by short names, as an argument of `pod` and `read`."""
    return {"notes": {WORDS[name]: text for name, text in words.items()}}


Asked = Mapping[str, int] | tuple[ContainerManifest | Mapping[str, int], ...]


def each(asked: Asked) -> Iterable[ContainerManifest | Mapping[str, int]]:
    """The containers of a row of a table: one by its limits, or several."""
    return asked if isinstance(asked, tuple) else (asked,)


def pod(
    *asked: ContainerManifest | Mapping[str, int],
    notes: Mapping[str, str] | None = None,
    **facts: Any,
) -> PodManifest:
    """A pod, init containers first; limits stand for a container `c`, or for `a`, `b` and so on."""
    names = "c" if len(asked) == 1 else "abcdef"
    containers = (
        request if isinstance(request, ContainerManifest) else container_with(name, limits=request)
        for name, request in zip(names, asked, strict=False)
    )
    defaults = {"namespace": Namespace("ns"), "annotations": notes or {}}
    return PodManifest(containers=tuple(containers), **(defaults | facts))


def read(
    *asked: ContainerManifest | Mapping[str, int], rules: Rules = RULES, **facts: Any
) -> PodRequest:
    """The request of a pod."""
    return parse_pod_request(pod(*asked, **facts), rules)


def koordinated(
    *asked: ContainerManifest | Mapping[str, int], rules: Rules = RULES, **facts: Any
) -> PodRequest:
    """The request of a pod for Koordinator's scheduler."""
    return read(*asked, rules=rules, scheduler="koord-scheduler", **facts)


def device(index: int = 0, memory_mib: int = 16384, **facts: Any) -> Device:
    """A device whose UUID ends in its index."""
    defaults: dict[str, Any] = {
        "model": "Tesla T4",
        "slots": 10,
        "uuid": DeviceUuid(f"GPU-{index}"),
    }
    return Device(index=index, memory_mib=memory_mib, **(defaults | facts))


def share(container: str, gpu: str, memory: int, cores: int, index: int = 0, **facts: Any) -> Share:
    """A share as a ledger has it."""
    return Share(
        container=container,
        device=DeviceUuid(gpu),
        index=index,
        device_mib=11_178,
        memory_mib=memory,
        cores_percent=cores,
        **facts,
    )


def leased(manifest: PodManifest, *places: tuple[int, ...], rules: Rules = RULES) -> Lease:
    """A pod's lease, with its containers' devices by index, one tuple for each with GPUs."""
    wanted = parse_pod_request(manifest, rules)
    devices = (tuple(map(device, indices)) for indices in places)
    return leased_on(wanted, *devices)


def leased_on(wanted: PodRequest, *places: tuple[Device, ...]) -> Lease:
    """The lease for a request on these devices, one tuple for each container with GPUs."""
    shares = (
        share_of(request, device, required_memory_mib(request, device))
        for request, devices in zip(wanted.containers, places, strict=True)
        for device in devices
    )
    return lease_of(*shares, dialect=wanted.dialect, memo=wanted.memo)


def lease_of(*shares: Share, **facts: Any) -> Lease:
    """A lease of these shares."""
    return Lease(
        pod=PodUid("u1"),
        namespace=Namespace("ns"),
        name="train",
        node=NodeName("gpu-a"),
        shares=shares,
        **facts,
    )
