"""The product's services over a link, with as many lives as the model wants."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from services.binder.bind.volume_client import VolumeClient
from services.binder.clients import NodeAgentClient, PodClient
from services.binder.report.explanations import KubernetesEvent
from services.binder.service import Binder
from services.binder.wiring import BinderPorts, build_binder
from services.claims.clients import ClaimAgentClient, ClaimClient
from services.claims.wiring import ClaimPorts, build_claims
from services.placer.service import Placer
from services.planner.rules import PreemptionRules
from services.planner.wiring import PlannerPorts, build_planner
from shared.ledger.leases import RedisLeases
from shared.model.errors import ConflictError, UnavailableError
from shared.model.events.claim_events import ClaimAllocated, ClaimDeallocated
from shared.model.events.event import Event
from shared.model.events.node_events import (
    DeviceReported,
    ShareActivated,
    ShareRefused,
    ViolationFound,
)
from shared.model.events.plan_events import StartReported, ViolationConfirmed
from shared.model.events.pod_events import (
    NodeChanged,
    NodesListed,
    PlacementChosen,
    PodQueued,
    PodsListed,
    PodTerminated,
    QuotasUpdated,
)
from tests.model.api_server import NOTICE_S, PodListing
from tests.model.redis_links import Link, LinkedConnection, RedisServer
from tests.model.virtual_time import LedgerTime, VirtualLoop
from tests.support.build import dice

if TYPE_CHECKING:
    from tests.model.world import World

RULES = PreemptionRules(
    plan_starts_after_s=1.0,
    planned_starts=8,
    preemption_notice_s=NOTICE_S,
    preemption_min_runtime_s=0.0,
    preemption_cooldown_s=0.0,
    preemption_per_namespace_hour=1_000,
    preemption_per_minute=1_000,
)
TTL_S = 30.0
"""How long a reservation waits for its binder."""
Handler = Callable[[Sequence[Any]], Awaitable[Sequence[Event] | None]]


class Service:
    """One replica: its link, its clock, its tasks."""

    def __init__(self, name: str, server: RedisServer, loop: VirtualLoop, world: "World") -> None:
        self.name = name
        self.server = server
        self.loop = loop
        self.world = world
        self.clock = LedgerTime(loop, server.clock)
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.link = Link(server)
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.rounds: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        """What its loops do, each time that the model says so."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self.tasks.pop)
        return task

    def stop(self) -> None:
        """Kill it: its calls in flight have no sender any more."""
        for task in list(self.tasks):
            task.cancel()
        self.loop.settle()

    def run_loops(self) -> None:
        """Run one round of each loop whose last round has ended."""
        for name, round_of in self.rounds.items():
            if name not in self.running or self.running[name].done():
                self.running[name] = self.spawn(self.attempt(round_of()))

    async def attempt(self, work: Awaitable[Any]) -> Any:
        """Do one round of a loop; what is not available now is tried again by the next round."""
        try:
            return await work
        except (UnavailableError, ConflictError):
            return None
        except Exception as error:  # noqa: BLE001 - a bug of the product, which the model reports
            self.world.fail(f"{self.name} raises {error!r}")
            return None

    async def _publish(self, events: Sequence[Event]) -> None:
        self.world.publish(events)

    async def _publish_of(self, work: Awaitable[Sequence[Event]]) -> None:
        self.world.publish(await work)


