"""Brings the checkpoint in line with the kubelet and the ledger: rebuilds it, and forgets pods."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Protocol

from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.kubelet.node_pods import AgentPodLister, PodResourcesLister
from services.node_agent.mig.instances import MigInstance
from services.node_agent.reconcile.checkpoint_rebuild import ended_pods, rebuild_entries
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.known_leases import KnownLeases
from shared.model.clock import Clock
from shared.model.names import DeviceUuid, PodUid

logger = logging.getLogger(__name__)


class UnusedFiles(Protocol):
    """The host's disk."""

    async def remove_unused(self, live: set[PodUid], mounted: set[str] | None) -> None:
        """Remove the directories of other pods, and libraries not mounted; None: not known."""
        ...


class CheckpointReconciler:
    """One node's checkpoint, against what the kubelet shows and the ledger has sent."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        leases: KnownLeases,
        *,
        pods: AgentPodLister,
        pod_resources: PodResourcesLister,
        list_mig_instances: Callable[[], Awaitable[Mapping[DeviceUuid, Sequence[MigInstance]]]],
        retain_refused: Callable[[Set[PodUid]], None],
        files: UnusedFiles,
        clock: Clock,
    ) -> None:
        self.checkpoint = checkpoint
        self.leases = leases
        self.pods = pods
        self.pod_resources = pod_resources
        self.list_mig_instances = list_mig_instances
        self.retain_refused = retain_refused
        self.files = files
        self.clock = clock

    async def rebuild(self, node: NodeSnapshot) -> None:
        """Write a lost checkpoint anew from PodResources and leases; a new node's is empty.

        The leases must have been synced before.
        """
        entries = rebuild_entries(
            node,
            self.leases.leases,
            await self.pods.list_pods(),
            await self.pod_resources.list_holdings(),
            instances=await self.list_mig_instances(),
            now=self.clock.now(),
        )
        lost = [entry for entry in entries if entry.allocation.pod not in self.checkpoint.pods]
        for entry in lost:
            await self.checkpoint.save(entry)
        self.checkpoint.lost = False
        if lost:
            logger.warning("the checkpoint was rebuilt with %d entries", len(lost))

    async def remove_ended(self) -> None:
        """Forget pods that have ended, and remove their files.

        Does nothing until the leases have been synced: a kubelet that has just started shows
        nothing of pods that run.
        """
        if not self.leases.synced:
            return
        pods = await self.pods.list_pods()
        pod_resources = await self.pod_resources.list_holdings()
        ended = ended_pods(self.checkpoint.allocations, pods, pod_resources, self.leases.leases)
        await self.checkpoint.forget(ended)
        self.retain_refused({pod.uid for pod in pods if not pod.terminal})
        live = {pod.uid for pod in pods} | self.checkpoint.pods | set(self.leases.leases)
        mounts = (mount for entry in self.checkpoint.entries for mount in entry.setup.mounts)
        mounted = {mount.host_path for mount in mounts}
        await self.files.remove_unused(live, None if self.checkpoint.lost else mounted)
