"""Limits of the driver that other programs have set; pure."""

from collections.abc import Iterator, Mapping, Sequence

from services.node_agent.gpus.memory_limits import UNLIMITED, ForeignLimit
from services.node_agent.kubelet.pods import KubeletPod
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.leases.lease import MIB
from shared.model.names import DeviceUuid, NodeName, PodUid

MOST_PATH = 300


class ForeignLimits:
    def __init__(self) -> None:
        self._by_device: dict[DeviceUuid, tuple[ForeignLimit, ...]] = {}

    def replace(self, device: DeviceUuid, limits: Sequence[ForeignLimit]) -> list[str]:
        """Return sentences about new limits."""
        before = self._by_device.get(device, ())
        self._by_device[device] = tuple(limits)
        return [_described(device, limit) for limit in limits if limit not in before]

    def reason(self, device: DeviceUuid) -> str:
        """Tenants may read the text, so it names no cgroup of a pod."""
        limits = self._by_device.get(device, ())
        outside = [limit.cgroup[-MOST_PATH:] for limit in limits if limit.pod is None]
        pods = len({limit.pod for limit in limits if limit.pod is not None})
        of_pods = "a pod's cgroup" if pods == 1 else f"cgroups of {pods} pods"
        places = [*outside[:1], *([of_pods] if pods else ())]
        if not places:
            return ""
        return (
            f"another program limits memory by the driver, of {' and '.join(places)}, without a "
            "lease for that: the log of the node agent has the limits and how to remove them"
        )

    def violations(
        self, node: NodeName, pods: Mapping[PodUid, KubeletPod]
    ) -> Iterator[ViolationFound]:
        for device, limits in self._by_device.items():
            for limit in limits:
                pod = pods.get(limit.pod) if limit.pod is not None else None
                if pod is not None:
                    yield ViolationFound(
                        node=node,
                        pod=pod.uid,
                        namespace=pod.namespace,
                        name=pod.name,
                        container="",
                        reason=ViolationReason.LIMIT_FOREIGN,
                        message=_described(device, limit),
                        device=device,
                    )


def _described(device: DeviceUuid, limit: ForeignLimit) -> str:
    return (
        f"another program limits the memory of GPU {device}: it has set {_amounts(limit)} for "
        f"cgroup {limit.cgroup[-MOST_PATH:]}, which has no lease by the driver. Find the program, "
        f"such as NVIDIA's hook, and stop it; then run nvidia-smi memory-limits --set -n "
        f"{limit.cgroup[-MOST_PATH:]} --soft-limit 0 --hard-limit max -i {device}"
    )


def _amounts(limit: ForeignLimit) -> str:
    hard = "" if limit.hard_bytes == UNLIMITED else f"{limit.hard_bytes // MIB} MiB at most"
    soft = f"{limit.soft_bytes // MIB} MiB guaranteed" if limit.soft_bytes else ""
    return " and ".join(filter(None, (hard, soft)))
