"""Builds the binder from ports, and the ports from real clients."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from services.binder.bind.agent_presence import AgentPresence, NodeCordons
from services.binder.bind.binding_sender import BATCH_WAIT_S, CONCURRENCY, BindingSender
from services.binder.bind.pod_binder import GangCheck, PodBinder
from services.binder.bind.scheduler_bindings import SchedulerBindings
from services.binder.bind.volume_binder import BIND_TIMEOUT_S, VolumeBinder
from services.binder.bind.volume_client import VolumeClient
from services.binder.clients import NodeAgentClient, PodClient
from services.binder.ledger_sync.agent_reports import LostLeases, NodeRefusals
from services.binder.ledger_sync.evidence import CollectedEvidence
from services.binder.ledger_sync.lease_holders import LeaseHolders
from services.binder.ledger_sync.ledger_updates import LedgerUpdater, VanishedPods
from services.binder.ledger_sync.library_removal import LibraryRemoval
from services.binder.ledger_sync.rebuild import LedgerRebuild
from services.binder.ledger_sync.reconciliation import Reconciler
from services.binder.ledger_sync.record_watch import RecordWatch
from services.binder.ledger_sync.scheduling_gates import SchedulingGates
from services.binder.ledger_sync.sweep import SchedulerOffers, Sweeper
from services.binder.plans.preemptions import PlannedPreemptions
from services.binder.plans.starts import PlannedStarts
from services.binder.report.event_writer import EVENTS_PER_S, ConditionWriter, EventWriter, NoEvents
from services.binder.resize.resizer import Resizer
from services.binder.service import Binder
from services.binder.settings import BinderSettings
from shared.kubernetes.claim_reads import AllocationReader
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.reachability import ApiServerReachability
from shared.ledger.connection_pool import LedgerClock
from shared.ledger.function_libraries import FunctionLibraries
from shared.ledger.leases import RedisLeases
from shared.ledger.preemptions import Preemptions
from shared.ledger.waiting_pods import GatedPods
from shared.model.clock import Clock, SystemClock
from shared.model.events.pod_events import ResyncRequested
from shared.nats.bus import Bus
from shared.nats.connection_shares import connection_shares
from shared.runtime.leadership import Leadership
from shared.runtime.run import open_bus, serve
from shared.runtime.service import Publish
from shared.runtime.shared_process import SharedProcess
from shared.runtime.telemetry import open_tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class BinderPorts:
    ledger: RedisLeases
    pods: PodClient
    claims: AllocationReader
    volumes: VolumeClient
    agents: NodeAgentClient
    publish: Publish
    clock: Clock
    """Of the ledger: stored times are compared with it."""
    host_clock: Clock
    """For times that are only shown."""


def build_binder(
    ports: BinderPorts,
    *,
    concurrency: int = CONCURRENCY,
    batch_wait_s: float = BATCH_WAIT_S,
    events_per_s: float = EVENTS_PER_S,
    volume_bind_timeout_s: float = BIND_TIMEOUT_S,
) -> Binder:
    ledger = ports.ledger
    pods = ports.pods
    agents = ports.agents
    clock = ports.clock
    sender = BindingSender(pods, clock, concurrency=concurrency, batch_wait_s=batch_wait_s)
    events = EventWriter(pods, ports.host_clock, per_s=events_per_s, is_busy=sender.is_busy)
    conditions = ConditionWriter(pods, ports.host_clock)
    presence = AgentPresence(agents, ledger.reported_by_agent, clock)
    holders = LeaseHolders(pods, ports.claims)
    evidence = CollectedEvidence(clock.ticks)
    updater = LedgerUpdater(ledger, LostLeases(ledger, holders, agents, clock=clock), events, clock)
    offers = SchedulerOffers(ledger.waiting_pods, pods, clock)
    preemptions = _preemptions(ports, events, conditions, offers, sender)
    rebuild = _ledger_rebuild(ports, evidence, holders, sender)
    volumes = _volume_binder(ports, updater, conditions, events, volume_bind_timeout_s)
    binder = PodBinder(
        ledger=ledger,
        publish=ports.publish,
        sender=sender,
        presence=presence,
        updater=updater,
        gangs=GangCheck(ledger, holders, updater, volumes),
        volumes=volumes,
        conditions=conditions,
        events=events,
        clock=clock,
    )
    return Binder(
        publish=ports.publish,
        pods=binder,
        sender=sender,
        volumes=volumes,
        presence=presence,
        cordons=NodeCordons(ledger, presence),
        offers=offers,
        chosen=SchedulerBindings(replace(binder, events=NoEvents()), pods, preemptions.claimed_for),
        updater=updater,
        vanished=VanishedPods(ledger, agents, clock),
        sweeper=Sweeper(ledger, clock, volumes.forsake),
        reconciler=Reconciler(ledger, holders, evidence, publish=ports.publish, clock=clock),
        evidence=evidence,
        rebuild=rebuild,
        records=RecordWatch(ledger, rebuild.renew, events, preemptions.leadership.holds, clock),
        libraries=LibraryRemoval(ledger.part(FunctionLibraries)),
        gates=SchedulingGates(ledger.part(GatedPods), pods, events, clock),
        events=events,
        conditions=conditions,
        refusals=NodeRefusals(ledger, holders, events, presence.distrust, clock),
        preemptions=preemptions,
        starts=preemptions.starts,
        resizer=Resizer(ledger, agents, pods, ports.publish, events, clock),
    )


def _volume_binder(
    ports: BinderPorts,
    updater: LedgerUpdater,
    conditions: ConditionWriter,
    events: EventWriter,
    timeout_s: float,
) -> VolumeBinder:
    return VolumeBinder(
        ledger=ports.ledger,
        volumes=ports.volumes,
        holders=LeaseHolders(ports.pods, ports.claims),
        updater=updater,
        conditions=conditions,
        events=events,
        publish=ports.publish,
        clock=ports.clock,
        timeout_s=timeout_s,
    )


def _ledger_rebuild(
    ports: BinderPorts, evidence: CollectedEvidence, holders: LeaseHolders, sender: BindingSender
) -> LedgerRebuild:
    return LedgerRebuild(
        ledger=ports.ledger,
        evidence=evidence,
        publish=ports.publish,
        holders=holders,
        clock=ports.clock,
        bindings_in_flight=sender.in_flight,
    )


def _preemptions(
    ports: BinderPorts,
    events: EventWriter,
    conditions: ConditionWriter,
    offers: SchedulerOffers,
    sender: BindingSender,
) -> PlannedPreemptions:
    store = ports.ledger.part(Preemptions)
    starts = PlannedStarts(
        ledger=ports.ledger,
        store=store,
        events=events,
        conditions=conditions,
        clock=ports.clock,
    )
    return PlannedPreemptions(
        ledger=ports.ledger,
        store=store,
        pods=ports.pods,
        events=events,
        clock=ports.clock,
        offers=offers,
        agents=ports.agents,
        starts=starts,
        leadership=Leadership(store, "binder"),
        is_busy=sender.is_busy,
    )


Beside = Callable[[KubernetesClient, RedisLeases, Bus, Clock], object]
"""Builds a service on the connections of the binder."""


async def serve_binder(
    settings: BinderSettings, process: SharedProcess | None = None, *, beside: Beside
) -> None:
    credentials = load_credentials(settings.kubeconfig)
    redis_url = settings.redis_url
    login = settings.redis_client_credentials
    clock = LedgerClock()
    async with (
        KubernetesClient(credentials, timeout_s=settings.api_timeout_s) as client,
        ApiServerReachability.observed(client) as api_server,
        open_bus(settings, "binder", process=process) as bus,
        RedisLeases.connect(
            redis_url, credentials=login, detects_lost_writes=True, clock=clock
        ) as ledger,
        connection_shares(lambda: open_bus(settings, "binder"), flooded=bus),
    ):
        binder = build_binder(
            BinderPorts(
                ledger=ledger,
                pods=PodClient(client),
                claims=AllocationReader(client),
                volumes=VolumeClient(client),
                agents=NodeAgentClient(bus),
                publish=bus.publish,
                clock=clock,
                host_clock=SystemClock(),
            ),
            concurrency=settings.api_concurrency,
            events_per_s=settings.events_per_s,
            volume_bind_timeout_s=settings.volume_bind_timeout_s,
        )

        bus.on_refused = binder.refusals.refuse
        tracing = open_tracing("binder", settings)
        binder.preemptions.tracing = tracing
        await serve(
            "binder",
            binder,
            bus=bus,
            settings=settings,
            probes={"api": api_server.unready_reason, "redis": ledger.unready_reason},
            tracing=tracing,
            begin=partial(bus.publish, [ResyncRequested(reason="a binder has started")]),
            process=process,
            beside=beside(client, ledger, bus, clock),
        )
