"""Puts a binder together from its ports; what is real and what is not is the caller's choice."""

from collections.abc import Callable
from typing import Protocol

from services.binder import event_writer
from services.binder.condition_writer import ConditionWriter, Statuses
from services.binder.ending import Agents as EndingAgents
from services.binder.ending import Endings
from services.binder.event_writer import EventLog, EventWriter
from services.binder.gating import Gatekeeper
from services.binder.gating import Pods as GatedPods
from services.binder.gating import Store as GateStore
from services.binder.holding import Holder
from services.binder.keeping import Keeper
from services.binder.ledger import Ledger, Staging
from services.binder.ports import Publishing, TakingBack
from services.binder.posting import CONCURRENCY, PATIENCE_S, Poster
from services.binder.posting import Pods as BindingPods
from services.binder.presence import Agents as BindingAgents
from services.binder.presence import Presence
from services.binder.rebuilding import Evidences, Rebuild, Restoring
from services.binder.reconciling import Reconciler
from services.binder.resizing import Agents as LimitingAgents
from services.binder.resizing import Annotations, Resizer
from services.binder.resizing import Ledger as ResizingLedger
from services.binder.service import Binder
from services.binder.shutting import Shutting
from services.binder.sweeping import Sweeper
from services.binder.tally import Tally
from shared.runtime.clock import Clock


class Pods(BindingPods, EventLog, GatedPods, Statuses, Annotations, Protocol):
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
    reclaimer: Callable[[EventWriter], TakingBack],
    resized: Callable[[str], None],
    concurrency: int = CONCURRENCY,
    patience_s: float = PATIENCE_S,
    events_per_s: float = event_writer.PER_S,
) -> Binder:
    """Return a binder of these parts; what takes leases back is made with its writer of Events."""
    events = EventWriter(pods, clock, tally, per_s=events_per_s)
    sweeper = Sweeper(ledger, clock)
    poster = Poster(pods, clock, concurrency=concurrency, patience_s=patience_s)
    presence, conditions = Presence(agents, ledger, clock), ConditionWriter(pods, clock, tally)
    keeper = Keeper(ledger, Endings(agents, clock), tally)
    return Binder(
        ledger=ledger,
        bus=bus,
        poster=poster,
        presence=presence,
        shutting=Shutting(ledger, presence),
        holder=Holder(ledger, keeper, conditions, events, clock),
        keeper=keeper,
        sweeper=sweeper,
        reconciler=Reconciler(ledger, staging, pods, tally),
        rebuild=Rebuild(ledger, staging, bus, clock, tally, flights=poster),
        events=events,
        conditions=conditions,
        reclaimer=reclaimer(events),
        gatekeeper=Gatekeeper(gates, pods, events, clock),
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
