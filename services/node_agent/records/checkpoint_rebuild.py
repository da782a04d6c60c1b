"""What the kubelet and the leases imply about the checkpoint: what it lost, what is over; pure."""

from collections.abc import Iterable, Mapping, Sequence

from services.node_agent.allocate.allocation import NodeSnapshot, container_setup
from services.node_agent.allocate.pod_resolution import KubeletPod, PodResources
from services.node_agent.kubelet.device_ids import compact
from services.node_agent.mig.instances import (
    MigInstance,
    container_instances,
)
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.dialects import DIALECTS
from shared.model.errors import RequestError
from shared.model.events.node_events import Allocation
from shared.model.lease import Lease
from shared.model.names import DeviceUuid, PodUid


def rebuild_entries(
    node: NodeSnapshot,
    leases: Mapping[PodUid, Lease],
    pods: Iterable[KubeletPod],
    shown: PodResources,
    *,
    instances: Mapping[DeviceUuid, Sequence[MigInstance]],
    now: float,
) -> list[CheckpointEntry]:
    """Return an entry for each container that holds devices of ours and has a lease.

    Init containers that have ended hold nothing; who still waits for Allocate is not among them.
    `instances` are those of devices in MIG mode: who had one has the one at its place.
    """
    by_name = {(pod.namespace, pod.name): pod for pod in pods if not pod.terminal}
    entries = []
    for held in shown.holdings:
        pod = by_name.get((held.namespace, held.name))  # type: ignore[arg-type]
        lease = leases.get(pod.uid) if pod is not None else None
        if lease is None or held.resource not in node.served or lease.dialect not in DIALECTS:
            continue
        if not lease.shares_of(held.container):
            continue
        try:
            uuids = container_instances(lease, held.container, node.devices, instances)
            setup = container_setup(lease, held.container, node, uuids)
        except RequestError:
            continue
        activation = Allocation(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            container=held.container,
            resource=held.resource,
            device_ids=compact(held.device_ids),
            lease=lease,
            activated_at=now,
        )
        entries.append(
            CheckpointEntry(allocation=activation, setup=setup, instances=tuple(uuids.values()))
        )
    return entries


def ended_pods(
    allocations: Sequence[Allocation],
    pods: Sequence[KubeletPod],
    shown: PodResources,
    leases: Mapping[PodUid, Lease],
) -> set[PodUid]:
    """Return the pods that the kubelet has let go of and whose leases have ended."""
    live = {pod.uid for pod in pods if not pod.terminal}
    names = {(pod.namespace, pod.name) for pod in pods if pod.uid in live}
    holding = {(held.namespace, held.name) for held in shown.holdings} - names
    return {
        told.pod
        for told in allocations
        if told.pod not in live
        and (told.namespace, told.name) not in holding
        and told.pod not in leases
    }
