"""Derives lost checkpoint entries, and unused claims, from PodResources and leases; pure."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from services.node_agent.allocate.allocation import NodeSnapshot, claim_entry, container_setup
from services.node_agent.kubelet.device_ids import compact
from services.node_agent.kubelet.pods import KubeletPod, PodResources
from services.node_agent.mig.instances import MigInstance, container_instances
from services.node_agent.records.checkpoint_entry import CheckpointEntry, new_entry
from shared.model.errors import RequestError
from shared.model.events.node_events import Allocation
from shared.model.leases.lease import Lease
from shared.model.names import DeviceUuid, PodUid
from shared.model.requests.claim import allocated_name


def rebuild_entries(
    node: NodeSnapshot,
    leases: Mapping[PodUid, Lease],
    pods: Iterable[KubeletPod],
    pod_resources: PodResources,
    *,
    instances: Mapping[DeviceUuid, Sequence[MigInstance]],
    now: float,
) -> list[CheckpointEntry]:
    """Ended init containers, and containers before Allocate, have no devices."""
    entries: list[CheckpointEntry] = []
    live: dict[tuple[str, str], Lease | None] = {
        (pod.namespace, pod.name): leases.get(pod.uid) for pod in pods if not pod.terminal
    }
    for holding in pod_resources.holdings:
        lease = live.get((holding.namespace, holding.name))
        if lease is None or holding.resource not in node.served:
            continue
        if not lease.shares_of(holding.container):
            continue
        with contextlib.suppress(RequestError):
            name = holding.container
            ids = compact(holding.device_ids)
            uuids = container_instances(lease, name, node.devices, instances)
            setup = container_setup(lease, name, replace(node, instances=uuids))
            entry = new_entry(
                lease, name, holding.resource, ids, setup=setup, instances=uuids, now=now
            )
            entries.append(entry)
    for lease, name in _held_by_claims(leases, pod_resources):
        with contextlib.suppress(RequestError):
            uuids = container_instances(lease, name, node.devices, instances)
            entries.append(claim_entry(lease, name, replace(node, instances=uuids, now=now)))
    return entries


def _held_by_claims(
    leases: Mapping[PodUid, Lease], pod_resources: PodResources
) -> Iterator[tuple[Lease, str]]:
    held: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for claim in pod_resources.claims:
        devices = held.setdefault((claim.namespace, claim.claim), set())
        devices.add((claim.device, claim.share_id))
    for lease in leases.values():
        leased = {(allocated_name(s), s.share_id) for s in lease.shares}
        if lease.claim and leased <= held.get((lease.namespace, lease.name), set()):
            yield from ((lease, request) for request in lease.containers)


def may_hold_unrecorded(entries: Iterable[CheckpointEntry], pods: Iterable[KubeletPod]) -> bool:
    recorded = {entry.place for entry in entries}
    return any(
        container.limits and (pod.namespace, pod.name, container.name) not in recorded
        for pod in pods
        if not pod.terminal
        for container in pod.containers
    )


def unrecorded_holders(
    node: NodeSnapshot,
    entries: Iterable[CheckpointEntry],
    pods: Iterable[KubeletPod],
    pod_resources: PodResources,
) -> dict[DeviceUuid, tuple[str, ...]]:
    """An agent whose records were lost gave the devices out, for leases that were lost too."""
    live = {(pod.namespace, pod.name) for pod in pods if not pod.terminal}
    recorded = {entry.place for entry in entries}
    uuids: dict[DeviceUuid, set[str]] = {}
    for holding in pod_resources.holdings:
        if (holding.namespace, holding.name) not in live or holding.place in recorded:
            continue
        served = node.served.get(holding.resource, {})
        for text in holding.device_ids & served.keys():
            device = served[text].device
            if device is not None:
                uuids.setdefault(device, set()).add(f"{holding.namespace}/{holding.name}")
    return {device: tuple(sorted(names)) for device, names in uuids.items()}


def unused_claims(
    allocations: Sequence[Allocation],
    pods: Sequence[KubeletPod],
    pod_resources: PodResources,
    leases: Mapping[PodUid, Lease],
    running: Set[PodUid],
) -> set[PodUid]:
    held = {(claim.namespace, claim.claim) for claim in pod_resources.claims}
    live = {pod.uid for pod in pods if not pod.terminal} | running
    return {
        allocation.pod
        for allocation in allocations
        if allocation.lease.claim is not None
        and (allocation.namespace, allocation.name) not in held
        and live.isdisjoint(leases.get(allocation.pod, allocation.lease).users)
    }
