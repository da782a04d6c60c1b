"""What the ledger's refusals for a quota mean for a pod: where else it may go, or why it waits."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from shared.model.events.pod_events import PodQueued
from shared.model.names import Namespace
from shared.model.placement import Placement, Refusal
from shared.model.quota import QuotaExcess
from shared.model.request import NodeTerm, PodRequest

Answer = tuple[Placement, ...] | Refusal

BUDGET = "budget"
"""In place of a measure: nothing may start, whatever is asked for."""

_WORDS = {
    "cores": "GPUs' cores",
    "milliGPU": "GPUs",
    "memoryMiB": "MiB of GPU memory",
    "cards": "GPU cards",
}


def narrowed(request: PodRequest, found: Iterable[QuotaExcess]) -> PodRequest | None:
    """Return the request without what the quota refuses; None: it refuses everything.

    Where the namespace may hold no further card, those that it holds are left.
    """
    for excess in found:
        if excess.model or excess.measure in {"pool", "model"}:
            request = _elsewhere(request, excess)
        elif excess.measure == "cards" and excess.values:
            known = request.selection.uuids
            uuids = tuple(each for each in excess.values if not known or each in known)
            if not uuids or uuids == known:
                return None
            request = replace(request, selection=replace(request.selection, uuids=uuids))
        else:
            return None
    return request


def _elsewhere(request: PodRequest, excess: QuotaExcess) -> PodRequest:
    if excess.label:
        operator = "NotIn" if excess.model else "In"
        term = NodeTerm(key=excess.label, operator=operator, values=excess.values)
        required = tuple((*each, term) for each in request.node_requirements.required or ((),))
        return replace(
            request, node_requirements=replace(request.node_requirements, required=required)
        )
    chosen = request.selection
    if excess.model:
        chosen = replace(chosen, not_types=(*chosen.not_types, *excess.values))
    else:
        chosen = replace(chosen, types=_both(chosen.types, excess.values))
    return replace(request, selection=chosen)


def _both(asked: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Return names such that a model with one of them has one of each."""
    if not asked:
        return allowed
    pairs = [(a, b) for a in asked for b in allowed]
    within = [a if b.lower() in a.lower() else b for a, b in pairs if _meet(a, b)]
    return tuple(dict.fromkeys(within)) or ("\n",)


def _meet(one: str, other: str) -> bool:
    one, other = one.lower(), other.lower()
    return one in other or other in one


class QuotasMet:
    """What quotas refused while one batch is decided, by pod; the pods of a gang share it."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, tuple[QuotaExcess, ...]]] = {}

    def clear(self) -> None:
        """Forget everything: a batch begins."""
        self._found.clear()

    def learn(self, event: PodQueued, found: tuple[QuotaExcess, ...], capacity: int) -> None:
        """Note what the ledger refused; it was asked when the mirror had reached `capacity`."""
        if found:
            since, known = self._found.get(_key(event), (capacity, ()))
            self._found[_key(event)] = (min(since, capacity), known + found)

    def forget(self, events: Iterable[PodQueued]) -> None:
        """Ask the ledger anew for these."""
        for event in events:
            self._found.pop(_key(event), None)

    def answer(self, event: PodQueued, place: Callable[[PodRequest], Answer]) -> Answer:
        """Have the pod placed where its quota allows it, or say that it waits for the quota."""
        if not self._found or _key(event) not in self._found:
            return place(event.request)
        found = self._found[_key(event)][1]
        left = narrowed(event.request, found)
        if left is None:
            return over_quota(event.namespace, found, None)
        answer = place(left)
        if isinstance(answer, Refusal):
            return over_quota(event.namespace, found, answer)
        return answer

    def decided_at(self, event: PodQueued, capacity: int) -> int:
        """Return the capacity number of the state on which the verdict rests."""
        return min(capacity, self._found.get(_key(event), (capacity, ()))[0])


def _key(event: PodQueued) -> str:
    gang = event.request.gang
    return f"gang {gang.name}" if gang and gang.min_member > 1 else event.pod


def over_quota(
    namespace: Namespace, found: Iterable[QuotaExcess], beyond: Refusal | None
) -> Refusal:
    """Say what the quota allows, what is held and what was asked, and what is beyond the quota.

    `beyond` is why nodes that the quota allows cannot take the pod; where there are such, what is
    freed on them is offered to it as to any other.
    """
    found = tuple(found)
    if any(excess.measure == BUDGET for excess in found):
        return no_budget(namespace)
    told = list(dict.fromkeys(_said(excess) for excess in found))
    reason = f"the GPU quota of namespace {namespace} is in the way: {'; '.join(told)}"
    hint = (
        f"wait until a pod of namespace {namespace} ends, or raise its GPUQuota "
        f"(kubectl get gpuquota {namespace})"
    )
    if beyond is None:
        return Refusal(
            reason=reason,
            counts=(("ExceedsGPUQuota", 1),),
            hint=hint,
            permanent=True,
            quota=namespace,
        )
    return replace(
        beyond,
        reason=f"{reason}; elsewhere {beyond.reason}",
        counts=(("ExceedsGPUQuota", 1), *beyond.counts),
        hint=hint,
        quota=namespace,
    )


def no_budget(namespace: Namespace) -> Refusal:
    """Say that the namespace's budget keeps new pods waiting."""
    return Refusal(
        reason=f"namespace {namespace} has used up its GPU time, and its budget keeps new pods "
        "waiting",
        counts=(("BudgetExhausted", 1),),
        hint=f"wait for its next window, or have more granted; `leasehold budget {namespace}` "
        "shows when",
        permanent=True,
        quota=namespace,
    )


def _said(excess: QuotaExcess) -> str:
    listed = ", ".join(excess.values)
    if excess.measure == "pool":
        return f"it allows only nodes with label {excess.label} of {listed}"
    if excess.measure == "model":
        return f"it allows only GPUs of model {listed}"
    of_model = f" of model {excess.model}" if excess.model else ""
    limit, held, asked = (
        _amount(excess.measure, n) for n in (excess.limit, excess.held, excess.asked)
    )
    what = _WORDS[excess.measure]
    return f"it allows {limit} {what}{of_model}, {held} are held and {asked} asked for"


def _amount(measure: str, number: int) -> str:
    return f"{number / 1000:g}" if measure in {"cores", "milliGPU"} else str(number)
