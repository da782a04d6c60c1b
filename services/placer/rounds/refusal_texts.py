"""Refusals of the placer in words, beside those of a pod that fits nowhere; pure."""

from collections.abc import Sequence

from msgspec import structs

from services.placer.rounds.gang_decisions import GangDecision
from shared.model.events.pod_events import PodQueued
from shared.model.requests.placement import Refusal
from shared.model.requests.request import Gang

DEFERRED = Refusal(
    reason="the GPUs that it needs are offered to a pod that comes before it in the queue"
)
GANG_NOT_DECIDED = Refusal(reason="the pods of its gang are being counted")
"""Until its gang has been decided on."""


OTHER_LABEL = "name a label that more nodes share, or prefer it only"
ONE_EACH = "use a claim with ReadWriteMany, or one for each pod"


def too_large_refusal(reason: str) -> Refusal:
    return Refusal(
        reason=f"the pod's lease cannot be stored: {reason}",
        counts=(("RecordTooLarge", 1),),
        hint="use fewer containers that request GPUs, and shorter names and groups",
        permanent=True,
    )


def member_refused(gang: Gang, pod: PodQueued, refusal: Refusal) -> Refusal:
    reason = f"pod {pod.name} of gang {gang.name}: {refusal.reason}"
    return structs.replace(refusal, reason=reason)


def gang_too_small(gang: Gang, *, live: int, waiting: int) -> Refusal:
    missing = gang.min_member - live - waiting
    return Refusal(
        reason=f"{_rule(gang)}; {live + waiting} of {gang.min_member} pods exist",
        hint=f"create {missing} more, or lower the gang's minimum; pods with another "
        "schedulerName count once that scheduler has placed them",
        forming=True,
    )


def with_different_minimums(refusal: Refusal, members: Sequence[PodQueued]) -> Refusal:
    """Name pods with different minimums of their gang, of which the largest counts."""
    pods: dict[int, str] = {}
    for event in members:
        if (gang := event.request.gang) is not None:
            number = gang.min_member + gang.placed_elsewhere
            pods[number] = min(event.name, pods.get(number, event.name))
    if len(pods) < 2:
        return refusal
    least, most = min(pods), max(pods)
    return structs.replace(
        refusal,
        reason=f"{refusal.reason}; min-available is {least} in pod {pods[least]} and {most} in pod "
        f"{pods[most]}: the largest counts",
        hint=f"write the same min-available into all pods of the gang; or {refusal.hint}",
    )


def gang_does_not_fit(
    gang: Gang, *, live: int, decision: GangDecision, refusal: Refusal
) -> Refusal:
    """Return the refusal of a gang, with the reason of its next pod.

    Amounts count those that fit, which hold nothing: commands and page show more as free.
    """
    fitting = decision.fitting
    if live:
        leased = f"{live} of {gang.min_member} have a lease"
        count = f"{leased}, {fitting} of the other {gang.min_member - live}"
    else:
        count = f"{fitting} of {gang.min_member}"
    reason = f"{_rule(gang)}{_shared(decision)}; {count} fit{_rooms(gang, live, decision)}"
    refusal = structs.replace(
        refusal,
        hint=_gang_hint(gang, live, decision, refusal),
        permanent=refusal.permanent or decision.lacking is not None,
        domains=decision.domains,
    )
    if not fitting:
        return structs.replace(refusal, reason=f"{reason}: {refusal.reason}")
    return structs.replace(
        refusal,
        reason=f"{reason}, and beside them: {refusal.reason}",
        nearest_nodes=tuple(
            structs.replace(node, reason=f"{node.reason}, with the {fitting} that fit counted")
            for node in refusal.nearest_nodes
        ),
    )


def _shared(decision: GangDecision) -> str:
    """Say why if no user has named it."""
    if not decision.required:
        return ""
    share = ", all with the same " + " and ".join(decision.required)
    claim = decision.one_node_claim
    return f"{share}, as one node at a time can mount their claim {claim}" if claim else share


def _rooms(gang: Gang, live: int, decision: GangDecision) -> str:
    """Such as ` (r1 has room for 5 of 8)`."""
    if not decision.domains:
        return ""
    first, *others = decision.domains
    texts = [f"{first.domain} has room for {first.room} of {gang.min_member - live}"]
    texts += [f"{other.domain} for {other.room}" for other in others]
    more = decision.further_domains
    texts += [f"{more} more for {decision.domains[-1].room} or fewer"] * bool(more)
    return f" ({', '.join(texts)})"


def _gang_hint(gang: Gang, live: int, decision: GangDecision, refusal: Refusal) -> str:
    runs = live + decision.fitting
    ways = [
        f"lower the gang's minimum to {runs + gang.placed_elsewhere}, as {runs} of its pods have "
        "room now"
    ] * bool(runs)
    if decision.lacking is not None:
        most, least = decision.lacking
        reduced = "request less in each of its pods, or ask an administrator to add nodes"
        pods = "equal pods of the gang"
        if decision.required:
            pods = f"pods of the gang with the same {' and '.join(decision.required)}"
            ways.append(ONE_EACH if decision.one_node_claim else OTHER_LABEL)
        return (
            f"waiting does not help: if no other pod ran, {most} of {least} {pods} "
            f"would fit: {'; or '.join([*ways, reduced])}"
        )
    unsure = ", which may not be enough, as its pods differ" * decision.differs
    ways += [f"wait until other pods have ended{unsure}"] * decision.waits
    return "; or ".join(ways) or f"each pod of the gang needs a change: {refusal.hint}"


def _rule(gang: Gang) -> str:
    beside = f", beside {gang.placed_elsewhere} of other schedulers" * bool(gang.placed_elsewhere)
    return f"gang {gang.name} needs {gang.min_member} pods at once{beside}"
