"""What happened, in order, and the smallest part of it that tells a violation's story; pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.proof.history import Violation
from tests.proof.observations import RawLease, Sample, SeenPod

FAULTS_BEFORE_S = 30.0
ALIKE_S = 60.0
"""Violations of one invariant within this time are told as one story."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignEvent:
    """One thing that was done, or that changed between two samples."""

    at: float
    text: str
    pods: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()
    fault: bool = False
    """A fault began or ended: it belongs to every story of its time."""


def changes(before: Sample | None, sample: Sample) -> Iterator[CampaignEvent]:
    """Return what changed in the pods, the containers and the ledger since the sample before."""
    yield from _pod_changes(before, sample)
    yield from _container_changes(before, sample)
    yield from _ledger_changes(before, sample)


def _pod_changes(before: Sample | None, sample: Sample) -> Iterator[CampaignEvent]:
    if sample.pods is None:
        return
    known = (before.pods if before else None) or {}
    for uid, pod in sample.pods.items():
        earlier = known.get(uid)
        if text := _pod_change(earlier, pod):
            yield _event(sample, uid, f"pod {pod.name} ({uid[:8]}) {text}", pod.devices)
    for uid, pod in known.items():
        if uid not in sample.pods:
            yield _event(sample, uid, f"pod {pod.name} ({uid[:8]}) is gone", pod.devices)


def _pod_change(earlier: SeenPod | None, pod: SeenPod) -> str:
    parts = []
    if earlier is None:
        parts.append(f"appears, {pod.want}")
    if pod.node and not (earlier and earlier.node):
        parts.append(f"is bound to {pod.node}")
    if pod.phase != (earlier.phase if earlier else "Pending"):
        parts.append(f"is {pod.phase}")
    if pod.deleted and not (earlier and earlier.deleted):
        parts.append("is being deleted")
    if pod.message != (earlier.message if earlier else "") and not pod.node:
        parts.append(f"waits: {pod.message!r}")
    return ", ".join(parts)


def _container_changes(before: Sample | None, sample: Sample) -> Iterator[CampaignEvent]:
    known = set(before.grants) if before else set()
    for grant in sample.grants:
        if grant not in known:
            what = f"{grant.mib} MiB {grant.cores} % of {grant.device} on {grant.node}"
            text = f"container of {grant.pod[:8]} runs with {what}"
            yield _event(sample, grant.pod, text, (grant.device,))


def _ledger_changes(before: Sample | None, sample: Sample) -> Iterator[CampaignEvent]:
    if sample.ledger is None:
        return
    ledger, earlier = sample.ledger, before.ledger if before else None
    if earlier and (ledger.ready, ledger.generation) != (earlier.ready, earlier.generation):
        state = "ready" if ledger.ready else "not ready"
        text = f"ledger generation {ledger.generation[:8] or 'none'} is {state}"
        yield CampaignEvent(at=sample.at, text=text, fault=True)
    known = earlier.leases if earlier else {}
    for uid, lease in ledger.leases.items():
        if _lease_text(lease) != _lease_text(known.get(uid)):
            devices = tuple(share.device for share in lease.shares)
            yield _event(sample, uid, f"lease of {uid[:8]} is {_lease_text(lease)}", devices)
    for uid, lease in known.items():
        if uid not in ledger.leases:
            devices = tuple(share.device for share in lease.shares)
            yield _event(sample, uid, f"lease of {uid[:8]} is gone", devices)


def _lease_text(lease: RawLease | None) -> str:
    if lease is None:
        return ""
    shares = ", ".join(
        f"{share.device} {share.mib} MiB {share.cores} % slot {share.slot} fence {share.fence}"
        for share in lease.shares
    )
    return f"{lease.state} on {lease.node}: {shares}"


def _event(sample: Sample, uid: str, text: str, devices: Sequence[str]) -> CampaignEvent:
    pods = frozenset({uid})
    return CampaignEvent(at=sample.at, text=text, pods=pods, devices=frozenset(devices))


def story_of(violation: Violation, events: Sequence[CampaignEvent]) -> tuple[CampaignEvent, ...]:
    """Return the events of the violation's pods, and the faults from shortly before it began.

    A device's story has the pods that were on it when the violation was seen.
    """
    faults_from = (violation.since or violation.at) - FAULTS_BEFORE_S
    return tuple(
        event
        for event in sorted(events, key=lambda each: each.at)
        if event.at <= violation.at
        and (event.pods & violation.pods or (event.fault and event.at >= faults_from))
    )


def stories(
    violations: Sequence[Violation], events: Sequence[CampaignEvent], began_at: float
) -> Iterator[str]:
    """Return the violations as text, those of one invariant and time with the first one's story."""
    groups: list[list[Violation]] = []
    for violation in violations:
        alike = next((one for one in groups[::-1] if one[0].check == violation.check), None)
        if alike is not None and violation.at - alike[0].at < ALIKE_S:
            alike.append(violation)
        else:
            groups.append([violation])
    for first, *others in groups:
        lines = [_line(event.at, event.text, began_at) for event in story_of(first, events)]
        heads = [f"{one.check} {one.subject}: {one.text}" for one in (first, *others)]
        seen = _line(first.at, "the first of these is seen" if others else "seen", began_at)
        yield "\n".join((*heads, *lines, seen))


def _line(at: float, text: str, began_at: float) -> str:
    return f"  {at - began_at:8.2f} s  {text}"
