"""Preemption: leases that end early for another pod or an exhausted budget, in stages; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shared.model.errors import ConflictError
from shared.model.events.pod_events import BudgetChanged
from shared.model.leases.ledger import Reservation
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid, name_in
from shared.model.quantity import timestamp
from shared.model.requests.request import Gang

PREEMPT_AT = "leasehold.dev/preempt-at"
"""RFC 3339. A volume can expose it to the pod."""
MOST_START_EVENTS = 16


class PreemptionCause(StrEnum):
    """Why a lease may be preempted, in order of precedence."""

    EXPIRED = "expired"
    RECLAIMABLE = "reclaimable"
    PRIORITY = "priority"
    POLICY = "policy"
    VIOLATION = "violation"
    """It violates its limits, and the administrator enabled eviction for that."""


class PreemptionStage(StrEnum):
    OPENED = "opened"
    """Devices are claimed; no victim is announced yet."""
    ANNOUNCED = "announced"
    EVICTING = "evicting"
    HANDED = "handed"


TRANSITIONS: Mapping[PreemptionStage, frozenset[PreemptionStage]] = {
    PreemptionStage.OPENED: frozenset({PreemptionStage.ANNOUNCED}),
    PreemptionStage.ANNOUNCED: frozenset({PreemptionStage.ANNOUNCED, PreemptionStage.EVICTING}),
    PreemptionStage.EVICTING: frozenset({PreemptionStage.HANDED}),
    PreemptionStage.HANDED: frozenset(),
}
"""A preemption may be closed at every stage, and announced again if it is long overdue."""


class EvictionOutcome(StrEnum):
    EVICTED = "evicted"
    GONE = "gone"
    """The pod no longer exists, or another pod has its name."""
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    pod: PodUid
    namespace: Namespace
    name: str
    node: NodeName
    cause: PreemptionCause
    owner: str
    """UID of its controller, or `NAMESPACE/NAME`."""
    budget: str
    """Of its namespace when it was chosen; empty for other causes."""
    grace_s: float
    devices: tuple[DeviceUuid, ...]
    priority: int = 0
    outcome: EvictionOutcome | None = None
    claims: tuple[PodUid, ...] = ()
    """UIDs of its ResourceClaims whose leases end after it; empty: the lease is its own."""

    @property
    def leases(self) -> tuple[PodUid, ...]:
        return self.claims or (self.pod,)


def devices_of(wanted: Iterable[Reservation]) -> frozenset[DeviceUuid]:
    shares = (share for reservation in wanted for share in reservation.candidates[0].shares)
    return frozenset(share.device for share in shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimingPod:
    """A pod that waits until kube-scheduler allocates its ResourceClaim."""

    pod: PodUid
    namespace: Namespace
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """Leases that end early, for a waiting pod or because of a budget's policy."""

    id: str
    """UID of the preemptor pod, or name of the gang; or `policy:` or `violation:` and the victim's
    UID."""
    victims: tuple[Victim, ...]
    wanted: tuple[Reservation, ...] = ()
    """Of the preemptor pod, or of all pods of the gang; of a `claiming` pod, that of its
    ResourceClaim."""
    claiming: ClaimingPod | None = None
    """The preemptor pod if it waits for a ResourceClaim."""
    gang: Gang | None = None
    priority: int = 0
    preempts: bool = True
    stage: PreemptionStage = PreemptionStage.OPENED
    opened_at: float = 0.0
    evict_at: float = 0.0
    """Not before; 0 until the victims are announced."""
    expires_at: float = 0.0
    notice_s: float = 0.0
    reason: str = ""
    cancelled: str = ""
    """The planner gives it up: nothing is evicted."""
    by_kube_scheduler: bool = False
    """kube-scheduler chooses the preemptor pod's node, and is offered the devices."""

    @property
    def pods(self) -> tuple[PodUid, ...]:
        return tuple(preemptor.pod for preemptor in self.preemptors)

    @property
    def preemptors(self) -> tuple[Reservation | ClaimingPod, ...]:
        return self.wanted if self.claiming is None else (self.claiming,)

    @property
    def holders(self) -> tuple[PodUid, ...]:
        return tuple(reservation.pod for reservation in self.wanted)

    @property
    def devices(self) -> frozenset[DeviceUuid]:
        return devices_of(self.wanted)

    @property
    def preemptor_namespace(self) -> Namespace:
        """Empty if it is for no pod."""
        return self.wanted[0].namespace if self.wanted else Namespace("")

    @property
    def preemptor_name(self) -> str:
        """Of the pod, or `gang NAME`; empty if it is for no pod."""
        if self.gang is not None:
            return f"gang {self.gang.name.rpartition('/')[2]}"
        return self.preemptors[0].name if self.wanted else ""

    @property
    def left(self) -> tuple[Victim, ...]:
        return tuple(victim for victim in self.victims if victim.outcome is None)

    def stepped(self, to: PreemptionStage) -> "Preemption":
        """Return the preemption at the next stage. Raises ConflictError for any other stage."""
        if to not in TRANSITIONS[self.stage]:
            raise ConflictError(f"a preemption that is {self.stage} cannot become {to}")
        return replace(self, stage=to)

    def after(self, evicted: Victim, outcome: EvictionOutcome) -> "Preemption":
        victims = tuple(
            replace(victim, outcome=outcome) if victim.pod == evicted.pod else victim
            for victim in self.victims
        )
        return replace(self, victims=victims)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRecord:
    """The evicted pod, the budget that caused it, and the pod that benefits."""

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
    """Of the pod that gets the devices; empty for a gang."""
    for_namespace: str = ""
    for_name: str = ""
    """Of the pod, or `gang NAME`."""
    event: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPreemption:
    preemption: Preemption
    version: int
    claimed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingLease:
    pod: PodUid
    namespace: Namespace
    name: str
    ends_at: float
    enforced: bool
    """It ends by then at the latest; else it is expected to."""


