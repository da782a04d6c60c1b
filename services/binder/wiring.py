"""Puts a binder together from its ports; what is real and what is not is the caller's choice."""

from collections.abc import Callable
from typing import Protocol

from services.binder.bind.agent_presence import AgentPresence
from services.binder.bind.agent_presence import Agents as BindingAgents
from services.binder.bind.binding_sender import CONCURRENCY, PATIENCE_S, BindingSender
from services.binder.bind.binding_sender import Pods as BindingPods
from services.binder.bind.deferred_pods import DeferredPods
from services.binder.ledger_sync.ledger_updates import LedgerUpdater
from services.binder.ledger_sync.node_cordons import NodeCordons
from services.binder.ledger_sync.rebuild import Evidences, LedgerRebuild, Restoring
from services.binder.ledger_sync.reconciliation import Reconciler
from services.binder.ledger_sync.scheduling_gates import Pods as GatedPods
from services.binder.ledger_sync.scheduling_gates import SchedulingGates
from services.binder.ledger_sync.scheduling_gates import Store as GateStore
from services.binder.ledger_sync.sweep import Sweeper
from services.binder.ledger_sync.vanished_pods import Agents as EndingAgents
from services.binder.ledger_sync.vanished_pods import VanishedPods
from services.binder.ports.general import Preemptor, Publishing
from services.binder.ports.ledger import Ledger, Staging
from services.binder.ports.metrics import Tally
from services.binder.report import event_writer
from services.binder.report.condition_writer import ConditionWriter, Statuses
from services.binder.report.event_writer import EventApi, EventWriter
from services.binder.resize.resizer import Agents as LimitingAgents
from services.binder.resize.resizer import Annotations, Resizer
from services.binder.resize.resizer import Ledger as ResizingLedger
from services.binder.service import Binder
from shared.model.clock import Clock


class Pods(BindingPods, EventApi, GatedPods, Statuses, Annotations, Protocol):
    """All that the binder does with the API server."""


class Agents(EndingAgents, BindingAgents, LimitingAgents, Protocol):
    """All that the binder asks of node agents."""


class WholeLedger(Ledger, Restoring, ResizingLedger, Protocol):
    """All that the binder does with the ledger."""


class WholeStaging(Staging, Evidences, Protocol):
    """All that binders collect together."""


def assemble(
    *,
    ledger: WholeLedger,
    staging: WholeStaging,
    gates: GateStore,
    pods: Pods,
    bus: Publishing,
    agents: Agents,
    clock: Clock,
    tally: Tally,
    preemptor: Callable[[EventWriter], Preemptor],
    resized: Callable[[str], None],
    concurrency: int = CONCURRENCY,
    patience_s: float = PATIENCE_S,
    events_per_s: float = event_writer.PER_S,
) -> Binder:
    """Return a binder of these parts; what takes leases back is made with its writer of Events."""
    events = EventWriter(pods, clock, tally, per_s=events_per_s)
    sweeper = Sweeper(ledger, clock)
    sender = BindingSender(pods, clock, concurrency=concurrency, patience_s=patience_s)
    presence, conditions = AgentPresence(agents, ledger, clock), ConditionWriter(pods, clock, tally)
    updater = LedgerUpdater(ledger, VanishedPods(agents, clock), tally)
    return Binder(
        ledger=ledger,
        bus=bus,
        sender=sender,
        presence=presence,
        cordons=NodeCordons(ledger, presence),
        holder=DeferredPods(ledger, updater, conditions, events, clock),
        updater=updater,
        sweeper=sweeper,
        reconciler=Reconciler(ledger, staging, pods, tally),
        rebuild=LedgerRebuild(ledger, staging, bus, clock, tally, flights=sender),
        events=events,
        conditions=conditions,
        preemptor=preemptor(events),
        gatekeeper=SchedulingGates(gates, pods, events, clock),
        resizer=Resizer(
            ledger=ledger,
            agents=agents,
            pods=pods,
            bus=bus,
            events=events,
            clock=clock,
            counted=resized,
            freed=sweeper.freed,
        ),
        clock=clock,
    )
