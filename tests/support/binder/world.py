"""A binder on hand-written fakes of its ports; each fake records its calls."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import prometheus_client
from msgspec import structs

from services.binder.agent_client import NodeAgentClient, NoReply
from services.binder.ledger_sync.ledger_updates import LedgerUpdater
from services.binder.metrics import ANOMALIES, EVICTIONS, RESIZES
from services.binder.observations import PodSnapshot
from services.binder.service import Binder
from services.binder.wiring import BinderPorts, build_binder
from shared.ledger.leases import RedisLeases
from shared.model.errors import ConflictError, LeaseholdError, RequestError, UnavailableError
from shared.model.events.event import Event
from shared.model.events.pod_events import (
    PlacementChosen,
)
from shared.model.events.request_reply import BindReply
from shared.model.lease import Lease, LeaseState, Share
from shared.model.ledger import LedgerStatus
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.node import AntiAffinityTerm
from shared.runtime.runner import run_loop
from shared.runtime.service import roles_of
from tests.support.binder.claims import FakeClaims
from tests.support.binder.resizing import FakeAnnotations, FakeLimits
from tests.support.clock import FakeClock
from tests.support.placer.ledger import ledger

NOW = 1_787_000_000.0


def lease(name: str = "p1", node: str = "n1", **changes: Any) -> Lease:
    made = Lease(
        pod=PodUid(f"uid-{name}"),
        namespace=Namespace("default"),
        name=name,
        node=NodeName(node),
        shares=(
            Share(
                container="c",
                device=DeviceUuid(f"GPU-{node}-0"),
                index=0,
                device_mib=16_000,
                memory_mib=1000,
                cores_percent=10,
                slot=0,
                fence=1,
            ),
        ),
        version=1,
        created_at=NOW - 1,
        expires_at=NOW + 30,
    )
    return structs.replace(made, **changes)


def chosen(*leases: Lease) -> list[PlacementChosen]:
    return [PlacementChosen(lease=each) for each in leases]


class FakePods(FakeAnnotations):
    """An API server whose responses a test chooses, pod by pod."""

    def __init__(self) -> None:
        super().__init__()
        self.bindings: list[tuple[str, str, Mapping[str, str]]] = []
        self.errors: dict[str, list[LeaseholdError]] = {}
        self.unreadable: dict[str, LeaseholdError] = {}
        self.hanging: dict[str, asyncio.Event] = {}
        self.away = False
        self.before_binding: Callable[[], None] = lambda: None
        self.patches: list[tuple[str, Any]] = []
        self.events: dict[str, dict[str, Any]] = {}
        self.event_writes = 0
        self.nodes: set[NodeName] = set()
        self.offered: list[tuple[str, str]] = []

    async def list_selected(
        self, term: AntiAffinityTerm, node: NodeName | None
    ) -> list[PodSnapshot]:
        return []

    async def node_labels(self, name: NodeName) -> Mapping[str, str] | None:
        return {} if name in self.nodes else None

    async def bind_pod(  # noqa: PLR0917 - the API client's own order
        self,
        namespace: str,
        name: str,
        uid: str,
        node: str,
        annotations: Mapping[str, str],
        labels: Mapping[str, str] | None = None,
        traceparent: str | None = None,
    ) -> None:
        self.before_binding()
        self.bindings.append((name, node, annotations))
        if name in self.hanging:
            await self.hanging[name].wait()
        if self.away:
            raise UnavailableError("no answer")
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        if self.seen.get(name) is not None:
            raise ConflictError("pod is already assigned")
        self.seen[name] = PodSnapshot(PodUid(uid), NodeName(node))

    async def get(self, namespace: str, name: str) -> PodSnapshot | None:
        await self.before_read()
        if self.away:
            raise UnavailableError("no answer")
        if name in self.unreadable:
            raise self.unreadable[name]
        return self.seen.get(name)

    async def remove_gate(self, namespace: str, name: str, uid: str, gate: str) -> bool:
        return True

    async def add_annotation(
        self, namespace: str, name: str, uid: str, key: str, value: str
    ) -> None:
        self.offered.append((name, value))

    async def patch_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        self.patches.append((name, patch))

    async def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        name = body["metadata"]["name"]
        if self.away:
            raise UnavailableError("no answer")
        if name in self.events:
            raise ConflictError("exists")
        self.event_writes += 1
        self.events[name] = dict(body)

    async def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        if name not in self.events:
            raise RequestError("not found")
        self.event_writes += 1
        self.events[name] |= patch

    async def get_event_count(self, namespace: str, name: str) -> int:
        return int(self.events.get(name, {}).get("count", 0))


class FakeBus:
    """Records published events."""

    def __init__(self) -> None:
        self.published: list[Event] = []

    async def publish(self, events: Sequence[Event]) -> None:
        self.published += events


async def _nothing() -> None:
    """Do nothing."""


class FakeAgents(FakeLimits):
    """Agents that reply as the test chooses: True, False, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[PodUid, bool] = {}
        self.requested_pods: list[PodUid] = []
        self.requests = 0
        self.slices: list[NodeName] = []
        """Nodes whose slices were requested."""
        self.replies: dict[NodeName, BindReply] = {}
        """Replies to bind requests by node; without one, all pods may be bound."""
        self.before_reply: Callable[[], Awaitable[None]] = _nothing

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply | NoReply:
        await self.before_reply()
        return self.replies.get(node, BindReply())

    async def write_slices(self, node: NodeName) -> str:
        self.slices.append(node)
        return ""

    async def list_terminated(self, node: NodeName, pods: Sequence[PodUid]) -> set[PodUid]:
        self.requests += 1
        self.requested_pods += pods
        if not self.answers.keys() >= set(pods):
            raise UnavailableError("no reply")
        return {pod for pod in pods if self.answers[pod]}


