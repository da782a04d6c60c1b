"""Reads a running Leasehold: the ledger, the API server, and the agents' checkpoints."""

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from services.cli.snapshot.location import ClusterLocation
from services.cli.snapshot.snapshot import MeasuredUsage, PodSummary, Snapshot
from services.cli.snapshot.usage_reader import UsageReader
from shared.ledger.leases import RedisLeases
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.node_events import Allocation
from shared.model.ledger import NodeTotals
from shared.model.names import NodeName
from shared.model.usage import IDLE_AFTER_S

if TYPE_CHECKING:
    from services.cli.snapshot.cluster_objects import ClusterObjects
    from shared.kubernetes.client import KubernetesClient


class SnapshotReader:
    """The ledger, and the API server where a command needs it."""

    def __init__(
        self,
        location: ClusterLocation,
        ledger: RedisLeases,
        kubernetes: "KubernetesClient | None",
        usage: UsageReader,
    ) -> None:
        self.location = location
        self.ledger = ledger
        self._kubernetes = kubernetes
        self.usage = usage

    @property
    def kubernetes(self) -> "KubernetesClient":
        """The API server, if it was opened."""
        if self._kubernetes is None:
            raise AssertionError("this command did not open the API server")
        return self._kubernetes

    async def nodes(self) -> tuple[NodeTotals, ...]:
        """Return every node's totals and leases."""
        pages = [page async for page in self.ledger.totals.pages()]
        return tuple(totals for page in pages for totals in page)

    @property
    def cluster_objects(self) -> "ClusterObjects":
        """The pods and nodes of the API server."""
        from services.cli.snapshot.cluster_objects import ClusterObjects

        return ClusterObjects(self.kubernetes)

    async def pod(self, namespace: str, name: str) -> PodSummary | None:
        """Return one pod, or None."""
        return await self.cluster_objects.pod(namespace, name)

    async def read_usage(self, nodes: Iterable[NodeTotals]) -> MeasuredUsage:
        """Return the usage that the agents of the nodes with leases measure now."""
        return await self.usage.read(nodes)

    async def snapshot(self, *, now: float, pods: bool = True) -> Snapshot:
        """Read everything; pods before leases, since a pod is bound only after it has one."""
        pod_summaries = await self.cluster_objects.pods() if pods else ()
        allocations = read_checkpoints(self.location.agents)
        return Snapshot(
            read_at=now,
            pods=pod_summaries,
            allocations=allocations,
            nodes=await self.nodes(),
            waiting=tuple(await self.ledger.waiting_pods.load()),
            gangs=await self.ledger.totals.gangs(),
            waiting_gangs=await self.ledger.totals.waiting_gangs(),
            quotas=await self.ledger.quotas.totals(),
            preemption_claims=await self.ledger.totals.claimed(),
            fair_share=await self.ledger.totals.fair_share(),
            unreadable=tuple(await self.ledger.checks.unreadable()),
        )

    async def with_usage(self, snapshot: Snapshot) -> Snapshot:
        """Add the usage that the agents of the snapshot's nodes measure now."""
        return replace(snapshot, usage=await self.usage.read(snapshot.nodes))


@asynccontextmanager
async def open_reader(
    location: ClusterLocation, *, pods: bool, idle_after_s: float = IDLE_AFTER_S
) -> AsyncIterator[SnapshotReader]:
    """Open the ledger, the API server if `pods` are needed, and NATS once usage is read.

    Raises UnavailableError with what to try if either does not respond.
    """
    async with AsyncExitStack() as stack:
        try:
            kubernetes = await stack.enter_async_context(_client(location)) if pods else None
            ledger = await stack.enter_async_context(
                RedisLeases.connect(location.redis_url, credentials=location.redis_credentials)
            )
            usage = UsageReader(location, idle_after_s=idle_after_s)
            await stack.enter_async_context(usage)
            yield SnapshotReader(location, ledger, kubernetes, usage)
        except UnavailableError as error:
            if location.hint:
                raise UnavailableError(f"{location.hint} ({error})") from error
            raise


def _client(location: ClusterLocation) -> "KubernetesClient":
    from shared.kubernetes.client import KubernetesClient
    from shared.kubernetes.kubeconfig import load_credentials

    return KubernetesClient(load_credentials(location.kubeconfig, context=location.context))


def read_checkpoints(agents: Path | None) -> Mapping[NodeName, tuple[Allocation, ...]]:
    """Read the checkpoints of agents on this machine: the devices handed to their kubelets.

    Raises RequestError naming a file that cannot be read.
    """
    if agents is None:
        return {}
    return dict(_checkpoint(path) for path in sorted(agents.glob("*/checkpoint.json")))


def _checkpoint(path: Path) -> tuple[NodeName, tuple[Allocation, ...]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = [entry["allocation"] for entry in content["entries"]]
        return NodeName(content["node"]), msgspec.convert(entries, tuple[Allocation, ...])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is not a checkpoint of a node agent: {error!r}") from error
