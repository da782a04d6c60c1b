"""The judge: every invariant by name, from samples that the product's code had no part in; pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from tests.proof import liveness, preemption, safety, sight, starts
from tests.proof.history import Finding, History
from tests.proof.observations import Resources, Sample

INVARIANTS: Mapping[str, str] = {
    "S1": "no device is over-committed",
    "S2": "one container, one live lease",
    "S3": "what runs with a device was bound with a lease on that node",
    "S4": "fences only rise",
    "S5": "only a lease grants a device",
    "S6": "budgets are exact",
    "S7": "the limits in the container equal the lease",
    "S8": "a lease lasts while its pod may run",
    "S9": "an agent gives out no more of a device than there is",
    "S11": "a promised start is kept, or withdrawn with an Event; others end in time",
    "P1": "a pod is bound or explained within 15 s",
    "P2": "a lease ends within 30 s of its pod, a reservation when it expires",
    "P3": "service resumes within 10 s, 20 s where Redis lost contents",
    "P4": "freed capacity reaches a waiting pod that fits within 2 s",
    "P5": "a gang holds all or nothing",
    "P6": "the ledger reaches the state that Kubernetes and the agents imply",
    "P7": "what cannot work is unready and says why; nothing else is held up",
    "P8": "no pod fails twice for one disagreement between agent and ledger",
    "P9": "whatever fits an empty cluster starts, if everything before it has a term",
    "M1": "memory and Redis' keys at the end are as at the beginning",
    "M2": "pods are evicted after notice, for pods of higher priority that wait",
    "M3": "a pod of higher priority that waits gets the room of evictable pods within 20 s",
    "M4": "no request of a service is denied, by roles and admission policies of a cluster",
    "O1": "one bound pod, one trace",
    "O2": "the audit sees what the judge sees",
    "O3": "a refusal has a reason, numbers, and the next thing to try",
}
WATCHING = (safety, liveness, sight, preemption, starts)
Check = Callable[[Sample, History], Iterator[Finding]]
AUDITED = frozenset({"P2", "P5", "P6"})
"""What the product's audit has to see as well."""
SLACK_S = 1.0
"""Added to each bound: samples are up to this far apart."""


AT_THE_END = (
    sight.m1_nothing_is_left,
    sight.o1_one_pod_one_trace,
    sight.o2_the_audit_sees_what_we_see,
)
"""These judge no single sample."""


def checks_in(*modules: ModuleType) -> tuple[Check, ...]:
    """Return what judges each sample: functions whose names begin with that of an invariant."""
    named = (
        function
        for module in modules
        for name, function in vars(module).items()
        if name.partition("_")[0].upper() in INVARIANTS
    )
    return tuple(function for function in named if function not in AT_THE_END)


CHECKS = checks_in(*WATCHING)


def checks_of(invariant: str) -> tuple[str, ...]:
    """Return the names of the functions that watch an invariant, with their modules."""
    return tuple(
        f"{check.__module__.rpartition('.')[2]}.{check.__name__}"
        for check in (*CHECKS, *AT_THE_END)
        if check.__name__.startswith(f"{invariant.lower()}_")
    )


@dataclass(slots=True)
class Coverage:
    """What there was to judge: a judge that saw nothing finds nothing."""

    samples: int = 0
    of_api: int = 0
    of_redis: int = 0
    containers: set[str] = field(default_factory=set)
    checkpoints: set[str] = field(default_factory=set)
    """Pods that an agent's checkpoint had."""
    leases: set[str] = field(default_factory=set)
    charges: int = 0
    instances: set[str] = field(default_factory=set)
    """Pods with MIG instances."""
    regions: set[str] = field(default_factory=set)
    """Pods whose container's region was read."""
    driven: set[str] = field(default_factory=set)
    """Pods that a driver has limited."""
    resized: set[str] = field(default_factory=set)
    evicted: int = 0
    promised: set[str] = field(default_factory=set)
    """Pods that were promised when they start."""
    let_in: set[str] = field(default_factory=set)
    """Pods that were let onto claimed devices."""

    def count(self, sample: Sample) -> None:
        """Count a sample and what it has."""
        self.samples += 1
        self.of_api += sample.pods is not None
        self.containers |= {grant.pod for grant in sample.grants}
        self.checkpoints |= {grant.pod for grant in sample.agents}
        self.instances |= {grant.pod for grant in sample.grants if grant.instance}
        self.regions |= sample.limits.keys()
        self.driven |= {uid for uid, _ in sample.driver_limits or ()}
        pods = (sample.pods or {}).values()
        self.resized |= {pod.uid for pod in pods if pod.resized and pod.uid in sample.limits}
        self.evicted = len(sample.evicted)
        if sample.ledger is not None:
            self.of_redis += 1
            self.leases |= sample.ledger.leases.keys()
            self.charges = max(self.charges, len(sample.ledger.charges))

    def __str__(self) -> str:
        return (
            f"{self.samples} samples, {self.of_api} with an API server, "
            f"{self.of_redis} with Redis; "
            f"{len(self.containers)} containers with devices, {len(self.checkpoints)} pods in "
            f"checkpoints, {len(self.leases)} leases, {self.charges} charges; "
            f"{len(self.instances)} pods with MIG instances, {len(self.regions)} with limits of "
            f"HAMi-core, {len(self.resized)} of them resized, {len(self.driven)} with limits of "
            f"the driver; {self.evicted} pods evicted; "
            f"{len(self.promised)} promised a start, {len(self.let_in)} let in before one"
        )