class PermissiveAgents(NodeAgentClient):
    """Agents that admit every pod; other requests go to NATS."""

    async def request_bind(self, node: NodeName, leases: Sequence[Lease]) -> BindReply:
        return BindReply()


class Counts:
    """What the binder's metrics have counted since this was made, by their labels."""

    def __init__(self) -> None:
        self._before = {each: _values(each) for each in (ANOMALIES, EVICTIONS, RESIZES)}

    @property
    def anomalies(self) -> Counter[Any]:
        """Anomalies by kind."""
        return _values(ANOMALIES) - self._before[ANOMALIES]

    @property
    def evictions(self) -> Counter[Any]:
        """Evictions by the pod's namespace, the cause, and the namespace that profits."""
        return _values(EVICTIONS) - self._before[EVICTIONS]

    @property
    def resizes(self) -> Counter[Any]:
        """Requests by outcome."""
        return _values(RESIZES) - self._before[RESIZES]


def _values(metric: prometheus_client.Counter) -> Counter[Any]:
    [family] = metric.collect()
    found = [each for each in family.samples if each.name.endswith("_total")]
    keys = [tuple(each.labels.values()) for each in found]
    return Counter(
        {
            key if len(key) > 1 else key[0]: int(each.value)
            for key, each in zip(keys, found, strict=True)
        }
    )


class ObservedLedger(RedisLeases):
    """Reads its status anew for every caller, and records whose leases were loaded."""

    loaded: list[PodUid]

    async def status(self, *, now: float, max_age_s: float = 0.0) -> LedgerStatus | None:
        return await super().status(now=now, max_age_s=0.0)

    async def load(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        self.loaded += pods
        return await super().load(pods)


class World:
    """A binder on a real ledger, with an API server and agents that a test controls."""

    def __init__(
        self,
        ledger: RedisLeases,
        *,
        claims: FakeClaims | None = None,
        agents: FakeAgents | None = None,
        batch_wait_s: float = 2.0,
        clock: FakeClock | None = None,
    ) -> None:
        self.clock = clock or FakeClock(NOW)
        self.ledger = ledger
        self.pods = FakePods()
        self.claims = claims or FakeClaims()
        self.bus = FakeBus()
        self.agents = agents or FakeAgents()
        self.metrics = Counts()
        self.binder: Binder = build_binder(
            BinderPorts(
                ledger=ledger,
                pods=self.pods,
                claims=self.claims,
                agents=self.agents,
                publish=self.bus.publish,
                clock=self.clock,
                host_clock=self.clock,
            ),
            batch_wait_s=batch_wait_s,
        )

    @property
    def updater(self) -> LedgerUpdater:
        """The part that writes facts into the ledger."""
        return self.binder.sync.updater

    async def bind_all(self, *leases: Lease) -> list[Any]:
        """Bind pods that were placed so, while Bindings are sent."""
        async with running(self.binder.send_bindings):
            return [*await self.binder.bind_pods(chosen(*leases))]

    async def states(self) -> dict[str, LeaseState]:
        """The state of each pod's lease."""
        return {each.name: each.state for each in (await self.leases()).values()}

    async def leases(self) -> dict[PodUid, Lease]:
        """All live leases."""
        return {lease.pod: lease async for page in self.ledger.load_all() for lease in page}

    async def restore(self, *leases: Lease) -> None:
        """Write leases, each with the next slots of its devices."""
        held: Counter[DeviceUuid] = Counter()
        for each in (await self.leases()).values():
            held.update(share.device for share in each.shares)
        for each in leases:
            shares = []
            for share in each.shares:
                shares.append(structs.replace(share, slot=held[share.device]))
                held[share.device] += 1
            restored = structs.replace(each, shares=tuple(shares))
            assert await self.ledger.restore([restored], now=NOW) == []

    async def cordoned(self) -> dict[NodeName, str]:
        """The cordoned nodes, with why."""
        return dict(await self.ledger.set_cordoned({}))

    async def lose(self) -> None:
        """Lose everything in the ledger, which must be rebuilt."""
        connection = self.ledger._connection
        keys = await connection._redis.keys(f"{connection.prefix}*")
        await connection._redis.delete(*keys)

    async def rebuild(self, *leases: Lease) -> None:
        """Begin a new ledger with these leases."""
        token = await self.ledger.begin_rebuild(now=NOW, force=True)
        assert token is not None
        assert await self.ledger.restore(leases, now=NOW, token=token) == []
        assert await self.ledger.finish_rebuild(token)

    def replica(self) -> "World":
        """Another binder on the same ledger, with an API server and agents of its own."""
        return World(self.ledger)


NewWorld = Callable[..., Awaitable[World]]
"""Makes a world of its own with these leases."""


@contextlib.asynccontextmanager
async def world(url: str, *leases: Lease, **options: Any) -> AsyncIterator[World]:
    """Open an empty ledger with nodes `n1` and `n2`, and write leases into it."""
    async with ledger(url, {"n1": 1, "n2": 1}, kind=ObservedLedger) as opened:
        opened = cast(ObservedLedger, opened)
        opened.loaded = []
        made = World(opened, **options)
        await made.restore(*leases)
        opened.loaded.clear()
        yield made


@contextlib.asynccontextmanager
async def running(*loops: Callable[[], Any]) -> AsyncIterator[None]:
    """Run loops while the block lasts; those of a service as its runtime does."""
    tasks = [asyncio.create_task(_run(loop)) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _run(loop: Callable[[], Any]) -> None:
    service: Any = getattr(loop, "__self__", None)
    roles = {role.method: role for role in roles_of(service)}
    role = roles.get(getattr(loop, "__name__", ""))
    await (loop() if role is None else run_loop(service, role, service.publish))