def start_text(ends: Sequence[EndingLease], last: str) -> str:
    """Return when pods start that wait for leases; `ends` are in order, `last` is its name."""
    at = timestamp(ends[-1].ends_at)
    others = len(ends) - 1
    loose = sum(not lease.enforced for lease in ends)
    if not loose:
        who = f"{last} and {others} more end" if others else f"{last} ends"
        return f"starts by {at} at the latest: {who} by then"
    pods = "1 pod before it has" if loose == 1 else f"{loose} pods before it have"
    return f"expected to start at {at}, not promised: {pods} no maximum run time"


class PromiseOutcome(StrEnum):
    KEPT = "kept"
    WITHDRAWN = "withdrawn"
    """Its pods have an Event with the reason."""
    NOT_NEEDED = "not_needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedPromise:
    at: float
    namespace: Namespace
    outcome: PromiseOutcome
    opened_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStart:
    """The planned start of a waiting pod, or of a gang: its devices are claimed until then."""

    id: str
    wanted: tuple[Reservation, ...]
    at_once: tuple[Mapping[str, int], ...]
    """Of each pod's ordinary resources, claimed from the start; the leases that end first free the
    rest."""
    waits_for: tuple[EndingLease, ...]
    """In the order of their ends."""
    at: float
    enforced: bool
    """A promise: all of them end by an enforced time."""
    priority: int = 0
    gang: Gang | None = None
    opened_at: float = 0.0

    @property
    def pods(self) -> tuple[PodUid, ...]:
        return tuple(reservation.pod for reservation in self.wanted)

    @property
    def devices(self) -> frozenset[DeviceUuid]:
        return devices_of(self.wanted)

    @property
    def namespace(self) -> Namespace:
        return self.wanted[0].namespace

    def ended(self, outcome: PromiseOutcome, now: float) -> EndedPromise | None:
        if not self.enforced:
            return None
        return EndedPromise(
            at=now,
            namespace=self.namespace,
            outcome=outcome,
            opened_at=self.opened_at,
        )

    def name_of(self, lease: EndingLease) -> str:
        return name_in(self.namespace, lease.namespace, lease.name)

    @property
    def text(self) -> str:
        return start_text(self.waits_for, self.name_of(self.waits_for[-1]))

    def withdrawn_text(self, reason: str) -> str:
        return f"no longer {self.text}; {reason}. It is planned anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionState:
    open: tuple[StoredPreemption, ...] = ()
    starts: tuple[StoredStart, ...] = ()
    evictions: tuple[EvictionRecord, ...] = ()
    budgets: Mapping[Namespace, BudgetChanged] | None = None

    def budget_of(self, namespace: Namespace) -> BudgetChanged | None:
        return (self.budgets or {}).get(namespace)

    def victims(self) -> frozenset[PodUid]:
        return frozenset(victim.pod for read in self.open for victim in read.preemption.victims)

    def preemption_for(self, pod: PodUid) -> Preemption | None:
        preemptions = (read.preemption for read in self.open)
        return next((own for own in preemptions if pod in own.pods), None)

    def preemptors(self) -> frozenset[PodUid]:
        return frozenset(pod for read in self.open for pod in read.preemption.pods)