class Judge:
    """Takes samples one after the other; each violation is reported once.

    `patience` multiplies the bounds of liveness, for a machine that has other work to do.
    """

    def __init__(self, patience: float = 1.0) -> None:
        self.patience = patience
        self.history = History()
        self.coverage = Coverage()
        self.violations: list[Finding] = []
        self._reported: set[tuple[str, str]] = set()
        self._since: dict[tuple[str, str], float] = {}
        self.outstanding: tuple[Finding, ...] = ()
        """What the latest sample still waited for."""

    def begin_round(self, *, redis_lost: bool, hostile: frozenset[str] = frozenset()) -> None:
        """Say whether Redis loses contents in this round, and which nodes' agents are hostile."""
        self.history.redis_lost = redis_lost
        self.history.hostile = hostile
        self.history.without_lease.clear()
        self.history.owed.clear()
        if redis_lost:
            self.history.promises.clear()

    def end_faults(self, at: float) -> None:
        """Say that the last fault ended: bounds count from here."""
        self.history.quiet_since = at
        self._since.clear()

    def observe(self, sample: Sample, *, cannot_work: Mapping[str, float]) -> None:
        """Judge safety, and take note of what is outstanding.

        `cannot_work`: parts that lack a server which they need, and since when.
        """
        history = self.history
        history.cannot_work = cannot_work
        self.coverage.count(sample)
        history.saw_pods((sample.pods or {}).values(), sample.at)
        history.saw_leases(sample.ledger)
        if "clock" in sample.faults:
            history.clock_off_at = sample.at
        if sample.ledger is not None:
            let_in = starts.let_in(sample.ledger, history)
            self.coverage.let_in |= {lease.pod for lease, _ in let_in}
        findings = [finding for check in CHECKS for finding in check(sample, history)]
        if sample.pods is not None:
            history.pods_seen_at = sample.at
        history.saw_ledger(sample.ledger)
        for pod in (sample.pods or {}).values():
            withdrawn_at = sample.withdrawn.get(pod.uid, 0.0)
            promised = starts.promised_at(pod.message) if liveness.waits(pod) else None
            history.saw_promise(pod.uid, promised, sample.at, withdrawn_at)
            self.coverage.promised |= {pod.uid} if promised else set()
        self.report((finding for finding in findings if not finding.bound_s), sample.at)
        self.outstanding = tuple(finding for finding in findings if finding.bound_s)
        keys = {(finding.check, finding.subject) for finding in self.outstanding}
        self._since = {key: self._since.get(key, sample.at) for key in keys}

    def judge_liveness(self, at: float) -> None:
        """Report what has been outstanding for longer than its bound since the faults ended."""
        quiet_since = self.history.quiet_since
        for finding in self.outstanding:
            began_at = self._since[finding.check, finding.subject]
            late_s = at - max(began_at, quiet_since, finding.counts_from)
            if late_s > finding.bound_s * self.patience + SLACK_S:
                text = f"{finding.text}; for {late_s:.0f} s, bound {finding.bound_s:g} s"
                self.report((replace(finding, text=text, since=began_at),), at)

    def judge_audit(self, audit: Mapping[str, Any], at: float) -> None:
        """Compare the product's audit with what is outstanding in the ledger."""
        seen = [
            (finding.check, finding.subject)
            for finding in self.outstanding
            if finding.check in AUDITED
        ]
        lasting = [
            f"{check} {subject}" for check, subject in seen if self.is_reported(check, subject)
        ]
        findings = sight.o2_the_audit_sees_what_we_see(audit, lasting, settling=bool(seen))
        self.report(findings, at)

    def judge_traces(self, spans: Iterable[Mapping[str, Any]], at: float) -> None:
        """Judge the traces of all pods that were bound."""
        self.report(sight.o1_one_pod_one_trace(spans, self.history), at)

    def judge_resources(self, begin: Resources, end: Resources, at: float) -> None:
        """Compare what the parts use at the end with the beginning."""
        self.report(sight.m1_nothing_is_left(begin, end), at)

    def report(self, findings: Iterable[Finding], at: float) -> None:
        """Keep each violation, once per invariant and subject."""
        for finding in findings:
            if not self.is_reported(finding.check, finding.subject):
                self._reported.add((finding.check, finding.subject))
                self.violations.append(replace(finding, at=at))

    def is_reported(self, check: str, subject: str) -> bool:
        """Whether a violation of the invariant by the subject was reported."""
        return (check, subject) in self._reported

    def is_settled(self) -> bool:
        """Whether nothing is outstanding but what was reported."""
        return all(self.is_reported(finding.check, finding.subject) for finding in self.outstanding)
