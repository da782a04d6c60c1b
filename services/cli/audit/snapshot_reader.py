"""Reads a running Leasehold for `audit`: the ledger, the API server, the agents' checkpoints."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path

import msgspec

from services.cli.audit.account_checks import window_totals
from services.cli.audit.invariants import unread_checkpoints
from services.cli.audit.snapshot import Snapshot, WindowTotals
from services.cli.commands import Audit
from services.cli.pod_summary import PodSummary, summary_of
from services.cli.state_dir import optional_path, stack_of, supervisor_pid
from services.cli.terminal import program
from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.resource_claims import CLAIMS_PATH, ApiResourceClaim, allocated_claim
from shared.kubernetes.types import ApiObject, ApiPod
from shared.ledger.budgets import Budgets
from shared.ledger.leases import RedisLeases
from shared.model.budgets.budget import HOUR_MS
from shared.model.errors import PermissionDeniedError, RequestError, UnavailableError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.node_events import Allocation
from shared.model.names import SYSTEM_NAMESPACE, NodeName

ALL_PODS = "/api/v1/pods"
COSTS_MS = 400 * 24 * HOUR_MS


class SnapshotReader:
    def __init__(
        self, ledger: RedisLeases, kubernetes: KubernetesClient, agents: Path | None
    ) -> None:
        self.ledger = ledger
        self.kubernetes = kubernetes
        self.agents = agents

    async def snapshot(self, now: float) -> Snapshot:
        """Pods are read before leases, since a pod is bound only after it has one."""
        totals = self.ledger.totals
        pods = await pods_of(self.kubernetes)
        allocations = read_checkpoints(self.agents)
        reading = await self.ledger.checks.read()
        snapshot = Snapshot(
            **{part.name: getattr(reading, part.name) for part in fields(reading)},
            read_at=now,
            pods=pods,
            allocations=allocations,
            waiting=tuple(await self.ledger.waiting_pods.load()),
            gangs=await totals.gangs(),
            waiting_gangs=await totals.waiting_gangs(),
            damaged=tuple(await self.ledger.checks.unreadable()),
        )
        not_checked = list(unread_checkpoints(snapshot))
        try:
            snapshot = replace(snapshot, api_nodes=await node_names(self.kubernetes))
        except PermissionDeniedError:
            not_checked.append("nodes: this user may not list them at the API server")
        snapshot = replace(snapshot, claims=await claims_of(self.kubernetes))
        if snapshot.claims is None and any(lease.claim for lease in snapshot.leases):
            not_checked.append("claims: this user may not list ResourceClaims at the API server")
        try:
            snapshot = await self._with_budgets(snapshot)
        except PermissionDeniedError:
            not_checked.append("budgets: this Redis user may not read them; the user operator may")
        return replace(snapshot, not_checked=tuple(not_checked))

    async def _with_budgets(self, snapshot: Snapshot) -> Snapshot:
        windows: list[WindowTotals] = []
        budgets = self.ledger.part(Budgets)
        now_ms = await budgets.now_ms()
        hours = (await budgets.costs(now_ms - COSTS_MS, now_ms)).hours.values()
        for account in await budgets.load(dict.fromkeys(await budgets.revisions())):
            # The first entries of a window that never ends may have been trimmed.
            if not account.windows or not account.windows[-1].start_ms:
                continue
            window = account.windows[-1]
            name = account.namespace
            after = f"{window.start_ms - 1}"
            entries = [entry async for entry in budgets.all_entries(name, after=after)]
            windows.append(window_totals(name, window, entries))
        return replace(snapshot, budget_windows=tuple(windows), cost_hours=tuple(hours))


async def pods_of(kubernetes: KubernetesClient) -> tuple[PodSummary, ...]:
    pages = kubernetes.pages(ALL_PODS)
    return tuple([summary_of(pod) async for page in pages for pod in page.read(ApiPod)])


async def node_names(kubernetes: KubernetesClient) -> frozenset[NodeName]:
    pages = kubernetes.pages("/api/v1/nodes")
    names = [obj.metadata.name async for page in pages for obj in page.read(ApiObject)]
    return frozenset(map(NodeName, names))


async def claims_of(kubernetes: KubernetesClient) -> tuple[AllocatedClaim, ...] | None:
    """Return None if claims cannot be listed.

    A claim that cannot be read is left out: as for the watcher, it has no lease.
    """
    try:
        pages = [page async for page in kubernetes.pages(CLAIMS_PATH)]
    except RequestError:
        return None
    claims: list[AllocatedClaim | None] = []
    for page in pages:
        for claim in page.read(ApiResourceClaim, skip=lambda _: None):
            with suppress(RequestError):
                claims.append(allocated_claim(claim))
    return tuple(filter(None, claims))


@asynccontextmanager
async def open_reader(flags: Audit) -> AsyncIterator[SnapshotReader]:
    """Raises UnavailableError with what to do if a server does not respond."""
    directory, stack = stack_of(flags)
    redis_url = flags.redis_url
    login = flags.redis_client_credentials
    hint = ""
    kubeconfig = flags.kubeconfig
    agents = flags.agents
    if not redis_url:
        saved = None if flags.context else stack
        if saved is None:
            raise UnavailableError(
                f"there is no stack in {directory.root}, and this command reads the ledger with an "
                f"administrator's permissions: in a cluster, run `kubectl -n {SYSTEM_NAMESPACE} "
                "exec -i deploy/operator -- leasehold audit`; on one machine, run "
                f"`{program()} up` first, or set --state; --redis-url names another ledger"
            )
        redis_url = saved.redis_url
        stored = optional_path(saved.redis_credentials)
        login = login if login != NO_CREDENTIALS else ClientCredentials(login_file=stored)
        kubeconfig = kubeconfig or optional_path(saved.kubeconfig)
        agents = agents or directory.agents
        if supervisor_pid(directory) is None:
            hint = f"nothing runs in {directory.root} now: run `{program()} up`"
    try:
        credentials = load_credentials(kubeconfig, context=flags.context or None)
        async with (
            KubernetesClient(credentials) as kubernetes,
            RedisLeases.connect(redis_url, credentials=login) as ledger,
        ):
            yield SnapshotReader(ledger, kubernetes, agents)
    except UnavailableError as error:
        if hint:
            raise UnavailableError(f"{hint} ({error})") from error
        raise


def read_checkpoints(agents: Path | None) -> Mapping[NodeName, tuple[Allocation, ...]]:
    """Raises RequestError naming a file that cannot be read."""
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
