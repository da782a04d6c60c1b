"""What is allocated by a lease, or why it is refused; pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from services.node_agent.allocate.cdi import qualified_limits
from services.node_agent.allocate.device_list_strategies import (
    DEFAULT_STRATEGIES,
    DeviceListStrategies,
    DeviceListStrategy,
    name_devices,
)
from services.node_agent.allocate.pod_resolution import ContainerCandidate
from services.node_agent.kubelet.device_ids import compact, devices_named
from services.node_agent.mig.instances import InstanceUuids
from services.node_agent.records.checkpoint_entry import (
    CheckpointEntry,
    Fence,
    new_entry,
    slot_key,
)
from services.node_agent.records.device_guard import check_open
from shared.dialects import DIALECTS
from shared.dialects.advertised import PluginDeviceId, numbered_id
from shared.dialects.compute_time import with_compute_time
from shared.dialects.dialect import ContainerSetup, Dialect, Paths
from shared.dialects.hami_core import limited_setup, shares_by_index, whole_setup
from shared.dialects.mps import with_mps
from shared.dialects.reserved import VISIBLE
from shared.model.devices.device import Device, DeviceMode, Isolation
from shared.model.devices.enforcers import LABELS, MPS
from shared.model.devices.replicas import is_replica
from shared.model.errors import RequestError, UnavailableError
from shared.model.leases.lease import Lease, LeaseState, Share, end_text
from shared.model.names import ENDS_AT, DeviceUuid, NodeName, PodUid
from shared.model.requests.claim import DRIVER, allocated_name
from shared.model.requests.request import SharingPolicy

HONOURED_STATES = frozenset({LeaseState.BOUND, LeaseState.ACTIVE})
"""A lease in another state may still expire."""


class DeviceMismatchError(RequestError):
    """A device or slot, as it is now, cannot be given to the lease."""


class DeviceMissingError(RequestError):
    """The driver no longer lists a device."""


class OtherDevicesError(RequestError):
    """The kubelet chose other devices than the leased ones."""


NOT_ITS_OWN = (UnavailableError, DeviceMissingError)
"""Errors that the next pod would get as well, and that may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    name: NodeName
    devices: Mapping[DeviceUuid, Device]
    served: Mapping[str, Mapping[str, PluginDeviceId]]
    paths: Paths
    device_list_strategies: DeviceListStrategies = DEFAULT_STRATEGIES
    absent: frozenset[DeviceUuid] = frozenset()
    fences: Mapping[str, Fence] = field(default_factory=dict)
    instances: InstanceUuids = field(default_factory=dict)
    now: float = 0.0


def check_shares(shares: Sequence[Share], pod: PodUid, node: NodeSnapshot) -> None:
    """Raise RequestError if the node cannot give out these shares, apart from their room."""
    check_present(shares, node)
    check_fences(shares, pod, node.fences)
    check_devices(shares, node.devices)


def check_present(shares: Iterable[Share], node: NodeSnapshot) -> None:
    for share in shares:
        if share.device in node.absent:
            raise DeviceMissingError(
                f"GPU {share.index} ({share.device}, {share.device_model}) is missing on the node: "
                f"{node.devices[share.device].fault}; create the pod again, as a controller does, "
                "and it gets another GPU"
            )


def valid_lease(lease: Lease | None, candidate: ContainerCandidate, node: NodeName) -> Lease:
    """Raises RequestError, also for a variable of the pod that is reserved for leases."""
    pod = candidate.pod
    if lease is None:
        raise RequestError(
            f"pod {candidate} holds no lease on node {node}: it was not placed by Leasehold; "
            "set schedulerName to Leasehold's scheduler, and do not set nodeName"
        )
    if lease.pod != pod.uid or lease.node != node:
        raise RequestError(
            f"the lease is of pod {lease.pod} on node {lease.node}, not of pod {pod.uid} on {node}"
        )
    if lease.state not in HONOURED_STATES:
        raise RequestError(f"the lease of pod {candidate} on node {node} is {lease.state}")
    if not lease.shares_of(candidate.container.name):
        raise RequestError(f"the lease of pod {candidate} has no share for this container")
    variable = candidate.container.reserved_variable
    if variable:
        raise RequestError(
            f"container {candidate.container.name} of pod {pod.namespace}/{pod.name} sets "
            f"{variable}, which only its lease may set: remove it from the pod"
        )
    return lease


def check_sources(candidate: ContainerCandidate, strategies: DeviceListStrategies) -> None:
    """Raise RequestError if a source of variables could override those of the device plugin."""
    is_open = candidate.container.reserved_prefix is not None
    if is_open and DeviceListStrategy.ENVVAR in strategies:
        raise RequestError(
            f"container {candidate.container.name} of pod {candidate.pod.namespace}/"
            f"{candidate.pod.name} takes variables by envFrom, which could set {VISIBLE} whenever "
            "it starts: give the source a prefix such as APP_, list the variables with valueFrom, "
            "or have the administrator pass devices by CDI"
        )


