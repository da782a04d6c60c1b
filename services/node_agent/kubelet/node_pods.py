"""The pods of the node: the kubelet's list, or, if it cannot be read, pods derived from leases.

Then a pod counts only while the kubelet's PodResources list it as active. The kubelet has the API
server review who may read the list.
"""

import asyncio
import logging
from collections.abc import Mapping, Set
from datetime import UTC, datetime
from pathlib import Path

from services.node_agent.allocate.expected_requests import implied_pods
from services.node_agent.kubelet.cgroups import (
    containers_of_processes,
    in_node_namespace,
    pod_of_process,
    pods_of_processes,
)
from services.node_agent.kubelet.pods import KubeletPod, RunningPods
from services.node_agent.node import Node
from shared.kubernetes.errors import KubernetesError
from shared.kubernetes.kubeconfig import KubeconfigError
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import PodUid

logger = logging.getLogger(__name__)

PROCESS_START_S = 2.0
"""How long after PreStartContainer the first process of a container may start."""
RETRY_S = 5.0
"""Interval of attempts to read an unreadable list."""
RETRY_TIMEOUT_S = 3.0
"""Of such an attempt, for which a call of the kubelet may be waiting."""
RESTART_S = 10.0
"""For this time, a kubelet that does not respond may be restarting."""
PROBE_S = 0.5
"""PodResources that did not respond must do so within this time to count as back."""
UNAUTHORIZED = 401
DENIED_S: Mapping[int, float] = {401: 150.0, 403: 60.0}
"""By status code, how long a denial may come from an outage of the API server.

A kubelet caches for 30 s that an account lacks a permission, and for 2 minutes that it does not
know a token.
"""
ACCESS_ADVICE = (
    "grant the agent's account `get` on nodes/pods, or on nodes/proxy before Kubernetes 1.33"
)
OUTAGE_ADVICE = (
    "the kubelet cannot ask the API server for permission, and is asked again every "
    f"{RETRY_S:g} s: check that the node reaches the API server"
)
DENIED_ADVICE = (
    "the kubelet remembers for a while what an API server that starts has said, and is asked "
    f"again every {RETRY_S:g} s; if this does not pass, " + ACCESS_ADVICE
)
AUTHENTICATION_ADVICE = "check --kubelet-token-file: the API server must know the token"
UNCHECKED_ADVICE = (
    "the kubelet cannot have the agent's token checked while the API server is away, and is asked "
    f"again every {RETRY_S:g} s; if this does not pass, " + AUTHENTICATION_ADVICE
)
ADVICE: Mapping[int, tuple[str, str]] = {
    401: (UNCHECKED_ADVICE, AUTHENTICATION_ADVICE),
    403: (DENIED_ADVICE, ACCESS_ADVICE),
}
TLS_ADVICE = (
    "check --kubelet-ca-file (the CA of the kubelet's certificate) and --kubelet-token-file"
)
SILENT_ADVICE = "check the kubelet's log, and --kubelet-address"


