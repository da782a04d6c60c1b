"""Gangs: enough of their pods find a place together, or none is chosen at all."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from services.placer.choice.batch import Chosen
from services.placer.choice.placement import place
from services.placer.index.node_index import Index
from services.placer.mirror.cluster_mirror import Mirror
from services.placer.refusal.quotas import QuotasMet
from shared.model.events.pod_events import PodQueued
from shared.model.ledger import GangEnrollment
from shared.model.names import PodUid
from shared.model.placement import Refusal
from shared.model.request import Gang, GpuRequest, PodRequest

COUNTED = Refusal(reason="its gang is being counted")
"""What is written of a pod until its gang has been decided on."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Pods of a batch that are decided together: those of one gang, or of none."""

    gang: Gang | None
    pods: list[PodQueued]


def units_of(events: Iterable[PodQueued]) -> list[Unit]:
    """Cut a batch into units, the highest priority first.

    A gang comes where the highest of its pods comes; a gang of one pod is none.
    """
    units: list[Unit] = []
    gangs: dict[str, Unit] = {}
    for event in sorted(events, key=lambda event: -event.request.priority):
        gang = event.request.gang
        if gang is None or gang.min_member <= 1:
            if not units or units[-1].gang is not None:
                units.append(Unit(None, []))
            units[-1].pods.append(event)
        elif gang.name in gangs:
            gangs[gang.name].pods.append(event)
        else:
            gangs[gang.name] = Unit(gang, [event])
            units.append(gangs[gang.name])
    return units


@dataclass(frozen=True, slots=True)
class GangDecided:
    """Places for as many pods of a gang as it needs; or for none, and why not for the next one."""

    chosen: list[Chosen]
    fitting: int
    """How many found a place, until one did not."""
    refusal: Refusal | None = None


def decide_gang(
    members: Sequence[PodQueued],
    needed: int,
    mirror: Mirror,
    index: Index,
    draw: Callable[[], float],
    *,
    quotas: QuotasMet,
) -> GangDecided:
    """Place `needed` of the members, counting each as taken in the mirror, or none of them.

    The largest go first, since the small fit between them; if that fails and there are more than
    are needed, the smallest go first.
    """
    first = _decide(
        sorted(members, key=_size, reverse=True), needed, mirror, index, draw, quotas=quotas
    )
    if first.refusal is None or len(members) == needed:
        return first
    second = _decide(sorted(members, key=_size), needed, mirror, index, draw, quotas=quotas)
    return second if second.fitting > first.fitting else first


def too_few(gang: Gang, *, live: int, here: int) -> Refusal:
    """Say that pods of the gang are missing."""
    missing = gang.min_member - live - here
    return Refusal(
        reason=f"{_rule(gang)}; {live + here} of {gang.min_member} pods are here",
        hint=f"create the other {missing}, or lower the gang's minimum",
    )


def lacking(gang: Gang, *, live: int, fitting: int, refusal: Refusal) -> Refusal:
    """Say that only so many of the gang fit, and why the next does not."""
    have = f"{live} of {gang.min_member} hold a lease, {fitting} of the other" if live else fitting
    count = f"{have} {gang.min_member - live}" if live else f"{have} of {gang.min_member}"
    return replace(refusal, reason=f"{_rule(gang)}; {count} fit: {refusal.reason}")


def leaders(members: Iterable[PodQueued]) -> set[PodUid]:
    """Choose to which pods of a gang freed capacity is offered: one for each different request.

    A gang that does not fit can fit only once one of its pods has room where something was freed.
    """
    found: dict[tuple[GpuRequest, ...], PodUid] = {}
    for event in members:
        found.setdefault(event.request.containers, event.pod)
    return set(found.values())


def unwritten(
    members: Iterable[PodQueued],
    muster: GangEnrollment,
    refusal: Refusal,
    leading: Collection[PodUid],
) -> list[PodQueued]:
    """Return those of whom the ledger has not written just this; of the leading, it must know when.

    A gang of a thousand that still does not fit costs no thousand writes.
    """
    known = {
        waiting.queued.pod: (waiting.refusal.reason, waiting.queued.request)
        for waiting in muster.waiting
        if not waiting.receives_offers
    }
    return [
        event
        for event in members
        if event.pod in leading or known.get(event.pod) != (refusal.reason, event.request)
    ]


def _decide(
    members: Iterable[PodQueued],
    needed: int,
    mirror: Mirror,
    index: Index,
    draw: Callable[[], float],
    *,
    quotas: QuotasMet,
) -> GangDecided:
    chosen: list[Chosen] = []
    refused: list[tuple[PodRequest, Refusal]] = []
    for event in members:
        request = event.request
        if refused and request == refused[-1][0]:
            refused.append(refused[-1])
            continue
        answer = quotas.answer(event, lambda allowed: place(allowed, index, draw))
        if isinstance(answer, Refusal):
            refused.append((request, answer))
            continue
        mirror.hold(event.pod, answer[0], request.resources, request.anti_affinity_groups)
        chosen.append((event, answer))
        if len(chosen) == needed:
            return GangDecided(chosen, needed)
    for event, _ in chosen:
        mirror.drop(event.pod)
    hopeful = len(chosen) + sum(not refusal.permanent for _, refusal in refused)
    refusal = replace(refused[0][1], permanent=hopeful < needed)
    return GangDecided([], len(chosen), refusal)


def _size(event: PodQueued) -> tuple[int, ...]:
    """Return what sorts pods by how hard they are to place."""
    app = [need for need in event.request.containers if not need.init]
    whole = sum(_takes_all(need) for need in app)
    return (
        sum(need.gpus for need in app),
        whole,
        sum((need.memory_units or 0) + (need.memory_bytes or 0) for need in app),
        sum(need.memory_percent or 0 for need in app),
        sum(need.cores_percent for need in app),
    )


def _takes_all(need: GpuRequest) -> bool:
    amounts = (need.memory_units, need.memory_percent, need.memory_bytes)
    return need.whole or amounts == (None, None, None)


def _rule(gang: Gang) -> str:
    return f"gang {gang.name} runs with {gang.min_member} pods at once or not at all"
