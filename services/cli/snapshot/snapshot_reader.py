"""Reads a running Leasehold: the ledger, the API server, and the agents' checkpoints."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from services.cli.snapshot.location import ClusterLocation
from services.cli.snapshot.snapshot import PodSummary, Snapshot
from services.cli.snapshot.usage_reader import UsageReader
from shared.kubernetes.errors import NotFoundError
from shared.ledger.leases import RedisLeases
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.node_events import Allocation
from shared.model.ledger import NodeTotals
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.usage import IDLE_AFTER_S

if TYPE_CHECKING:
    from shared.kubernetes.client import KubernetesClient

PAGE = 500


class _ListedOwner(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""
    controller: bool | None = None


class _ListedMetadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    creation_timestamp: datetime | None = None
    annotations: dict[str, str] = {}
    owner_references: tuple[_ListedOwner, ...] = ()


class _ListedGate(msgspec.Struct, frozen=True):
    name: str = ""


class _ListedSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""
    scheduler_name: str = ""
    scheduling_gates: tuple[_ListedGate, ...] = ()


class _ListedCondition(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = ""
    message: str = ""


class _ListedStatus(msgspec.Struct, frozen=True):
    phase: str = ""
    conditions: tuple[_ListedCondition, ...] = ()


class _ListedPod(msgspec.Struct, frozen=True):
    metadata: _ListedMetadata = _ListedMetadata()
    spec: _ListedSpec = _ListedSpec()
    status: _ListedStatus = _ListedStatus()


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

    async def pods(self) -> tuple[PodSummary, ...]:
        """Return every pod of the cluster."""
        pods: list[PodSummary] = []
        token = ""
        while True:
            page = await self.kubernetes.list_page(
                "/api/v1/pods", query={}, limit=PAGE, continue_token=token
            )
            pods += [
                _summary(msgspec.json.decode(item, type=_ListedPod)) for item in page.items or ()
            ]
            token = page.metadata.continue_
            if not token:
                return tuple(pods)

    async def node_names(self) -> frozenset[NodeName]:
        """Return the names of the nodes that the API server has."""
        names: set[NodeName] = set()
        token = ""
        while True:
            page = await self.kubernetes.list_page(
                "/api/v1/nodes", query={}, limit=PAGE, continue_token=token
            )
            found = (msgspec.json.decode(item, type=_ListedPod) for item in page.items or ())
            names |= {NodeName(node.metadata.name) for node in found}
            token = page.metadata.continue_
            if not token:
                return frozenset(names)

    async def pod(self, namespace: str, name: str) -> PodSummary | None:
        """Return one pod, or None."""
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"
        try:
            return _summary(await self.kubernetes.read(path, _ListedPod))
        except NotFoundError:
            return None

    async def snapshot(self, *, now: float, pods: bool = True) -> Snapshot:
        """Read everything; pods before leases, since a pod is bound only after it has one."""
        pod_summaries = await self.pods() if pods else ()
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

    return KubernetesClient(load_credentials(location.kubeconfig))


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


def _summary(pod: _ListedPod) -> PodSummary:
    created = pod.metadata.creation_timestamp
    return PodSummary(
        pod=PodUid(pod.metadata.uid),
        namespace=Namespace(pod.metadata.namespace),
        name=pod.metadata.name,
        node=pod.spec.node_name,
        phase=pod.status.phase,
        scheduler=pod.spec.scheduler_name,
        created_at=created.timestamp() if created else 0.0,
        owner=next(
            (f"{one.kind}/{one.name}" for one in pod.metadata.owner_references if one.controller),
            "",
        ),
        gates=tuple(gate.name for gate in pod.spec.scheduling_gates),
        annotations=pod.metadata.annotations,
        unschedulable_message=next(
            (
                condition.message
                for condition in pod.status.conditions
                if condition.type == "PodScheduled" and condition.status == "False"
            ),
            "",
        ),
    )
