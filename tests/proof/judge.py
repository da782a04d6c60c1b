"""The judge: every invariant by name, from samples that the product's code had no part in; pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.proof import liveness, preemption, safety, sight
from tests.proof.history import History, Outstanding, Violation
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
    "P1": "a pod is bound or explained within 15 s",
    "P2": "a lease ends within 30 s of its pod, a reservation when it expires",
    "P3": "service resumes within 10 s, 20 s where Redis lost contents",
    "P4": "freed capacity reaches a waiting pod that fits within 2 s",
    "P5": "a gang holds all or nothing",
    "P6": "the ledger reaches the state that Kubernetes and the agents imply",
    "P7": "what cannot work is unready and says why; nothing else is held up",
    "M1": "memory and Redis' keys at the end are as at the beginning",
    "M2": "pods are evicted after notice, for pods of higher priority that wait",
    "M3": "a pod of higher priority that waits gets the room of evictable pods within 20 s",
    "M4": "no request of a service is denied, by roles and admission policies of a cluster",
    "O1": "one bound pod, one trace",
    "O2": "the audit sees what the judge sees",
    "O3": "a refusal has a reason, numbers, and the next thing to try",
}
WATCHING = (safety, liveness, sight, preemption)
AUDITED = frozenset({"P2", "P5", "P6"})
"""What the product's audit has to see as well."""
SLACK_S = 1.0
"""Added to each bound: samples are up to this far apart."""


def checks_of(invariant: str) -> tuple[str, ...]:
    """Return the names of the functions that watch an invariant, with their modules."""
    return tuple(
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in WATCHING
        for name in vars(module)
        if name.startswith(f"{invariant.lower()}_")
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
    resized: set[str] = field(default_factory=set)
    evicted: int = 0

    def count(self, sample: Sample) -> None:
        """Count a sample and what it has."""
        self.samples += 1
        self.of_api += sample.pods is not None
        self.containers |= {grant.pod for grant in sample.grants}
        self.checkpoints |= {grant.pod for grant in sample.agents}
        self.instances |= {grant.pod for grant in sample.grants if grant.instance}
        self.regions |= sample.limits.keys()
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
            f"HAMi-core, {len(self.resized)} of them resized; {self.evicted} pods evicted"
        )


class Judge:
    """Takes samples one after the other; each violation is reported once.

    `patience` multiplies the bounds of liveness, for a machine that has other work to do.
    """

    def __init__(self, patience: float = 1.0) -> None:
        self.patience = patience
        self.history = History()
        self.coverage = Coverage()
        self.violations: list[Violation] = []
        self._reported: set[tuple[str, str]] = set()
        self._since: dict[tuple[str, str], float] = {}
        self.outstanding: tuple[Outstanding, ...] = ()
        """What the latest sample still waited for."""

    def begin_round(self, *, redis_lost: bool, hostile: frozenset[str] = frozenset()) -> None:
        """Say whether Redis loses contents in this round, and which nodes' agents are hostile."""
        self.history.redis_lost, self.history.hostile = redis_lost, hostile
        self.history.without_lease.clear()

    def end_faults(self, at: float) -> None:
        """Say that the last fault ended: bounds count from here."""
        self.history.quiet_since = at
        self._since.clear()

    def observe(self, sample: Sample, *, cannot_work: Mapping[str, float]) -> None:
        """Judge safety, and take note of what is outstanding.

        `cannot_work`: parts that lack a server which they need, and since when.
        """
        history = self.history
        self.coverage.count(sample)
        history.saw_pods((sample.pods or {}).values(), sample.at)
        history.saw_leases(sample.ledger)
        if "clock" in sample.faults:
            history.clock_off_at = sample.at
        for check in safety.CHECKS:
            self.report(check(sample, history))
        self.report(sight.s6_budgets_are_exact(sample, history))
        self.report(sight.p7_a_part_that_cannot_work_is_unready(sample, cannot_work))
        self.report(sight.p7_only_a_hostile_agent_is_distrusted(sample, history))
        self.report(sight.m4_no_request_of_a_service_is_denied(sample))
        self.report(sight.o3_a_refusal_has_reason_numbers_and_advice(sample, history))
        self.report(
            preemption.m2_an_eviction_is_announced_and_for_a_higher_priority(sample, history)
        )
        if sample.pods is not None:
            history.pods_seen_at = sample.at
        if not sample.faults or set(sample.faults) == {"cordon"}:
            self.report(sight.p7_a_cordon_is_obeyed(sample, history))
        found = [each for check in liveness.CHECKS for each in check(sample, history)]
        found += preemption.m3_a_pod_of_higher_priority_is_served_by_evictions(sample, history)
        history.saw_ledger(sample.ledger)
        self.outstanding = tuple(found)
        keys = {(each.check, each.subject) for each in found}
        self._since = {key: self._since.get(key, sample.at) for key in keys}

    def judge_liveness(self, at: float) -> None:
        """Report what has been outstanding for longer than its bound since the faults ended."""
        quiet_since = self.history.quiet_since
        for each in self.outstanding:
            since = max(self._since[each.check, each.subject], quiet_since, each.counts_from)
            if at - since > each.bound_s * self.patience + SLACK_S:
                text = f"{each.text}; for {at - since:.0f} s, bound {each.bound_s:g} s"
                violation = Violation(
                    check=each.check,
                    subject=each.subject,
                    text=text,
                    at=at,
                    since=self._since[each.check, each.subject],
                    pods=each.pods,
                    devices=each.devices,
                )
                self.report((violation,))

    def judge_audit(self, audit: Mapping[str, Any], at: float) -> None:
        """Compare the product's audit with what is outstanding in the ledger."""
        seen = [(each.check, each.subject) for each in self.outstanding if each.check in AUDITED]
        lasting = [
            f"{check} {subject}" for check, subject in seen if self.is_reported(check, subject)
        ]
        self.report(sight.o2_the_audit_sees_what_we_see(audit, lasting, at, settling=bool(seen)))

    def judge_traces(self, spans: Iterable[Mapping[str, Any]], at: float) -> None:
        """Judge the traces of all pods that were bound."""
        self.report(sight.o1_one_pod_one_trace(spans, self.history, at))

    def judge_resources(self, begin: Resources, end: Resources, at: float) -> None:
        """Compare what the parts use at the end with the beginning."""
        self.report(sight.m1_nothing_is_left(begin, end, at))

    def report(self, found: Iterable[Violation]) -> None:
        """Keep each violation, once per invariant and subject."""
        for violation in found:
            key = (violation.check, violation.subject)
            if key not in self._reported:
                self._reported.add(key)
                self.violations.append(violation)

    def is_reported(self, check: str, subject: str) -> bool:
        """Whether a violation of the invariant by the subject was reported."""
        return (check, subject) in self._reported

    def is_settled(self) -> bool:
        """Whether nothing is outstanding but what was reported."""
        return all(self.is_reported(each.check, each.subject) for each in self.outstanding)
