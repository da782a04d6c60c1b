"""Reconciles the checkpoint with kubelet and ledger: rebuilds it, and removes ended pods."""

import logging
from collections.abc import Mapping, Sequence, Set

from services.node_agent.kubelet.node_pods import NodePods
from services.node_agent.kubelet.pods import KubeletPod, PodResources, RunningPods
from services.node_agent.mig.instances import MigInstance
from services.node_agent.node import Node
from services.node_agent.partition.layout_reconciler import LayoutReconciler
from services.node_agent.reconcile.checkpoint_rebuild import (
    may_hold_unrecorded,
    rebuild_entries,
    unrecorded_holders,
    unused_claims,
)
from services.node_agent.reconcile.pod_end import NodeObservation, PodEnd, ends_of_pods
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import DeviceUuid, PodUid

logger = logging.getLogger(__name__)


class CheckpointReconciler:
    def __init__(
        self, node: Node, pods: NodePods, mig: LayoutReconciler, *, serves_claims: bool = True
    ) -> None:
        self.node = node
        self.checkpoint = node.checkpoint
        self.leases = node.leases
        self.pods = pods
        self.mig = mig
        self.serves_claims = serves_claims
        """The kubelet calls when a claim ends; otherwise PodResources show it."""
        self.over: Set[PodUid] = frozenset()
        """The kubelet's list is old, and shows them as live."""
        self._unseen: Mapping[PodUid, str] = {}

    async def rebuild(self) -> None:
        node = self.node.snapshot
        if node is None:
            return
        pods = await self.pods.list_pods()
        pod_resources = await self.node.pod_resources.list_holdings()
        leases = self.leases.leases
        now = self.node.clock.now()
        instances = await self._instances(pod_resources)
        entries = rebuild_entries(node, leases, pods, pod_resources, instances=instances, now=now)
        lost = [entry for entry in entries if entry.allocation.pod not in self.checkpoint.pods]
        if lost:
            await self.checkpoint.restore(lost)
        self._note_unrecorded(pods, pod_resources)
        self.checkpoint.lost = False
        if lost:
            logger.warning("the checkpoint was rebuilt with %d entries", len(lost))

    async def remove_ended(self) -> None:
        """A starting kubelet shows no running pods: forget none before the first sync."""
        if not self.leases.synced:
            await self.pods.list_pods()
            return
        pods = await self.forget_ended()
        if self.checkpoint.unrecorded:
            await self.rebuild()  # a lease may be known again, or a MIG instance exist again
        listed = {pod.uid for pod in pods}
        leased = set(self.leases.leases)
        terminal = {pod.uid for pod in pods if pod.terminal}
        self.node.refused &= listed - terminal
        self.node.refused |= terminal & leased
        live = listed | self.checkpoint.pods | leased
        mounts = (mount for entry in self.checkpoint.entries for mount in entry.setup.mounts)
        mounted = {mount.host_path for mount in mounts}
        await self.node.enforcers.end(live, None if self.checkpoint.lost else mounted)

    async def forget_ended(self) -> tuple[KubeletPod, ...]:
        """Return the kubelet's pods. Raises UnavailableError if they cannot be listed."""
        entries = self.checkpoint.entries
        try:
            pods = await self.pods.list_pods()
        except LeaseholdError as error:
            self._unseen = {entry.allocation.pod: str(error) for entry in entries}
            raise
        pod_resources: PodResources | None = None
        running: RunningPods | None = None
        reason = ""
        left = () if self.serves_claims else self.checkpoint.claims
        may_end = self._may_have_ended(entries, pods)
        try:
            if may_end or left or may_hold_unrecorded(entries, pods):
                pod_resources = await self.node.pod_resources.list_holdings()
            if may_end or left:
                running = await self.pods.find_running()
        except UnavailableError as error:
            reason = str(error)
        sight = NodeObservation(pods=pods, pod_resources=pod_resources, running=running)
        ends = ends_of_pods(entries, sight, self.leases)
        self._unseen = {
            pod: reason for pod, end in ends.items() if end is PodEnd.UNKNOWN and pod in may_end
        }
        ended = {pod for pod, end in ends.items() if end is PodEnd.ENDED}
        live = {pod.uid for pod in pods if not pod.terminal}
        self.over = (self.over | ended) & live
        if left and pod_resources is not None and running is not None:
            allocations = self.checkpoint.allocations
            leases = self.leases.leases
            ended |= unused_claims(allocations, pods, pod_resources, leases, running.uids)
        await self.checkpoint.forget(ended)
        if not reason:
            self._note_unrecorded(pods, pod_resources or PodResources())
        return pods

    def _may_have_ended(
        self, entries: Sequence[CheckpointEntry], pods: Sequence[KubeletPod]
    ) -> Set[PodUid]:
        nothing = NodeObservation(pods=pods, pod_resources=PodResources(), running=RunningPods())
        ends = ends_of_pods(entries, nothing, self.leases)
        return {pod for pod, end in ends.items() if end is PodEnd.ENDED}

    def unseen_holders(self, entry: CheckpointEntry) -> str:
        devices = {share.device for share in entry.lease.shares_of(entry.allocation.container)}
        return "; ".join(
            dict.fromkeys(
                f"{other.holder}: {self._unseen[other.allocation.pod]}"
                for other in self.checkpoint.entries
                if other.allocation.pod in self._unseen
                and any(share.device in devices for share in other.lease.shares)
            )
        )

    async def terminated(self, pods: Set[PodUid]) -> Set[PodUid]:
        """End the leases of pods whose last container has ended, and return these pods.

        A busy kubelet may call Allocate for a pod that was deleted meanwhile.
        """
        running = {pod.uid for pod in await self.pods.list_pods() if not pod.terminal}
        if not running.issuperset(pods):
            running |= (await self.pods.find_running()).uids
        self.leases.end(pods - running)
        return pods - running

    async def _instances(
        self, pod_resources: PodResources
    ) -> Mapping[DeviceUuid, Sequence[MigInstance]]:
        """The driver may not respond: it is queried only if a pod may have an instance."""
        holders = {(holding.namespace, holding.name) for holding in pod_resources.holdings}
        holders |= {(claim.namespace, claim.claim) for claim in pod_resources.claims}
        leases = self.leases.leases.values()
        if any(
            share.mig
            for lease in leases
            if (lease.namespace, lease.name) in holders
            for share in lease.shares
        ):
            return await self.mig.list_instances()
        return {}

    def _note_unrecorded(self, pods: Sequence[KubeletPod], pod_resources: PodResources) -> None:
        node = self.node.snapshot
        if node is None:
            return
        unrecorded = unrecorded_holders(node, self.checkpoint.entries, pods, pod_resources)
        if unrecorded != self.checkpoint.unrecorded:
            for device, names in unrecorded.items():
                logger.error(
                    "pods %s hold parts of device %s, of which neither the checkpoint nor a lease "
                    "is left: nothing more is given out of it until they are deleted",
                    ", ".join(names),
                    device,
                )
        self.checkpoint.unrecorded = unrecorded