class NodePods:
    def __init__(self, node: Node, proc: Path) -> None:
        self.node = node
        self.clock = node.clock
        self.proc = proc
        self.unreadable_reason = ""
        self.is_passing = False
        self._unreadable_at = ""
        self._silent_since: float | None = None
        self._denied_since: float | None = None
        self._was_read = False
        self._tried_at = 0.0
        self._finds_processes = False
        """Those of other pods are visible."""

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        """Raises UnavailableError while the kubelet may be restarting."""
        retry_at = self._tried_at + RETRY_S
        if not self.unreadable_reason or self.clock.ticks() >= retry_at:
            listed = await self._read_list()
            if listed is not None:
                if listed and not self._finds_processes:
                    await self._find_processes()
                return listed
        active = (await self.node.pod_resources.list_holdings()).pods
        node = self.node
        snapshot = self.node.snapshot
        if snapshot is None:
            return ()
        implied = implied_pods(node.leases.leases.values(), snapshot, node.checkpoint.allocated)
        return tuple(pod for pod in implied if (pod.namespace, pod.name) in active)

    async def find_running(self) -> RunningPods:
        """Return the pods that have processes, and those that may start their first now.

        Raises UnavailableError if neither can be seen, and that usually passes.
        """
        processes = await self._find_processes()
        starting = self.node.checkpoint.started_since(self.clock.now() - PROCESS_START_S)
        if self._finds_processes and not starting:
            return RunningPods(processes=processes)
        try:
            if self.unreadable_reason:
                raise UnavailableError(self.unreadable_reason)
            shown = await self.node.kubelet.list_running()
        except LeaseholdError as error:
            if self._finds_processes or (self.unreadable_reason and not self.is_passing):
                return RunningPods(processes=processes, starting=starting)
            raise UnavailableError(
                f"processes of pods are not visible to the node agent, and {error}: run the agent "
                "with hostPID, so that it need not ask the kubelet"
            ) from error
        starting = shown & starting if self._finds_processes else shown
        return RunningPods(processes=processes, starting=starting)

    async def blind_reason(self) -> str:
        if self._silent_since is not None and not self.unreadable_reason:
            return "the kubelet does not respond; it may be restarting"
        if not self.node.pod_resources.silent_reason:
            return ""
        try:
            async with asyncio.timeout(PROBE_S):
                await self.node.pod_resources.list_holdings()
        except (TimeoutError, UnavailableError):
            return self.node.pod_resources.silent_reason
        return ""

    async def list_processes(self) -> dict[int, PodUid]:
        return await asyncio.to_thread(pods_of_processes, self.proc)

    async def _find_processes(self) -> Mapping[PodUid, Set[str]]:
        """Return none without `hostPID` or pods' cgroups."""
        containers = await asyncio.to_thread(containers_of_processes, self.proc)
        if not self._finds_processes:
            own = pod_of_process(self.proc / "self")
            in_node = own is not None and in_node_namespace(self.proc / "self")
            self._finds_processes = in_node or bool(containers.keys() - {own})
        return containers

    async def _read_list(self) -> tuple[KubeletPod, ...] | None:
        """Return None if the list cannot be read; raise while a kubelet may be restarting."""
        self._tried_at = self.clock.ticks()
        try:
            async with asyncio.timeout(RETRY_TIMEOUT_S if self.unreadable_reason else None):
                listed = await self.node.kubelet.list_pods()
        except TimeoutError:
            self._note_silence(f"it did not respond within {RETRY_TIMEOUT_S:g} s")
            return None
        except KubernetesError as error:
            self._note_response(error)
            return None
        except RequestError as error:
            advice = TLS_ADVICE if isinstance(error, KubeconfigError) else ACCESS_ADVICE
            self._mark_unreadable(str(error), advice)
            return None
        except UnavailableError as error:
            if not self._note_silence(str(error)):
                raise
            return None
        self._silent_since = None
        self._denied_since = None
        self._was_read = True
        if self.unreadable_reason:
            logger.warning("the kubelet's list of pods can be read again")
        self.unreadable_reason = ""
        self.is_passing = False
        return listed

    def _note_response(self, error: KubernetesError) -> None:
        self._silent_since = None
        code = error.response.code
        if code not in DENIED_S:
            is_outage = isinstance(error, UnavailableError)
            self._denied_since = None
            self._mark_unreadable(
                str(error.response), OUTAGE_ADVICE if is_outage else ACCESS_ADVICE, passes=is_outage
            )
            return
        now = self.clock.ticks()
        if self._denied_since is None:
            self._denied_since = now
        knows_token = code == UNAUTHORIZED and self._was_read
        passes = knows_token or now - self._denied_since < DENIED_S[code]
        at_first, later = ADVICE[code]
        advice = at_first if passes else later
        self._mark_unreadable(str(error.response), advice, passes=passes)

    def _note_silence(self, reason: str) -> bool:
        now = self.clock.ticks()
        if self._silent_since is None:
            self._silent_since = now
        if not self.unreadable_reason and now - self._silent_since < RESTART_S:
            return False
        self._mark_unreadable(reason, SILENT_ADVICE, passes=True)
        return True

    def _mark_unreadable(self, reason: str, advice: str, *, passes: bool = False) -> None:
        if not self.unreadable_reason:
            at = datetime.fromtimestamp(self.clock.now(), UTC)
            self._unreadable_at = at.isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
            logger.warning(
                "the kubelet's list of pods cannot be read: pods with the same request are bound "
                "one after the other from now on; %s: %s",
                advice,
                reason,
            )
        self.is_passing = passes
        self.unreadable_reason = (
            f"the kubelet's list of pods cannot be read since {self._unreadable_at} UTC "
            f"({reason}); {advice}"
        )