def dialect_of(lease: Lease) -> Dialect:
    """Raises RequestError for an unknown dialect."""
    dialect = DIALECTS.get(lease.dialect)
    if dialect is None:
        raise RequestError(
            f"pod {lease.namespace}/{lease.name} requests GPUs as {lease.dialect!r}, which this "
            f"agent does not know: it knows {', '.join(DIALECTS)}"
        )
    return dialect


def _wanted_ids(lease: Lease, container: str, resource: str) -> Counter[DeviceUuid | None]:
    dialect = dialect_of(lease)
    counts: Counter[DeviceUuid | None] = Counter()
    for share in lease.shares_of(container):
        counts[share.device] += dialect.id_count(share, resource)
    return counts


def preferred_device_ids(
    lease: Lease | None,
    candidate: ContainerCandidate,
    node: NodeSnapshot,
    *,
    resource: str,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
) -> list[str]:
    """Choose the leased slots if they are free, else others of the device.

    Returns exactly `size` IDs with `must_include` among them, or none, which leaves the choice to
    the kubelet. Raises RequestError if the lease gives the container nothing.
    """
    lease = valid_lease(lease, candidate, node.name)
    container = candidate.container.name
    served = node.served.get(resource, {})
    wanted = _wanted_ids(lease, container, resource)
    wanted.subtract(served[text].device for text in must_include if text in served)
    free = set(available).intersection(served)
    leased = [
        numbered_id(share.device, share.slot)
        for share in lease.shares_of(container)
        if share.slot is not None
    ]
    chosen = dict.fromkeys(must_include)
    for text in (*leased, *served):
        if len(chosen) >= size:
            break
        if text in chosen or text not in free:
            continue
        device = served[text].device
        if device is not None:
            if wanted[device] <= 0:
                continue
            wanted[device] -= 1
        chosen[text] = None
    return list(chosen) if len(chosen) == size else []


def grant(
    lease: Lease,
    candidate: ContainerCandidate,
    node: NodeSnapshot,
    *,
    resource: str,
    device_ids: Sequence[str],
    reusable: Iterable[str] = (),
) -> CheckpointEntry:
    """Return the record of what the container gets. Raises RequestError with a reason to refuse it.

    `reusable` are IDs of the pod's init containers, which the kubelet reuses regardless of the
    lease. The leased device is checked first: the kubelet may have had no other choice.
    """
    container = candidate.container
    shares = valid_lease(lease, candidate, node.name).shares_of(container.name)
    check_sources(candidate, node.device_list_strategies)
    wanted = _wanted_ids(lease, container.name, resource)
    chosen = devices_named(device_ids, node.served.get(resource, {}))
    is_reused = None in chosen or not set(reusable).isdisjoint(device_ids)
    check_shares(shares, lease.pod, node)
    if chosen != wanted and not is_reused:
        check_open(shares, node.devices, {})
        raise OtherDevicesError(
            f"the kubelet chose {_counted(chosen)}, and the lease is for {_counted(wanted)}"
        )
    setup = container_setup(lease, container.name, node)
    if ends_at := end_text(lease.term, node.now):
        setup = replace(setup, environment={**setup.environment, ENDS_AT: ends_at})
    return new_entry(
        lease,
        container.name,
        resource,
        compact(device_ids),
        setup=setup,
        instances=node.instances,
        now=node.now,
        init=container.init,
    )


def container_setup(lease: Lease, container: str, node: NodeSnapshot) -> ContainerSetup:
    """Raises RequestError for a MIG instance that does not exist, or is beside other shares."""
    dialect = dialect_of(lease)
    shares = lease.shares_of(container)
    if any(share.mig for share in shares):
        names = _instance_names(shares, node.instances)
        setup = ContainerSetup(environment={VISIBLE: ",".join(names), **dialect.mig_variables})
    else:
        names = [share.device for share in shares_by_index(lease, container)]
        setup = dialect.container_setup(lease, container, node.devices, node.paths)
    setup = _with_time(setup, lease, container, container, node)
    setup = with_mps(setup, shares_by_index(lease, container), lease.pod, container, node.paths)
    return _with_hook(name_devices(setup, names, node.device_list_strategies), lease, container)


def _with_time(
    setup: ContainerSetup, lease: Lease, container: str, file_name: str, node: NodeSnapshot
) -> ContainerSetup:
    own = f"{node.paths.containers}/{lease.pod}_{file_name}"
    return with_compute_time(setup, lease.shares_of(container), own, node.paths)


def _with_hook(setup: ContainerSetup, lease: Lease, container: str) -> ContainerSetup:
    if not any(share.memory == "driver" for share in lease.shares_of(container)):
        return setup
    hook = qualified_limits(lease.pod, container)
    return replace(setup, cdi_devices=(*setup.cdi_devices, hook))


def _instance_names(shares: Iterable[Share], instances: InstanceUuids) -> list[str]:
    names = [
        instances.get((share.device, share.mig.position), "") if share.mig else ""
        for share in shares
    ]
    if not all(names):
        raise RequestError(
            "the lease is for MIG instances and other shares, which no container can use at once, "
            "or for an instance that does not exist"
        )
    return names


