"""Taking back: leases that end early because another pod needs their devices, step by step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from shared.model.errors import ConflictError
from shared.model.events.pod_events import BudgetChanged
from shared.model.ledger import Reservation
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid

PREEMPT_AT = "leasehold.dev/preempt-at"
"""On a pod that is to be evicted: when, as RFC 3339; it can read this through a volume."""
PREEMPTIBLE = "leasehold.dev/preemptible"
"""Label; `"false"`: the pod is never evicted for another."""


class PreemptionCause(StrEnum):
    """Why a lease may be taken back, the first first."""

    EXPIRED = "expired"
    """Its namespace is in debt."""
    RECLAIMABLE = "reclaimable"
    """Its namespace has used its budget up."""
    PRIORITY = "priority"
    """Its pod's priority is lower than that of the pod in need."""
    POLICY = "policy"
    """Its namespace's budget says that leases end when it is used up."""
    VIOLATION = "violation"
    """It breaks a rule of its node, and the operator has pods evicted for that."""


class PreemptionStage(StrEnum):
    """How far a taking is."""

    OPENED = "opened"
    """The devices are claimed; nobody was told yet."""
    ANNOUNCED = "announced"
    """The victims know when they will be evicted."""
    EVICTING = "evicting"
    """They are being evicted, or are ending."""
    HANDED = "handed"
    """The pod in need holds its lease."""


TRANSITIONS: Mapping[PreemptionStage, frozenset[PreemptionStage]] = {
    PreemptionStage.OPENED: frozenset({PreemptionStage.ANNOUNCED}),
    PreemptionStage.ANNOUNCED: frozenset({PreemptionStage.EVICTING}),
    PreemptionStage.EVICTING: frozenset({PreemptionStage.HANDED}),
    PreemptionStage.HANDED: frozenset(),
}
"""A taking may be closed at every stage."""


class EvictionOutcome(StrEnum):
    """What became of an eviction."""

    EVICTED = "evicted"
    GONE = "gone"
    """The pod was not there any more, or is another one of its name."""
    BLOCKED = "blocked"
    """A PodDisruptionBudget forbids it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A pod whose lease is taken back."""

    pod: PodUid
    namespace: Namespace
    name: str
    node: NodeName
    cause: PreemptionCause
    owner: str
    """Uid of the controller that will make another; `NAMESPACE/NAME` of a pod without one."""
    budget: str
    """State of its namespace's budget when it was chosen; empty if that is not why."""
    grace_s: float
    """What its containers are given to end."""
    devices: tuple[DeviceUuid, ...]
    priority: int = 0
    outcome: EvictionOutcome | None = None
    """None: it was not evicted yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Leases that are taken back, for a pod in need or because a budget's policy says so."""

    id: str
    """Uid of the pod in need: it has one at a time; or `policy:` or `violation:` and the victim's.
    """
    victims: tuple[Victim, ...]
    wanted: Reservation | None = None
    """What the pod in need gets, on exactly the devices that become free; None: nobody's."""
    priority: int = 0
    """Of the pod in need."""
    preempts: bool = True
    """Whether it may have pods of lower priority evicted."""
    stage: PreemptionStage = PreemptionStage.OPENED
    opened_at: float = 0.0
    evict_at: float = 0.0
    """No earlier than this; 0 before the victims were told."""
    expires_at: float = 0.0
    """When it is given up."""
    reason: str = ""
    """What the victim did, if it is evicted for that."""

    @property
    def left(self) -> tuple[Victim, ...]:
        """Victims that were not evicted yet."""
        return tuple(victim for victim in self.victims if victim.outcome is None)

    def stepped(self, to: PreemptionStage) -> "Preemption":
        """Return it at the next stage. Raises ConflictError if that is not the next."""
        if to not in TRANSITIONS[self.stage]:
            raise ConflictError(f"a taking that is {self.stage} cannot become {to}")
        return replace(self, stage=to)

    def after(self, evicted: Victim, outcome: EvictionOutcome) -> "Preemption":
        """Return it with what became of one victim."""
        victims = tuple(
            replace(each, outcome=outcome) if each.pod == evicted.pod else each
            for each in self.victims
        )
        return replace(self, victims=victims)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRecord:
    """A line of the journal: who was evicted, whose budget was the reason, who has the use."""

    at: float
    preemption: str
    pod: PodUid
    namespace: Namespace
    name: str
    node: NodeName
    owner: str
    cause: PreemptionCause
    budget: str
    devices: tuple[DeviceUuid, ...]
    outcome: EvictionOutcome
    for_pod: str = ""
    """Uid of the pod that gets the devices; empty: nobody's in particular."""
    for_namespace: str = ""
    for_name: str = ""
    event: str = ""
    """Name of the Kubernetes Event on the victim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPreemption:
    """A taking as stored."""

    preemption: Preemption
    version: int
    claimed: bool
    """The ledger still keeps the devices for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionState:
    """Everything about taking back that is remembered."""

    open: tuple[StoredPreemption, ...] = ()
    evictions: tuple[EvictionRecord, ...] = ()
    budgets: Mapping[Namespace, BudgetChanged] | None = None
    """The last word on each namespace's budget."""

    def budget_of(self, namespace: Namespace) -> BudgetChanged | None:
        """Return how a namespace's budget stands; None: it has none, or nothing is known."""
        return (self.budgets or {}).get(namespace)
