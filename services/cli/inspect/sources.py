"""Reading a running Leasehold: the ledger, the API server, and the agents' checkpoints."""

import argparse
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from services.cli.audit.audit import unseen_agents
from services.cli.inspect.facts import Facts, PodSeen
from services.cli.state_dir import StateDir, holder, load_state
from services.timekeeper.accounts.account_audit import Book, book_of
from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.kubernetes.errors import NotFoundError
from shared.ledger.budgets import Budgets
from shared.ledger.leases import RedisLeases
from shared.model.budget import ChargeEntry
from shared.model.errors import PermissionDeniedError, RequestError, UnavailableError
from shared.model.events.node_events import Allocation
from shared.model.ledger import NodeTotals
from shared.model.names import Namespace, NodeName, PodUid

if TYPE_CHECKING:
    from shared.kubernetes.client import KubernetesClient

PAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a running Leasehold can be read."""

    redis_url: str
    kubeconfig: Path | None
    redis_keys: ClientCredentials = NO_CREDENTIALS
    traces: Path | None = None
    agents: Path | None = None
    hint: str = ""
    """What to try when nobody answers."""


def find(
    state: str,
    *,
    redis_url: str = "",
    redis_keys: ClientCredentials = NO_CREDENTIALS,
    kubeconfig: str = "",
    trace_dir: str = "",
    agents: str = "",
) -> Where:
    """Find it by flags first, then as the state directory says.

    Raises UnavailableError if neither says anything.
    """
    directory = StateDir.at(Path(state))
    saved = load_state(directory)
    if saved is None and not redis_url:
        raise UnavailableError(
            f"nothing was ever started in {directory.root}: run `leasehold up`, or give --state, "
            "or --redis-url and --kubeconfig of a cluster"
        )
    config = kubeconfig or (saved.kubeconfig if saved and not redis_url else "")
    login = saved.redis_credentials if saved and not redis_url else ""
    stored = ClientCredentials(credentials=Path(login)) if login else NO_CREDENTIALS
    runs = saved is not None and holder(directory) is not None
    return Where(
        redis_url=redis_url or (saved.redis_url if saved else ""),
        redis_keys=stored if redis_keys == NO_CREDENTIALS else redis_keys,
        kubeconfig=Path(config) if config else None,
        traces=Path(trace_dir) if trace_dir else directory.traces,
        agents=_agents(agents, directory.root if saved and not redis_url else None),
        hint="" if runs or redis_url else f"nothing runs in {directory.root} now: `leasehold up`",
    )


def _agents(told: str, ours: Path | None) -> Path | None:
    if told:
        return Path(told)
    return ours / "agents" if ours else None


def redis_keys_of(flags: argparse.Namespace) -> ClientCredentials:
    """Return what the flags of a command say is to be shown to Redis."""

    def path(text: str) -> Path | None:
        return Path(text) if text else None

    return ClientCredentials(
        credentials=path(flags.redis_credentials),
        tls=TlsFiles(
            ca=path(flags.redis_ca_file),
            certificate=path(flags.redis_certificate_file),
            key=path(flags.redis_key_file),
        ),
    )


class _PodMetadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    creation_timestamp: datetime | None = None
    annotations: dict[str, str] = {}


class _Gate(msgspec.Struct, frozen=True):
    name: str = ""


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""
    scheduler_name: str = ""
    scheduling_gates: tuple[_Gate, ...] = ()


class _Condition(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = ""
    message: str = ""


class _PodStatus(msgspec.Struct, frozen=True):
    phase: str = ""
    conditions: tuple[_Condition, ...] = ()


class _Pod(msgspec.Struct, frozen=True):
    metadata: _PodMetadata = _PodMetadata()
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class Reader:
    """Everything the views read."""

    def __init__(self, where: Where, ledger: RedisLeases, kube: "KubernetesClient | None") -> None:
        self.where = where
        self.ledger = ledger
        self._kube = kube

    @property
    def kube(self) -> "KubernetesClient":
        """The API server, if it was opened."""
        if self._kube is None:
            raise AssertionError("this view did not open the API server")
        return self._kube

    async def accounts(self) -> tuple[NodeTotals, ...]:
        """Return every node's totals and leases."""
        pages = [page async for page in self.ledger.totals.pages()]
        return tuple(account for page in pages for account in page)

    async def pods(self) -> tuple[PodSeen, ...]:
        """Return every pod of the cluster."""
        found: list[PodSeen] = []
        token = ""
        while True:
            page = await self.kube.list_page(
                "/api/v1/pods", query={}, limit=PAGE, continue_token=token
            )
            found += [_seen(msgspec.json.decode(item, type=_Pod)) for item in page.items or ()]
            token = page.metadata.continue_
            if not token:
                return tuple(found)

    async def pod(self, namespace: str, name: str) -> PodSeen | None:
        """Return one pod, or None."""
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"
        try:
            return _seen(await self.kube.read(path, _Pod))
        except NotFoundError:
            return None

    async def books(self) -> tuple[Book, ...]:
        """Return every open budget window that has a beginning, with its entries' sum."""
        found: list[Book] = []
        async with Budgets.connect(
            self.where.redis_url, credentials=self.where.redis_keys
        ) as store:
            for account in await store.load(dict.fromkeys(await store.revisions())):
                # Of one that never ends, the first entries may have been cut off.
                if not account.windows or not account.windows[-1].start_ms:
                    continue
                window = account.windows[-1]
                after = f"{window.start_ms - 1}"
                entries: list[ChargeEntry] = []
                while page := await store.entries(account.namespace, after=after):
                    entries += page
                    after = page[-1].id
                found.append(book_of(account.namespace, window, entries))
        return tuple(found)

    async def audited(self, *, now: float) -> Facts:
        """Read what an audit compares, and say what of it could not be read from here."""
        facts = await self.facts(now=now)
        unseen = list(unseen_agents(facts))
        try:
            books = await self.books()
        except PermissionDeniedError:
            books = ()
            unseen.append(
                "budgets: our user of the ledger has no right to them; the user operator has"
            )
        return replace(facts, books=books, unseen=tuple(unseen))

    async def facts(self, *, now: float, pods: bool = True) -> Facts:
        """Read everything; pods before leases, since a pod is bound only after it has one."""
        seen = await self.pods() if pods else ()
        told = told_by_agents(self.where.agents)
        return Facts(
            read_at=now,
            pods=seen,
            allocations=told,
            accounts=await self.accounts(),
            waiting=tuple(await self.ledger.waiting_pods.load()),
            gangs=await self.ledger.totals.gangs(),
            quotas=await self.ledger.quotas.totals(),
            kept=await self.ledger.totals.claimed(),
            turns=await self.ledger.totals.fair_share(),
        )


