"""The pods of the node: the kubelet's list, or, if it cannot be read, pods derived from leases.

Without the list (an older cluster, a missing permission) a pod is known by its lease, and counts
only while the kubelet's PodResources list it as active. A pod's own variables are not seen then.
"""

import asyncio
import logging
from pathlib import Path

from services.node_agent.allocate.expected_requests import implied_pods
from services.node_agent.kubelet.cgroups import pod_of_process, pods_of_processes
from services.node_agent.kubelet.pods import KubeletPod
from services.node_agent.node import Node
from shared.kubernetes.kubeconfig import KubeconfigError
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

PROCESS_START_S = 2.0
"""How long after PreStartContainer the first process of a container may start."""
RETRY_S = 5.0
"""Interval between attempts to read an unreadable pod list."""
RESTART_S = 10.0
"""For this time, a kubelet that does not respond may be restarting."""
ACCESS_ADVICE = (
    "grant the agent's account `get` on nodes/pods, or on nodes/proxy before Kubernetes 1.33"
)
TLS_ADVICE = (
    "check --kubelet-ca-file (the CA of the kubelet's certificate) and --kubelet-token-file"
)
SILENT_ADVICE = "check the kubelet's log, and --kubelet-address"


class NodePods:
    """The kubelet's list with its fallback."""

    def __init__(self, node: Node, proc: Path) -> None:
        self.node = node
        self.clock = node.clock
        self.proc = proc
        self.unreadable_reason = ""
        """Why the kubelet's list cannot be read, if it cannot."""
        self._silent_since: float | None = None
        self._tried_at = 0.0
        self._finds_processes = False
        """Whether processes of another pod than our own were ever found."""

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        """Return the pods. Raises UnavailableError while the kubelet may be restarting."""
        retry_at = self._tried_at + RETRY_S
        if not self.unreadable_reason or self.clock.ticks() >= retry_at:
            listed = await self._read_list()
            if listed is not None:
                if listed and not self._finds_processes:
                    await self._find_processes()
                return listed
        active = (await self.node.pod_resources.list_holdings()).pods
        node, snapshot = self.node, self.node.snapshot
        if snapshot is None:
            return ()
        implied = implied_pods(node.leases.leases.values(), snapshot, node.checkpoint.allocated)
        return tuple(pod for pod in implied if (pod.namespace, pod.name) in active)

    async def list_running(self) -> frozenset[PodUid]:
        """Return the pods that have processes, and those that the runtime showed to the kubelet.

        The kubelet caches the latter for 3 s. They count only while their first processes may not
        have started yet, unless no process of a pod was ever found.
        """
        found = await self._find_processes()
        starting = self.node.checkpoint.started_since(self.clock.now() - PROCESS_START_S)
        if self.unreadable_reason or (self._finds_processes and not starting):
            return found
        shown = await self.node.kubelet.list_running()
        return found | (shown & starting if self._finds_processes else shown)

    async def _find_processes(self) -> frozenset[PodUid]:
        """Return the pods that have processes.

        None are found without `hostPID`, or if containers are not in the cgroups of their pods.
        """
        pods = await asyncio.to_thread(pods_of_processes, self.proc)
        found = frozenset(pods.values())
        self._finds_processes |= bool(found - {pod_of_process(self.proc / "self")})
        return found

    async def _read_list(self) -> tuple[KubeletPod, ...] | None:
        self._tried_at = self.clock.ticks()
        try:
            listed = await self.node.kubelet.list_pods()
        except RequestError as error:
            self._silent_since = None
            self._mark_unreadable(
                str(error), TLS_ADVICE if isinstance(error, KubeconfigError) else ACCESS_ADVICE
            )
            return None
        except UnavailableError as error:
            now = self.clock.ticks()
            if self._silent_since is None:
                self._silent_since = now
            if not self.unreadable_reason and now - self._silent_since < RESTART_S:
                raise
            self._mark_unreadable(str(error), SILENT_ADVICE)
            return None
        self._silent_since = None
        if self.unreadable_reason:
            logger.warning("the kubelet's list of pods can be read again")
        self.unreadable_reason = ""
        return listed

    def _mark_unreadable(self, reason: str, advice: str) -> None:
        if not self.unreadable_reason:
            logger.warning(
                "the kubelet's list of pods cannot be read: pods with the same request are bound "
                "one after the other from now on; %s: %s",
                advice,
                reason,
            )
        self.unreadable_reason = f"the kubelet's list of pods cannot be read ({reason}); {advice}"
