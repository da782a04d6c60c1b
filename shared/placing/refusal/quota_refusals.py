"""Where a pod can run beside an exceeded quota, or why it waits; pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from shared.model.budgets.quota import QuotaExcess
from shared.model.change import DEADLINE, Change, Hint, Place, words
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import budget_hint
from shared.model.names import Namespace
from shared.model.quantity import duration_text
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import DeviceOrder, NodeTerm, PodRequest
from shared.placing.advice import QuotaChanges
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.refusal.quota_changes import Allowance, Where, changes_elsewhere, changes_within

Result = tuple[Placement, ...] | Refusal

BUDGET = "budget"
"""In place of a measure: the budget is exhausted."""

RUN_TIME = "runTime"
"""In place of a measure: the pod may run for too long."""

PACKED = DeviceOrder.BINPACK
"""Of pods that may use few devices."""

_MEASURE_NAMES = {
    "cores": "GPUs' cores",
    "milliGPU": "GPUs",
    "memoryMiB": "MiB of GPU memory",
    "cards": "GPU cards",
}


def narrowed(request: PodRequest, excesses: Iterable[QuotaExcess]) -> PodRequest | None:
    """Return None if the quota refuses everything.

    Where no more devices may be used, containers share those that the namespace uses, where they
    can.
    """
    for excess in excesses:
        if excess.names_places:
            request = _exclude(request, excess)
        elif excess.measure == "cards" and excess.values:
            allowed = request.selection.uuids
            uuids = tuple(uuid for uuid in excess.values if not allowed or uuid in allowed)
            if not uuids or uuids == allowed:
                return None
            request = structs.replace(
                request, selection=structs.replace(request.selection, uuids=uuids)
            )
        elif excess.measure == "cards" and _may_be_packed(request) and excess.limit:
            request = structs.replace(request, device_order=PACKED)
        else:
            return None
    return request


def _may_be_packed(request: PodRequest) -> bool:
    return len(request.containers) > 1 and request.device_order is not PACKED


def _exclude(request: PodRequest, excess: QuotaExcess) -> PodRequest:
    if excess.label:
        operator = "NotIn" if excess.model else "In"
        term = NodeTerm(key=excess.label, operator=operator, values=excess.values)
        required = tuple((*terms, term) for terms in request.node_requirements.required or ((),))
        return structs.replace(
            request, node_requirements=structs.replace(request.node_requirements, required=required)
        )
    chosen = request.selection
    if excess.model:
        chosen = structs.replace(chosen, not_types=(*chosen.not_types, *excess.values))
    else:
        chosen = structs.replace(chosen, types=_intersect_types(chosen.types, excess.values))
    return structs.replace(request, selection=chosen)


def _intersect_types(requested: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """A model that contains a returned part contains one of each tuple."""
    if not requested:
        return allowed
    pairs = [(a, b) for a in requested for b in allowed]
    within = [a if b.lower() in a.lower() else b for a, b in pairs if _overlap(a, b)]
    return tuple(dict.fromkeys(within)) or ("\n",)


def _overlap(name: str, other: str) -> bool:
    name, other = name.lower(), other.lower()
    return name in other or other in name


class QuotaRefusals:
    """Pods of a gang share an entry."""

    def __init__(self) -> None:
        self._excesses: dict[str, tuple[int, tuple[QuotaExcess, ...]]] = {}
        """By pod or gang, the capacity number of the first refusal, and what was exceeded."""

    def clear(self) -> None:
        self._excesses.clear()

    def add(self, event: PodQueued, excesses: tuple[QuotaExcess, ...], capacity: int) -> None:
        """`capacity` is what the mirror had reached when the refusal was decided."""
        if excesses:
            key = _key(event)
            since, earlier = self._excesses.get(key, (capacity, ()))
            self._excesses[key] = (min(since, capacity), earlier + excesses)

    def forget(self, events: Iterable[PodQueued]) -> None:
        for event in events:
            self._excesses.pop(_key(event), None)

    def has_refused(self, event: PodQueued) -> bool:
        """Return whether the ledger has refused the pod, or its gang, by a quota in this batch."""
        return bool(self._excesses) and _key(event) in self._excesses

    def place_within(
        self,
        event: PodQueued,
        place: Callable[[PodRequest], Result],
        index: NodeIndex,
        where: Where,
    ) -> Result:
        excesses = self._excesses[_key(event)][1]
        allowed = narrowed(event.request, excesses)
        pod = PodOnNodes(event.request, index, where)
        if allowed is None:
            return over_quota(event.namespace, excesses, None, pod)
        result = place(allowed)
        if isinstance(result, Refusal):
            return over_quota(event.namespace, excesses, result, pod)
        return result

    def decided_at(self, event: PodQueued, capacity: int) -> int:
        return min(capacity, self._excesses.get(_key(event), (capacity, ()))[0])


def _key(event: PodQueued) -> str:
    gang = event.request.gang
    return f"gang {gang.name}" if gang and gang.decided_as_one else event.pod


@dataclass(frozen=True, slots=True)
class PodOnNodes:
    request: PodRequest
    index: NodeIndex
    where: Where

    @property
    def gang_size(self) -> int:
        """So many pods have to be within the quota together."""
        gang = self.request.gang
        return gang.min_member if gang and gang.decided_as_one else 1

    def room_within(self, excesses: Iterable[QuotaExcess]) -> QuotaChanges:
        allowed = narrowed(self.request, excesses)
        explanation = self.index.explanations.get(placement_key(allowed)) if allowed else None
        if explanation is None or not explanation.advice.waiting:
            return QuotaChanges()
        advice = explanation.advice
        of_amounts = all(
            change.place is Place.RESOURCE and change.value for change in advice.changes
        )
        return QuotaChanges(advice.changes, advice.node) if of_amounts else QuotaChanges()

    def changes_within(
        self,
        amounts: Sequence[QuotaExcess],
        places: Sequence[QuotaExcess],
        most: Callable[[QuotaExcess], int],
    ) -> tuple[Change, ...]:
        """The pod, or each of its gang, takes its part of `most`."""
        request = narrowed(self.request, places) or self.request
        if any(excess.measure == "cards" for excess in amounts):
            request = structs.replace(request, device_order=PACKED)
        allowances = [Allowance.of(excess, most(excess) // self.gang_size) for excess in amounts]
        allowed = tuple(dict.fromkeys(allowances))
        return changes_within(request, allowed, self.index, self.where).changes


def over_quota(
    namespace: Namespace,
    excesses: Iterable[QuotaExcess],
    other_refusal: Refusal | None,
    pod: PodOnNodes | None = None,
) -> Refusal:
    """Return a refusal that names the quota.

    `other_refusal` is why the pod does not fit where the quota allows it; capacity freed there is
    offered to it. Without a `pod`, as for claims, the hint changes no manifest.
    """
    excesses = tuple(excesses)
    if any(excess.measure == BUDGET for excess in excesses):
        return no_budget(namespace)
    if too_long := _too_long_run(excesses):
        return _too_long(namespace, too_long)
    reasons = list(dict.fromkeys(_reason(excess) for excess in excesses))
    reason = f"the GPU quota of namespace {namespace} blocks the pod: {'; '.join(reasons)}"
    hint = quota_hint(namespace, excesses, other_refusal, pod).text
    if other_refusal is None:
        return Refusal(
            reason=reason,
            counts=(("ExceedsGPUQuota", 1),),
            hint=hint,
            permanent=True,
            quota=namespace,
        )
    return structs.replace(
        other_refusal,
        reason=f"{reason}; elsewhere {other_refusal.reason}",
        counts=(("ExceedsGPUQuota", 1), *other_refusal.counts),
        hint=hint,
        quota=namespace,
    )


def _too_long_run(excesses: Iterable[QuotaExcess]) -> QuotaExcess | None:
    return next((excess for excess in excesses if excess.measure == RUN_TIME), None)


def quota_hint(
    namespace: Namespace,
    excesses: Iterable[QuotaExcess],
    other_refusal: Refusal | None,
    pod: PodOnNodes | None = None,
) -> Hint:
    excesses = tuple(excesses)
    if too_long := _too_long_run(excesses):
        return _run_time_hint(too_long)
    administrator = f"ask an administrator to raise its GPUQuota (kubectl get gpuquota {namespace})"
    places = tuple(excess for excess in excesses if excess.measure in {"pool", "model"})
    amounts = tuple(excess for excess in excesses if excess not in places)
    if other_refusal is None and amounts:
        return _hint_about_amounts(namespace, amounts, places, administrator, pod)
    elsewhere = QuotaChanges()
    if pod is not None and any(excess.names_places for excess in excesses):
        elsewhere = changes_elsewhere(pod.request, excesses, pod.index)
    if other_refusal is not None and not other_refusal.permanent and not elsewhere.changes:
        return _hint_about_places(excesses, administrator, pod)
    if amounts and not places:
        hint = _hint_about_amounts(namespace, amounts, places, administrator, pod)
        if hint.changes or not elsewhere.changes or not any(map(_never_met, amounts)):
            return _or_elsewhere(hint, elsewhere)
    if not elsewhere.changes:
        return Hint(f"waiting does not help: {administrator}")
    there = f"{words(elsewhere.changes)}, as the quota allows node {elsewhere.node}"
    return Hint(f"waiting does not help: {there}; or {administrator}", elsewhere.changes)


def _or_elsewhere(hint: Hint, elsewhere: QuotaChanges) -> Hint:
    """How much the quota leaves of another model is not known."""
    if hint.changes or not elsewhere.changes:
        return hint
    there = f"if the quota leaves enough of the GPUs of node {elsewhere.node}"
    return Hint(f"{hint.text}; or {words(elsewhere.changes)}, {there}")


def _hint_about_places(
    excesses: tuple[QuotaExcess, ...], administrator: str, pod: PodOnNodes | None
) -> Hint:
    wait = f"wait until pods have ended where the quota allows the pod, or {administrator}"
    room = QuotaChanges() if pod is None else pod.room_within(excesses)
    if not room.changes:
        return Hint(wait)
    now = f"{words(room.changes)}, as node {room.node} has room for it now"
    return Hint(f"{now}; or {wait}", room.changes)


def _hint_about_amounts(
    namespace: Namespace,
    amounts: tuple[QuotaExcess, ...],
    places: tuple[QuotaExcess, ...],
    administrator: str,
    pod: PodOnNodes | None,
) -> Hint:
    ends = f"wait until other pods of namespace {namespace} have ended"
    cards = next((excess for excess in amounts if excess.measure == "cards" and excess.used), None)
    if cards is not None:  # those that the namespace holds are not among the requested ones
        ends += f", if the pod needs at most {cards.limit} GPU cards"
    now = _smaller(amounts, places, _left, pod)
    if not any(map(_never_met, amounts)):
        less = [now.text] * bool(now.text)
        return Hint("; or ".join([*less, ends, administrator]), now.changes)
    if now.text:
        return Hint(f"waiting does not help: {now.text}; or {administrator}", now.changes)
    most = _smaller(amounts, places, lambda excess: excess.limit, pod)
    if not most.text:
        least = ""
        if pod is not None and all(excess.limit for excess in amounts):
            least = f"in the words of {pod.request.dialect} the pod cannot request so little: "
        return Hint(f"waiting does not help: {least}{administrator}")
    text = f"waiting alone does not help: {most.text}, and {ends}; or {administrator}"
    return Hint(text, most.changes)


def _smaller(
    amounts: tuple[QuotaExcess, ...],
    places: tuple[QuotaExcess, ...],
    most: Callable[[QuotaExcess], int],
    pod: PodOnNodes | None,
) -> Hint:
    """Return no text if nothing so small can be requested."""
    if not all(map(most, amounts)):
        return Hint("")
    in_gang = pod is not None and pod.gang_size > 1
    listed = dict.fromkeys(_at_most(excess, most(excess), in_gang=in_gang) for excess in amounts)
    text = f"request {' and '.join(listed)}"
    if pod is None:
        return Hint(text)
    changes = pod.changes_within(amounts, places, most)
    return Hint(f"{text}: {words(changes)}", changes) if changes else Hint("")


def no_budget(namespace: Namespace) -> Refusal:
    return Refusal(
        reason=f"the GPU budget of namespace {namespace} is used up or invalid: new pods wait",
        counts=(("BudgetExhausted", 1),),
        hint=budget_hint(namespace),
        permanent=True,
        quota=namespace,
    )


def _too_long(namespace: Namespace, excess: QuotaExcess) -> Refusal:
    """Refuse a pod that admission has not seen, or before the quota was lowered."""
    given = f"has {duration_text(excess.requested)}" if excess.requested else "has none"
    return Refusal(
        reason=f"the GPU quota of namespace {namespace} allows a maximum run time of "
        f"{duration_text(excess.limit)} at most, and the pod {given}",
        counts=(("ExceedsGPUQuota", 1),),
        hint=_run_time_hint(excess).text,
        permanent=True,
        quota=namespace,
    )


def _run_time_hint(excess: QuotaExcess) -> Hint:
    return Hint(
        f"waiting does not help: set {DEADLINE} to {excess.limit} or less, also in the pod that "
        "waits: kubectl patch pod NAME --patch "
        f'\'{{"spec":{{"activeDeadlineSeconds":{excess.limit}}}}}\'',
        (Change(Place.FIELD, DEADLINE, str(excess.limit)),),
    )


def _never_met(excess: QuotaExcess) -> bool:
    """Return whether the quota refuses the pod, or its gang, even alone."""
    return excess.requested + excess.by_gang > excess.limit


def _left(excess: QuotaExcess) -> int:
    return max(0, excess.limit - excess.used + excess.by_gang)


def _at_most(excess: QuotaExcess, amount: int, *, in_gang: bool) -> str:
    of_model = f" of model {excess.model}" if excess.model else ""
    whole = "in all pods of the gang" if in_gang or excess.by_gang else "in the whole pod"
    return f"at most {measured(excess.measure, amount)}{of_model} {whole}"


def _reason(excess: QuotaExcess) -> str:
    listed = ", ".join(excess.values)
    if excess.measure == "pool":
        return f"it allows only nodes with label {excess.label} of {listed}"
    if excess.measure == "model":
        return f"it allows only GPUs of model {listed}"
    of_model = f" of model {excess.model}" if excess.model else ""
    together = " by pods of the gang" if excess.by_gang else ""
    used = excess.used - excess.by_gang
    requested = excess.requested + excess.by_gang
    used_text, wanted = (_amount(excess.measure, n) for n in (used, requested))
    allowed = f"it allows {measured(excess.measure, excess.limit)}{of_model}"
    return f"{allowed}, {used_text} are used and {wanted} requested{together}"


def measured(measure: str, number: int) -> str:
    """Return an amount of a quota with its unit.

    >>> measured("milliGPU", 500), measured("memoryMiB", 500)
    ('0.5 GPUs', '500 MiB of GPU memory')
    """
    return f"{_amount(measure, number)} {_MEASURE_NAMES[measure]}"


def _amount(measure: str, number: int) -> str:
    return f"{number / 1000:g}" if measure in {"cores", "milliGPU"} else str(number)