@asynccontextmanager
async def opened(where: Where, *, pods: bool) -> AsyncIterator[Reader]:
    """Open the ledger, and the API server if `pods` are wanted; errors say what to try."""
    async with AsyncExitStack() as stack:
        try:
            kube = await stack.enter_async_context(_kube(where)) if pods else None
            ledger = await stack.enter_async_context(
                RedisLeases.connect(where.redis_url, credentials=where.redis_keys)
            )
            yield Reader(where, ledger, kube)
        except UnavailableError as error:
            if where.hint:
                raise UnavailableError(f"{where.hint} ({error})") from error
            raise


def _kube(where: Where) -> "KubernetesClient":
    from shared.kubernetes.client import KubernetesClient
    from shared.kubernetes.kubeconfig import load_credentials

    return KubernetesClient(load_credentials(where.kubeconfig))


def told_by_agents(agents: Path | None) -> Mapping[NodeName, tuple[Allocation, ...]]:
    """Read the checkpoints of agents on this machine: what they told their kubelets.

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
        raise RequestError(f"{path} is no checkpoint of a node agent: {error!r}") from error


def _seen(pod: _Pod) -> PodSeen:
    created = pod.metadata.creation_timestamp
    return PodSeen(
        pod=PodUid(pod.metadata.uid),
        namespace=Namespace(pod.metadata.namespace),
        name=pod.metadata.name,
        node=pod.spec.node_name,
        phase=pod.status.phase,
        scheduler=pod.spec.scheduler_name,
        created_at=created.timestamp() if created else 0.0,
        gates=tuple(gate.name for gate in pod.spec.scheduling_gates),
        annotations=pod.metadata.annotations,
        said=next(
            (
                condition.message
                for condition in pod.status.conditions
                if condition.type == "PodScheduled" and condition.status == "False"
            ),
            "",
        ),
    )
