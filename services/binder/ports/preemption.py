"""What preemption needs of others: a port for each, with the methods that it calls."""

from collections.abc import Sequence
from typing import Protocol

from services.binder.ports.ledger import NodeTotalsReader, WaitingPodStore
from services.binder.preempt.rules import DisruptionBudget, PodFacts
from services.binder.report.explanations import KubernetesEvent
from shared.model.events.pod_events import BudgetChanged
from shared.model.lease import Lease
from shared.model.ledger import Reservation
from shared.model.ledger import ReservationOutcome as Answer
from shared.model.names import Namespace, PodUid
from shared.model.preemption import (
    EvictionOutcome,
    EvictionRecord,
    Preemption,
    PreemptionState,
    StoredPreemption,
    Victim,
)

PAST_S = 24 * 3600.0


class Ledger(Protocol):
    """What preemption needs of the ledger."""

    async def generation(self) -> str | None:
        """Return the name of the ledger's present life; None while it is to be rebuilt."""
        ...

    @property
    def waiting_pods(self) -> WaitingPodStore:
        """The pods that fit nowhere yet."""
        ...

    @property
    def totals(self) -> NodeTotalsReader:
        """Nodes with their leases."""
        ...

    async def load(self, pods: Sequence[PodUid]) -> list[Lease | None]:
        """Return these pods' live leases."""
        ...

    async def reserve(
        self, wanted: Sequence[Reservation], *, now: float, ttl_s: float
    ) -> list[Answer]:
        """Reserve; a pod's own claim does not stand in its way."""
        ...


class Store(Protocol):
    """What binders share about preemption; `shared.ledger.preemptions.Preemptions` is it."""

    async def acquire_leadership(self, who: str, *, ttl_s: float) -> bool:
        """Return whether `who` may act now, and for `ttl_s` seconds nobody else."""
        ...

    async def open(self, preemption: Preemption) -> bool:
        """Begin a preemption and claim its devices; False if it, its pod or a device is taken."""
        ...

    async def save(
        self, read: StoredPreemption, preemption: Preemption, lines: Sequence[EvictionRecord] = ()
    ) -> StoredPreemption | None:
        """Write the next step with its lines of the journal; None if another did."""
        ...

    async def close(self, read: StoredPreemption) -> bool:
        """End a preemption and its claim; False if another moved it on."""
        ...

    async def state(self, *, now: float, past_s: float = PAST_S) -> PreemptionState:
        """Read what is open, what was done in the last `past_s` seconds, and how budgets stand."""
        ...

    async def save_budget(self, told: BudgetChanged) -> None:
        """Remember how a namespace's budget stands, unless something newer is known."""
        ...


class Victims(Protocol):
    """Pods and PodDisruptionBudgets at the API server."""

    async def everybody(self) -> tuple[dict[PodUid, PodFacts], list[DisruptionBudget]]:
        """Return all pods by uid, and which of them each PodDisruptionBudget counts."""
        ...

    async def look(self, namespace: Namespace, name: str) -> PodFacts | None:
        """Return the pod of this name; None: there is none."""
        ...

    async def announce(self, victim: Victim, at: float) -> bool:
        """Write on the pod when it will be evicted; False if it is gone."""
        ...

    async def withdraw(self, victim: Victim) -> bool:
        """Take that off the pod again; False if it is gone."""
        ...

    async def evict(self, victim: Victim, *, dry_run: bool = False) -> tuple[EvictionOutcome, str]:
        """Evict the pod of exactly this uid, or ask whether that is allowed; say why not."""
        ...


class Noting(Protocol):
    """Kubernetes Events on pods."""

    def note(self, note: KubernetesEvent, *, once: bool = False) -> None:
        """Ask for a note to be written."""
        ...


class Counting(Protocol):
    """Metrics of evictions."""

    def evicted(self, victim: Victim, beneficiary: str) -> None:
        """Count one, for a namespace."""
        ...
