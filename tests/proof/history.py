"""What a judge remembers of the samples before, and what it finds; pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from tests.proof.observations import AgentGrant, RawClaim, RawLedger, SeenPod

CLOCK_S = 60.0
"""What was decided with a clock that was off may happen within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An invariant that does not hold."""

    check: str
    """The name of the invariant."""
    subject: str
    text: str
    bound_s: float = 0.0
    """It must hold after this time; 0: at every instant."""
    pods: frozenset[str] = frozenset()
    """UIDs of the pods concerned."""
    counts_from: float = 0.0
    """The bound begins no earlier than at this instant."""
    at: float = 0.0
    """When it was reported."""
    since: float = 0.0
    """When it began, if that was before it was reported."""


def of_device(
    check: str, device: str, text: str, bound_s: float = 0.0, *, pods: frozenset[str] = frozenset()
) -> Finding:
    """Return a finding about a device."""
    return Finding(check=check, subject=f"device {device}", text=text, bound_s=bound_s, pods=pods)


@dataclass(slots=True)
class History:
    """What came before the present sample."""

    pods: dict[str, SeenPod] = field(default_factory=dict)
    """Every pod ever seen, as last seen."""
    first_seen: dict[str, float] = field(default_factory=dict)
    last_seen: dict[str, float] = field(default_factory=dict)
    instance_mib: dict[str, int] = field(default_factory=dict)
    """By lease, as charges name it, the memory of its MIG instances, or 0 without one."""
    announced_after: dict[str, float] = field(default_factory=dict)
    """By pod whose eviction is announced, the last sample before that."""
    pods_seen_at: float = 0.0
    """The latest sample with pods."""
    bound_at: dict[str, float] = field(default_factory=dict)
    """By pod, the first sample in which it had a node."""
    fences: dict[tuple[str, str, int], AgentGrant] = field(default_factory=dict)
    """The grant with the highest fence, by node, device and slot."""
    cordoned_since: dict[str, float] = field(default_factory=dict)
    judged_evictions: set[str] = field(default_factory=set)
    clock_off_at: float = 0.0
    """The latest sample in which a part's clock was off."""
    quiet_since: float = 0.0
    """The first sample without faults after the last one with faults."""
    lost_samples: int = 3
    """A running pod counts as without a lease after this many ready samples in a row."""
    fences_repeat: bool = False
    """A slot may be given to two pods with one fence: Redis lost what it had counted."""
    without_lease: dict[str, int] = field(default_factory=dict)
    """By running pod, in how many ready samples in a row it had no lease."""
    lease_versions: dict[str, float] = field(default_factory=dict)
    """By pod, the version of its lease in the sample before."""
    claims: Mapping[str, RawClaim] = field(default_factory=dict)
    """By pod, the devices that were claimed for it in the sample before."""
    promises: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By waiting pod, the start that it is promised, and when that was first seen."""
    owed: dict[str, float] = field(default_factory=dict)
    """By waiting pod that fits if no other runs, when all before it must have ended."""
    redis_lost: bool = False
    """Redis lost contents in this round."""
    hostile: frozenset[str] = frozenset()
    """Nodes in whose agents' names somebody else speaks in this round."""
    cannot_work: Mapping[str, float] = field(default_factory=dict)
    """Parts that lack a server which they need, and since when."""

    def saw_pods(self, pods: Iterable[SeenPod], at: float) -> None:
        """Take note of the pods of a sample."""
        for pod in pods:
            if not pod.announced:
                self.announced_after.pop(pod.uid, None)
            else:
                self.announced_after.setdefault(pod.uid, self.pods_seen_at)
            self.pods[pod.uid] = pod
            self.first_seen.setdefault(pod.uid, at)
            self.last_seen[pod.uid] = at
            if pod.node:
                self.bound_at.setdefault(pod.uid, at)

    def saw_leases(self, ledger: RawLedger | None) -> None:
        """Take note of the leases of a sample, before it is judged."""
        for pod, lease in (ledger.leases if ledger else {}).items():
            if lease.state in {"bound", "active"}:
                charged = f"{pod}/{round(lease.created_at * 1000)}"
                self.instance_mib[charged] = sum(s.mib for s in lease.shares if s.layout)

    def saw_ledger(self, ledger: RawLedger | None) -> None:
        """Take note of the versions of the leases of a sample, after it was judged."""
        leases = ledger.leases if ledger and ledger.ready else {}
        self.claims = ledger.claims if ledger and ledger.ready else {}
        self.lease_versions = {pod: lease.version for pod, lease in leases.items()}

    def saw_promise(self, pod: str, at: float | None, seen_at: float, withdrawn_at: float) -> None:
        """Take note of what a waiting pod is promised, after the sample was judged."""
        promised, known_at = self.promises.get(pod, (inf, seen_at))
        is_withdrawn = withdrawn_at >= known_at
        if at is not None and (at <= promised or is_withdrawn):
            self.promises[pod] = (at, known_at if at == promised else seen_at)
        elif is_withdrawn:
            self.promises.pop(pod, None)

    def is_clock_off(self, at: float) -> bool:
        """Whether a part's clock was off shortly before an instant."""
        return self.clock_off_at > at - CLOCK_S

    def gangs(self) -> dict[str, list[SeenPod]]:
        """Return the members of every gang ever seen."""
        by_pod: defaultdict[str, list[SeenPod]] = defaultdict(list)
        for pod in self.pods.values():
            if pod.gang:
                by_pod[pod.gang].append(pod)
        return by_pod

    def about(
        self, check: str, uid: str, text: str, bound_s: float = 0.0, *, counts_from: float = 0.0
    ) -> Finding:
        """Return a finding about a pod."""
        return Finding(
            check=check,
            subject=f"pod {self.name(uid)}",
            text=text,
            bound_s=bound_s,
            pods=frozenset({uid}),
            counts_from=counts_from,
        )

    def name(self, uid: str) -> str:
        """Return a pod's name for a message."""
        pod = self.pods.get(uid)
        return f"{pod.name} ({uid[:8]})" if pod else uid[:13]
