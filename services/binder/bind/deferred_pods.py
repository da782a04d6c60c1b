"""What becomes of pods whose node must not be bound to now: they are told why, and not for ever."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.binder.bind.agent_presence import Deferral
from services.binder.ledger_sync.ledger_updates import LedgerUpdater
from services.binder.ports.ledger import Ledger
from services.binder.report.condition_writer import ConditionWriter
from services.binder.report.event_writer import EventWriter
from services.binder.report.explanations import explain_deferred, waiting_event
from shared.model.clock import Clock
from shared.model.lease import Lease, LeaseState
from shared.model.names import NodeName, PodUid

GIVE_UP_S = 5.0
"""A reservation on a node that has been shut for so long is given up: there may be others."""
EXPLAIN_S = 1.0
"""A pod whose reservation is this old is told why it is not bound yet."""
TURN_S = 10.0
"""The same for one whose turn comes next: a burst is no reason to write to each pod of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What became of them."""

    kept: tuple[Lease, ...] = ()
    given_up: tuple[Lease, ...] = ()
    ended: tuple[PodUid, ...] = ()
    """Pods whose reservation had ended by itself."""


class DeferredPods:
    """Off the hot path: there is work here only while some node has no agent."""

    def __init__(
        self,
        ledger: Ledger,
        updater: LedgerUpdater,
        conditions: ConditionWriter,
        events: EventWriter,
        clock: Clock,
    ) -> None:
        self.ledger = ledger
        self.updater = updater
        self.conditions = conditions
        self.events = events
        self.clock = clock

    async def hold(
        self, waits: Mapping[PodUid, Deferral], nodes: Mapping[PodUid, NodeName]
    ) -> Held:
        """Explain the pods that wait for their nodes; give up reservations where these stay shut.

        What was committed stays: its Binding may have been sent. A pod whose lease is on another
        node by now waits for nothing here. Raises ConflictError if a reservation moved on
        meanwhile.
        """
        if not waits:
            return Held()
        stored = [lease for lease in await self.ledger.load(list(waits)) if lease is not None]
        found = [lease for lease in stored if lease.node == nodes[lease.pod]]
        hopeless = [
            lease
            for lease in found
            if lease.state is LeaseState.RESERVED and waits[lease.pod].shut_s >= GIVE_UP_S
        ]
        given_up = await self.updater.release_unmoved(hopeless, reason="its node was shut")
        over = {lease.pod for lease in given_up}
        kept = tuple(lease for lease in found if lease.pod not in over)
        for lease in kept:
            wait = waits[lease.pod]
            if self.clock.now() - lease.created_at >= (TURN_S if wait.soon else EXPLAIN_S):
                why = explain_deferred(lease, wait.reason)
                if self.conditions.explain(why):
                    self.events.note(waiting_event(why))
        ended = waits.keys() - {lease.pod for lease in stored}
        return Held(kept=kept, given_up=tuple(given_up), ended=tuple(sorted(ended)))