def claim_entry(lease: Lease, request: str, node: NodeSnapshot) -> CheckpointEntry:
    """Raises RequestError with a reason to refuse it."""
    shares = lease.shares_of(request)
    check_shares(shares, lease.pod, node)
    names = tuple(map(allocated_name, shares))
    setup = _claim_setup(lease, request, node)
    instances = node.instances
    return new_entry(lease, request, DRIVER, names, setup=setup, instances=instances, now=node.now)


def _claim_setup(lease: Lease, request: str, node: NodeSnapshot) -> ContainerSetup:
    shares = shares_by_index(lease, request)
    names: list[str] = [share.device for share in shares]
    if any(share.mig for share in shares):
        names = _instance_names(shares, node.instances)
        setup = ContainerSetup(environment={})
    elif all(share.whole for share in shares):
        setup = whole_setup(lease, request)
    else:
        # A request of a prioritized list has a slash, `gpu/mig`; a file's name has none.
        shares_of_files = tuple(
            structs.replace(share, container=share.container.replace("/", "."))
            for share in lease.shares
        )
        named = structs.replace(lease, shares=shares_of_files)
        file_name = request.replace("/", ".")
        setup = limited_setup(named, file_name, node.paths)
        setup = _with_time(setup, lease, request, file_name, node)
        setup = with_mps(setup, shares, lease.pod, request, node.paths)
    return _with_hook(name_devices(setup, names, (DeviceListStrategy.CDI_CRI,)), lease, request)


def check_fences(shares: Sequence[Share], pod: PodUid, honoured: Mapping[str, Fence]) -> None:
    """Raise DeviceMismatchError if a slot was given out for another pod's newer lease."""
    for share in shares:
        newest = honoured.get(slot_key(share, pod))
        if newest is not None and newest.pod != pod and share.fence < newest.fence:
            raise DeviceMismatchError(
                f"its lease of GPU {share.device} is outdated: pod {newest.pod} was given the same "
                "share later"
            )


def check_devices(shares: Sequence[Share], devices: Mapping[DeviceUuid, Device]) -> None:
    for share in shares:
        device = devices.get(share.device)
        if device is None:
            raise DeviceMismatchError(
                f"the lease is for device {share.device}, which is not on this node"
            )
        if (device.mode is DeviceMode.MIG) != (share.mig is not None):
            raise DeviceMismatchError(
                f"device {share.device} is in {device.mode} mode, and the lease is for "
                f"{'an instance' if share.mig else 'a part'} of it"
            )
        _check_replica(share, device)
        strict = device.isolation is Isolation.STRICT
        if strict and share.mig is None and share.sharing is not SharingPolicy.EXCLUSIVE:
            raise DeviceMismatchError(
                f"the isolation of this node is strict, and the lease is for a part of device "
                f"{share.device}: its node agent was started with --isolation strict since"
            )
        if share.memory == "driver" and "driver" not in device.offer.memory:
            reasons = {missing.name: missing.reason for missing in device.missing}
            raise DeviceMismatchError(
                f"the lease has the driver limit the memory of device {share.device}, which it "
                f"does not now: {reasons.get('driver', 'it is not offered')}"
            )
        for word in MPS:
            if word not in (share.memory, share.compute) or word in device.offer.compute:
                continue
            reasons = {missing.name: missing.reason for missing in device.missing}
            raise DeviceMismatchError(
                f"the lease has {LABELS[word]} hold its part of device {share.device}, which its "
                f"node does not offer now: {reasons.get(word, 'it is not offered')}"
            )
        if share.compute == "time" and "time" not in device.offer.compute:
            reasons = {missing.name: missing.reason for missing in device.missing}
            raise DeviceMismatchError(
                f"the lease has cores of device {share.device} held by time, which its node does "
                f"not offer now: {reasons.get('time', 'it is not offered')}"
            )
        if share.memory_mib <= 0:
            raise DeviceMismatchError(
                f"the lease is for {share.memory_mib} MiB of device {share.device}: without a "
                "limit a container would have all of it"
            )


def _check_replica(share: Share, device: Device) -> None:
    leased = share.mode if is_replica(share.mode) else None
    replicas = device.replicas
    offered = "by amounts"
    if replicas is None and leased is None:
        return
    if replicas is not None:
        memory_mib = replicas.memory_mib(device.memory_mib)
        if (leased, share.memory_mib) == (replicas.mode, memory_mib):
            return
        offered = f"as replicas by {replicas.strategy} of {memory_mib} MiB each"
    raise DeviceMismatchError(
        f"device {share.device} is offered {offered}, and the lease is for {share.memory_mib} MiB "
        f"in mode {share.mode}: its node's configuration has changed"
    )


def _counted(counts: Mapping[DeviceUuid | None, int]) -> str:
    return ", ".join(f"{count} of {device}" for device, count in sorted(counts.items(), key=str))


def refusal_text(why: str, node: NodeName, resource: str, device_ids: Sequence[str]) -> str:
    ids = compact(device_ids)
    named = ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")
    return f"Leasehold refuses {len(device_ids)} of {resource} on node {node} ({named}): {why}"
