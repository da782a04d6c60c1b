"""Reads a running Leasehold for `audit`: the ledger, the API server, the agents' checkpoints."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.cli.audit.snapshot import Snapshot
from services.cli.commands import Audit
from services.cli.pod_summary import PodSummary, summary_of
from services.cli.state_dir import StateDir, load_state, optional_path, supervisor_pid
from services.cli.terminal import program
from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.resource_claims import CLAIMS_PATH, ApiResourceClaim, allocated_claim
from shared.kubernetes.types import ApiObject, ApiPod
from shared.ledger.leases import RedisLeases
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.node_events import Allocation
from shared.model.names import SYSTEM_NAMESPACE, NodeName

ALL_PODS = "/api/v1/pods"


class ClusterObjects:
    """Reads with the permissions of the client."""

    def __init__(self, kubernetes: KubernetesClient) -> None:
        self.kubernetes = kubernetes

    async def pods(self) -> tuple[PodSummary, ...]:
        """Return every pod of the cluster."""
        pages = self.kubernetes.pages(ALL_PODS)
        return tuple([summary_of(pod) async for page in pages for pod in page.read(ApiPod)])

    async def node_names(self) -> frozenset[NodeName]:
        """Return the names of the nodes that the API server has."""
        pages = self.kubernetes.pages("/api/v1/nodes")
        return frozenset(
            {NodeName(each.metadata.name) async for page in pages for each in page.read(ApiObject)}
        )

    async def claims(self) -> tuple[AllocatedClaim, ...] | None:
        """Return the ResourceClaims with devices of our driver; None: they cannot be read."""
        try:
            pages = [page async for page in self.kubernetes.pages(CLAIMS_PATH)]
        except RequestError:
            return None
        claims = (claim for page in pages for claim in page.read(ApiResourceClaim))
        return tuple(filter(None, map(allocated_claim, claims)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLocation:
    """The servers and directories of one Leasehold."""

    redis_url: str
    redis_credentials: ClientCredentials = NO_CREDENTIALS
    kubeconfig: Path | None = None
    context: str | None = None
    """The kubeconfig's context, or None for its current one."""
    agents: Path | None = None
    hint: str = ""
    """Advice for a server that does not respond."""


def locate_ledger(flags: Audit) -> LedgerLocation:
    """Return the location that the flags name, else the one in the state directory.

    Raises UnavailableError with what to do if neither names one.
    """
    directory = StateDir.found(flags.state, flags.kubeconfig)
    if flags.redis_url:
        return LedgerLocation(
            redis_url=flags.redis_url,
            redis_credentials=flags.redis_client_credentials,
            kubeconfig=flags.kubeconfig,
            context=flags.context or None,
            agents=flags.agents,
        )
    saved = None if flags.context else load_state(directory)
    if saved is None:
        raise UnavailableError(
            f"there is no stack in {directory.root}, and this command reads the ledger with an "
            f"administrator's permissions: in a cluster, run `kubectl -n {SYSTEM_NAMESPACE} exec "
            f"-i deploy/operator -- leasehold audit`; on one machine, run "
            f"`{program()} up` first, or set --state; --redis-url names another ledger"
        )
    own, stored = flags.redis_client_credentials, optional_path(saved.redis_credentials)
    runs = supervisor_pid(directory) is not None
    return LedgerLocation(
        redis_url=saved.redis_url,
        redis_credentials=own if own != NO_CREDENTIALS else ClientCredentials(login_file=stored),
        kubeconfig=flags.kubeconfig or optional_path(saved.kubeconfig),
        agents=flags.agents or directory.root / "agents",
        hint="" if runs else f"nothing runs in {directory.root} now: run `{program()} up`",
    )


class SnapshotReader:
    """The ledger and the API server."""

    def __init__(
        self, location: LedgerLocation, ledger: RedisLeases, kubernetes: KubernetesClient
    ) -> None:
        self.location = location
        self.ledger = ledger
        self.cluster_objects = ClusterObjects(kubernetes)

    async def snapshot(self, *, now: float) -> Snapshot:
        """Read everything; pods before leases, since a pod is bound only after it has one."""
        pods = await self.cluster_objects.pods()
        allocations = read_checkpoints(self.location.agents)
        pages = [page async for page in self.ledger.totals.pages()]
        return Snapshot(
            read_at=now,
            pods=pods,
            allocations=allocations,
            nodes=tuple(totals for page in pages for totals in page),
            waiting=tuple(await self.ledger.waiting_pods.load()),
            gangs=await self.ledger.totals.gangs(),
            waiting_gangs=await self.ledger.totals.waiting_gangs(),
            quotas=await self.ledger.quotas.totals(),
            preemption_claims=await self.ledger.totals.claimed(),
            fair_share=await self.ledger.totals.fair_share(),
            unreadable=tuple(await self.ledger.checks.unreadable()),
        )


@asynccontextmanager
async def open_reader(location: LedgerLocation) -> AsyncIterator[SnapshotReader]:
    """Open the ledger and the API server.

    Raises UnavailableError with what to try if either does not respond.
    """
    async with AsyncExitStack() as stack:
        try:
            credentials = load_credentials(location.kubeconfig, context=location.context)
            kubernetes = await stack.enter_async_context(KubernetesClient(credentials))
            ledger = await stack.enter_async_context(
                RedisLeases.connect(location.redis_url, credentials=location.redis_credentials)
            )
            yield SnapshotReader(location, ledger, kubernetes)
        except UnavailableError as error:
            if location.hint:
                raise UnavailableError(f"{location.hint} ({error})") from error
            raise


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