class BinderReplica(Service):
    """A binder whose loops run when the model says so."""

    def __init__(
        self,
        name: str,
        server: RedisServer,
        loop: VirtualLoop,
        world: "World",
    ) -> None:
        super().__init__(name, server, loop, world)
        api: Any = world.claims
        self.claims = ClaimClient(api, self.clock)
        self.start()

    def start(self) -> None:
        self.link = Link(self.server)
        self.connection = LinkedConnection(self.link)
        self.binder: Binder = build_binder(
            BinderPorts(
                ledger=RedisLeases(self.connection),
                pods=cast(PodClient, self.world.api),
                claims=self.claims,
                volumes=cast(VolumeClient, self.world.api.volumes),
                agents=cast(NodeAgentClient, self.world),
                publish=self._publish,
                clock=self.clock,
                host_clock=self.clock,
            ),
            concurrency=4,
        )
        self.binder.starts.events = self
        self.binder.preemptions.events = self
        self.claims_service = build_claims(
            ClaimPorts(
                ledger=self.binder.updater.ledger,
                claims=self.claims,
                agents=cast(ClaimAgentClient, self.world),
                publish=self._publish,
                clock=self.clock,
                host_clock=self.clock,
            )
        )
        self.running = {}
        self.rounds = {
            "expire": lambda: self._publish_of(self.binder.sweeper.expire_reservations()),
            "offer": lambda: self._publish_of(self.binder.sweeper.offer()),
            "end vanished": lambda: self._publish_of(self.binder.vanished.end_vanished()),
            "end unwritten": lambda: self._publish_of(
                self.claims_service.leaser.end_unwritten_claims()
            ),
            "cordon": self.binder.cordons.cordon_nodes,
            "rebuild": self._rebuild,
            "resizes": self.binder.resizer.finish_resizes,
            "plans": self._carry_out,
            "claims": self.binder.volumes.keep_reservations,
        }
        self.spawn(self.binder.sender.send_bindings())
        self.spawn(self._follow_claims())

    @property
    def handlers(self) -> Mapping[type[Event], Handler]:
        binder = self.binder
        return {
            PlacementChosen: binder.pods.bind_pods,
            NodeChanged: binder.updater.save_nodes,
            NodesListed: binder.reconciler.remove_deleted_nodes,
            DeviceReported: binder.save_devices,
            ShareActivated: binder.activate_shares,
            ShareRefused: binder.release_refused,
            ViolationFound: binder.report_violations,
            StartReported: binder.starts.show_starts,
            PodTerminated: binder.end_leases,
            PodsListed: binder.reconciler.reconcile_listing,
            QuotasUpdated: binder.updater.save_quotas,
            ClaimAllocated: self.claims_service.leaser.lease_claims,
            ClaimDeallocated: self.claims_service.ender.end_claims,
        }

    def observe(self, event: Event) -> None:
        """Receive the copy of an event, whichever replica handles it."""
        if isinstance(event, PodsListed):
            self.binder.evidence.add_chunks([event])
        elif isinstance(event, DeviceReported):
            self.binder.evidence.add_reports([event])

    def record(self, event: KubernetesEvent, *, once: bool = False) -> None:
        self.world.watches.note_reported(event)

    async def _follow_claims(self) -> None:
        while True:
            await self.attempt(self.binder.volumes.follow_claims())
            await self.clock.sleep(1.0)

    async def _carry_out(self) -> None:
        began_at = self.clock.now()
        await self._publish_of(self.binder.preemptions.carry_out())
        if self.server.leader("binder") == self.binder.preemptions.leadership.name:
            self.world.watches.note_starts_advanced(began_at)

    async def _rebuild(self) -> None:
        await self.binder.records.check_records()
        await self._publish_of(self.binder.rebuild.rebuild_ledger())


class PlannerReplica(Service):
    """A planner that reads the ledger's feed when the model says so, or late."""

    def __init__(self, name: str, server: RedisServer, loop: VirtualLoop, world: "World") -> None:
        super().__init__(name, server, loop, world)
        self.start()

    def start(self) -> None:
        self.link = Link(self.server)
        self.planner = build_planner(
            PlannerPorts(
                ledger=RedisLeases(LinkedConnection(self.link)),
                pods=PodListing(self.world.api),
                publish=self._publish,
                clock=self.clock,
            ),
            rules=RULES,
        )
        self.running = {}
        self.rounds = {"plan": self.planner.preemptions.plan}
        self.spawn(self._follow())

    @property
    def handlers(self) -> Mapping[type[Event], Handler]:
        return {ViolationConfirmed: self.planner.preemptions.evict_violators}

    async def _follow(self) -> None:
        while True:
            await self.attempt(self.planner.mirror.follow_ledger())
            await self.clock.sleep(1.0)


class PlacerReplica(Service):
    """A placer that reads the ledger's feed when the model says so."""

    def __init__(
        self, name: str, server: RedisServer, loop: VirtualLoop, world: "World", *, seed: int
    ) -> None:
        super().__init__(name, server, loop, world)
        self.seed = seed
        self.start()

    def start(self) -> None:
        self.link = Link(self.server)
        self.placer = Placer(
            RedisLeases(LinkedConnection(self.link)),
            self.clock,
            dice(self.seed),
            ttl_s=TTL_S,
        )
        self.spawn(self._follow())

    @property
    def handlers(self) -> Mapping[type[Event], Handler]:
        return {PodQueued: self.placer.place_pods}

    async def _follow(self) -> None:
        while True:
            await self.attempt(self.placer.follow_ledger())
            await self.clock.sleep(1.0)


Replica = BinderReplica | PlacerReplica | PlannerReplica
