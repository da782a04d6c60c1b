"""What happened, in order, and the smallest part of it that tells a violation's story; pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.proof.history import Finding
from tests.proof.observations import Sample

FAULTS_BEFORE_S = 30.0
ALIKE_S = 60.0
"""Violations of one invariant within this time are told as one story."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignEvent:
    """One thing that was done, or that changed between two samples."""

    at: float
    text: str
    pods: frozenset[str] = frozenset()
    fault: bool = False
    """A fault began or ended: it belongs to every story of its time."""


def changes(before: Sample | None, sample: Sample) -> Iterator[CampaignEvent]:
    """Return what changed in the pods, the containers and the ledger since the sample before."""
    ledger = sample.ledger
    earlier = before.ledger if before else None
    if (
        ledger
        and earlier
        and (ledger.ready, ledger.generation) != (earlier.ready, earlier.generation)
    ):
        state = "ready" if ledger.ready else "not ready"
        text = f"ledger generation {ledger.generation[:8] or 'none'} is {state}"
        yield CampaignEvent(at=sample.at, text=text, fault=True)
    details = dict(_seen(before)) if before else {}
    now = dict(_seen(sample))
    unread = {what for what, part in (("pod", sample.pods), ("lease", ledger)) if part is None}
    for key in details | now:
        state = now.get(key, "gone")
        if key[0] not in unread and state != details.get(key):
            text = f"{key[0]} of {key[1][:8]} is {state}"
            yield CampaignEvent(at=sample.at, text=text, pods=frozenset({key[1]}))


def _seen(sample: Sample) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the pods, containers and leases, each by its pod, with their states."""
    for uid, pod in (sample.pods or {}).items():
        where = f"on {pod.node}" if pod.node else f"waits: {pod.message!r}"
        ending = ", being deleted" if pod.deleted else ""
        yield ("pod", uid), f"{pod.name}, {pod.want}, {pod.phase} {where}{ending}"
    for grant in sample.grants:
        given = f"given {grant.mib} MiB {grant.cores} % on {grant.node}"
        yield (f"container with {grant.device}", grant.pod), given
    for uid, lease in (sample.ledger.leases if sample.ledger else {}).items():
        shares = ", ".join(
            f"{share.device} {share.mib} MiB {share.cores} % slot {share.slot} fence {share.fence}"
            for share in lease.shares
        )
        yield ("lease", uid), f"{lease.state} on {lease.node}: {shares}"


def story_of(violation: Finding, events: Sequence[CampaignEvent]) -> tuple[CampaignEvent, ...]:
    """Return the events of the violation's pods, and the faults from shortly before it began.

    A device's story has the pods that were on it when the violation was seen.
    """
    faults_from = (violation.since or violation.at) - FAULTS_BEFORE_S
    return tuple(
        event
        for event in sorted(events, key=lambda entry: entry.at)
        if event.at <= violation.at
        and (event.pods & violation.pods or (event.fault and event.at >= faults_from))
    )


def stories(
    violations: Sequence[Finding], events: Sequence[CampaignEvent], began_at: float
) -> Iterator[str]:
    """Return the violations as text, those of one invariant and time with the first one's story."""
    groups: list[list[Finding]] = []
    for violation in violations:
        alike = next((group for group in groups[::-1] if group[0].check == violation.check), None)
        if alike is not None and violation.at - alike[0].at < ALIKE_S:
            alike.append(violation)
        else:
            groups.append([violation])
    for first, *others in groups:
        lines = [_line(event.at, event.text, began_at) for event in story_of(first, events)]
        heads = [
            f"{violation.check} {violation.subject}: {violation.text}"
            for violation in (first, *others)
        ]
        seen = _line(first.at, "the first of these is seen" if others else "seen", began_at)
        yield "\n".join((*heads, *lines, seen))


def _line(at: float, text: str, began_at: float) -> str:
    return f"  {at - began_at:8.2f} s  {text}"
