"""What PodResources and leases imply for the checkpoint: lost entries, ended pods; pure."""

from collections.abc import Iterable, Mapping, Sequence

from services.node_agent.allocate.allocation import NodeSnapshot, container_setup
from services.node_agent.kubelet.device_ids import compact
from services.node_agent.kubelet.pods import KubeletPod, PodResources
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
    pod_resources: PodResources,
    *,
    instances: Mapping[DeviceUuid, Sequence[MigInstance]],
    now: float,
) -> list[CheckpointEntry]:
    """Return an entry for each container that holds devices of ours and has a lease.

    Init containers that have ended hold nothing; containers still before Allocate are not among
    them. `instances` are those of devices in MIG mode: a container has the one at its placement.
    """
    by_name = {(pod.namespace, pod.name): pod for pod in pods if not pod.terminal}
    entries = []
    for holding in pod_resources.holdings:
        pod = by_name.get((holding.namespace, holding.name))  # type: ignore[arg-type]
        lease = leases.get(pod.uid) if pod is not None else None
        if lease is None or holding.resource not in node.served or lease.dialect not in DIALECTS:
            continue
        if not lease.shares_of(holding.container):
            continue
        try:
            uuids = container_instances(lease, holding.container, node.devices, instances)
            setup = container_setup(lease, holding.container, node, uuids)
        except RequestError:
            continue
        allocation = Allocation(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            container=holding.container,
            resource=holding.resource,
            device_ids=compact(holding.device_ids),
            lease=lease,
            activated_at=now,
        )
        entries.append(
            CheckpointEntry(allocation=allocation, setup=setup, instances=tuple(uuids.values()))
        )
    return entries


def ended_pods(
    allocations: Sequence[Allocation],
    pods: Sequence[KubeletPod],
    pod_resources: PodResources,
    leases: Mapping[PodUid, Lease],
) -> set[PodUid]:
    """Return the pods that the kubelet has dropped and whose leases have ended."""
    live = {pod.uid for pod in pods if not pod.terminal}
    names = {(pod.namespace, pod.name) for pod in pods if pod.uid in live}
    holding = {(holding.namespace, holding.name) for holding in pod_resources.holdings} - names
    return {
        allocation.pod
        for allocation in allocations
        if allocation.pod not in live
        and (allocation.namespace, allocation.name) not in holding
        and allocation.pod not in leases
    }
