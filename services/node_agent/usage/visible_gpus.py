"""The containers that may open GPUs which they do not lease; pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from services.node_agent.kubelet.pods import ClaimHolding, ContainerDevices, KubeletPod
from services.node_agent.usage.leased_containers import LeasedContainer
from shared.model.devices.device import Device
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.names import (
    AGENTS_NAMESPACE,
    SYSTEM_NAMESPACE,
    DeviceUuid,
    Namespace,
    NodeName,
    PodUid,
)
from shared.model.requests.claim import device_name

EXEMPT_NAMESPACES = frozenset({"kube-system", SYSTEM_NAMESPACE, AGENTS_NAMESPACE})
SEES_DEVICES = "leasehold.dev/sees-devices"
"""With `true`, pods of the namespace may see devices without a lease."""
MAX_NAMED = 3
PRIVILEGED = (
    "is privileged, so it can open every GPU of the node, without a lease. Remove `privileged`, or "
    f"label namespace {{namespace}} {SEES_DEVICES}=true if its pods may see all GPUs"
)
VISIBLE = (
    "can open GPU {gpus} without a lease, which the container runtime gave it for a variable, its "
    "image, an annotation or a mount. Request a share instead. `leasehold doctor` on the node "
    "lists the settings of the runtime that permit this"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    node: NodeName
    devices: Sequence[Device]
    leased: Sequence[LeasedContainer]
    pods: Mapping[PodUid, KubeletPod]
    claims: Set[ClaimHolding] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnleasedView:
    pod: KubeletPod
    container: str
    gpus: tuple[int, ...] = ()
    """Empty if it is privileged."""

    @property
    def reason(self) -> ViolationReason:
        return ViolationReason.VISIBLE if self.gpus else ViolationReason.PRIVILEGED


def unleased_views(seen: Iterable[ContainerDevices], view: NodeView) -> list[UnleasedView]:
    """GPUs that Leasehold does not serve, and unlisted containers, do not count."""
    device_at = {device.index: device for device in view.devices}
    leased_in = _by_pod(view.leased)
    held_by: dict[tuple[str, str], set[str]] = {}
    for holding in view.claims:
        held_by.setdefault((holding.namespace, holding.pod), set()).add(holding.device)
    unleased: list[UnleasedView] = []
    for container in seen:
        pod = view.pods.get(container.pod) if container.pod else None
        if pod is None or pod.terminal or not device_at:
            continue
        name = pod.container_ids.get(container.container_id)
        if name is None:
            continue
        if container.every_device:
            unleased.append(UnleasedView(pod=pod, container=name))
            continue
        leased = _leased_devices(name, leased_in.get(pod.uid, ()))
        held = held_by.get((pod.namespace, pod.name), set())
        gpus = tuple(
            index
            for index in sorted(container.gpus & device_at.keys())
            if not (device_at[index].uuid in leased or _is_held(device_at[index].uuid, held))
        )
        if gpus:
            unleased.append(UnleasedView(pod=pod, container=name, gpus=gpus))
    return unleased


def _by_pod(leased: Iterable[LeasedContainer]) -> dict[PodUid, list[LeasedContainer]]:
    containers: dict[PodUid, list[LeasedContainer]] = {}
    for container in leased:
        for uid in container.pods:
            containers.setdefault(uid, []).append(container)
    return containers


def _leased_devices(name: str, leased: Iterable[LeasedContainer]) -> set[DeviceUuid]:
    return {
        share.device
        for container in leased
        if container.lease.claim is not None or container.name == name
        for share in container.lease.shares_of(container.name)
    }


def _is_held(device: DeviceUuid, held: Set[str]) -> bool:
    """Claims for administrative access have no lease."""
    name = device_name(device)
    return any(held_name == name or held_name.startswith(f"{name}-") for held_name in held)


def visibility_violations(
    node: NodeName, unleased: Iterable[UnleasedView], exempt: Set[Namespace]
) -> Iterator[ViolationFound]:
    by_pod: dict[tuple[PodUid, ViolationReason], list[UnleasedView]] = {}
    for view in unleased:
        if view.pod.namespace not in exempt:
            by_pod.setdefault((view.pod.uid, view.reason), []).append(view)
    for (uid, reason), views in by_pod.items():
        pod = views[0].pod
        names = sorted(view.container for view in views)
        gpus = sorted({gpu for view in views for gpu in view.gpus})
        text = VISIBLE if reason is ViolationReason.VISIBLE else PRIVILEGED
        what = text.format(namespace=pod.namespace, gpus=", ".join(map(str, gpus)))
        yield ViolationFound(
            node=node,
            reason=reason,
            pod=uid,
            namespace=pod.namespace,
            name=pod.name,
            container=names[0],
            message=f"container {_listed(names)} {what}",
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"
