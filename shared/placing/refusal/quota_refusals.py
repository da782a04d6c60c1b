"""Effects of exceeded quotas: where else a pod can run, or why it waits; pure."""

from collections.abc import Callable, Iterable

from msgspec import structs

from shared.model.budgets.quota import QuotaExcess
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import budget_hint
from shared.model.names import Namespace
from shared.model.quantity import duration_text
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import NodeTerm, PodRequest

Result = tuple[Placement, ...] | Refusal

BUDGET = "budget"
"""In place of a measure: the budget is exhausted, and no pod of the namespace may start."""

RUN_TIME = "runTime"
"""In place of a measure: the pod may run for longer than any of the namespace's may."""

_MEASURE_NAMES = {
    "cores": "GPUs' cores",
    "milliGPU": "GPUs",
    "memoryMiB": "MiB of GPU memory",
    "cards": "GPU cards",
}


def narrowed(request: PodRequest, excesses: Iterable[QuotaExcess]) -> PodRequest | None:
    """Return the request without what the quota refuses, or None if it refuses everything.

    If the namespace may use no more devices, the request is limited to those that it uses.
    """
    for excess in excesses:
        if excess.model or excess.measure in {"pool", "model"}:
            request = _exclude(request, excess)
        elif excess.measure == "cards" and excess.values:
            allowed = request.selection.uuids
            uuids = tuple(uuid for uuid in excess.values if not allowed or uuid in allowed)
            if not uuids or uuids == allowed:
                return None
            request = structs.replace(
                request, selection=structs.replace(request.selection, uuids=uuids)
            )
        else:
            return None
    return request


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
    """Return parts of names; a model that contains one contains one of each tuple."""
    if not requested:
        return allowed
    pairs = [(a, b) for a in requested for b in allowed]
    within = [a if b.lower() in a.lower() else b for a, b in pairs if _overlap(a, b)]
    return tuple(dict.fromkeys(within)) or ("\n",)


def _overlap(name: str, other: str) -> bool:
    name, other = name.lower(), other.lower()
    return name in other or other in name


class QuotaRefusals:
    """Refusals by quotas in one batch, by pod; pods of a gang share an entry."""

    def __init__(self) -> None:
        self._excesses: dict[str, tuple[int, tuple[QuotaExcess, ...]]] = {}
        """By pod or gang, the capacity number of the first refusal, and what was exceeded."""

    def clear(self) -> None:
        self._excesses.clear()

    def add(self, event: PodQueued, excesses: tuple[QuotaExcess, ...], capacity: int) -> None:
        """Add the ledger's refusal, decided when the mirror had reached `capacity`."""
        if excesses:
            key = _key(event)
            since, earlier = self._excesses.get(key, (capacity, ()))
            self._excesses[key] = (min(since, capacity), earlier + excesses)

    def forget(self, events: Iterable[PodQueued]) -> None:
        for event in events:
            self._excesses.pop(_key(event), None)

    def place_within(self, event: PodQueued, place: Callable[[PodRequest], Result]) -> Result:
        """Place the pod where its quota allows it, or return a refusal that names the quota."""
        if not self._excesses or _key(event) not in self._excesses:
            return place(event.request)
        excesses = self._excesses[_key(event)][1]
        allowed = narrowed(event.request, excesses)
        if allowed is None:
            return over_quota(event.namespace, excesses, None)
        result = place(allowed)
        if isinstance(result, Refusal):
            return over_quota(event.namespace, excesses, result)
        return result

    def decided_at(self, event: PodQueued, capacity: int) -> int:
        return min(capacity, self._excesses.get(_key(event), (capacity, ()))[0])


def _key(event: PodQueued) -> str:
    gang = event.request.gang
    return f"gang {gang.name}" if gang and gang.decided_as_one else event.pod


def over_quota(
    namespace: Namespace, excesses: Iterable[QuotaExcess], other_refusal: Refusal | None
) -> Refusal:
    """Return a refusal with what the quota allows, what is used and what is requested.

    `other_refusal` is why the pod does not fit where the quota allows it, if it allows it anywhere;
    capacity freed there is offered to the pod as to any other.
    """
    excesses = tuple(excesses)
    if any(excess.measure == BUDGET for excess in excesses):
        return no_budget(namespace)
    if too_long := next((excess for excess in excesses if excess.measure == RUN_TIME), None):
        return _too_long(namespace, too_long)
    reasons = list(dict.fromkeys(_reason(excess) for excess in excesses))
    reason = f"the GPU quota of namespace {namespace} blocks the pod: {'; '.join(reasons)}"
    hint = _hint(namespace, excesses, other_refusal)
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


def _hint(
    namespace: Namespace, excesses: tuple[QuotaExcess, ...], other_refusal: Refusal | None
) -> str:
    """Return what the pod's author can do, and what else an administrator can."""
    administrator = f"ask an administrator to raise its GPUQuota (kubectl get gpuquota {namespace})"
    ends = f"wait until other pods of namespace {namespace} have ended"
    amounts = [excess for excess in excesses if excess.measure not in {"pool", "model"}]
    cards = next((excess for excess in amounts if excess.measure == "cards" and excess.used), None)
    if cards is not None:  # those that the namespace holds are not among the requested ones
        ends += f", if the pod needs at most {cards.limit} GPU cards"
    if other_refusal is not None and not other_refusal.permanent:
        return f"wait until pods have ended where the quota allows the pod, or {administrator}"
    if len(amounts) < len(excesses):
        return f"waiting does not help: {administrator}"
    free = dict.fromkeys(_at_most(excess, _left(excess)) for excess in amounts)
    if not any(map(_never_met, amounts)):
        less = [f"request {' and '.join(free)}"] * all(map(_left, amounts))
        return "; or ".join([*less, ends, administrator])
    if any(excess.limit == 0 for excess in amounts):
        return f"waiting does not help: {administrator}"
    if all(map(_left, amounts)):
        return f"waiting does not help: request {' and '.join(free)}; or {administrator}"
    most = " and ".join(dict.fromkeys(_at_most(excess, excess.limit) for excess in amounts))
    return f"waiting alone does not help: request {most}, and {ends}; or {administrator}"


def no_budget(namespace: Namespace) -> Refusal:
    return Refusal(
        reason=f"the GPU budget of namespace {namespace} is used up or invalid: new pods wait",
        counts=(("BudgetExhausted", 1),),
        hint=budget_hint(namespace),
        permanent=True,
        quota=namespace,
    )


def _too_long(namespace: Namespace, excess: QuotaExcess) -> Refusal:
    """Return the refusal of a pod that admission has not seen, or before the quota was lowered."""
    given = f"has {duration_text(excess.requested)}" if excess.requested else "has none"
    return Refusal(
        reason=f"the GPU quota of namespace {namespace} allows a maximum run time of "
        f"{duration_text(excess.limit)} at most, and the pod {given}",
        counts=(("ExceedsGPUQuota", 1),),
        hint="waiting does not help: set spec.activeDeadlineSeconds to "
        f"{excess.limit} or less, also in the pod that waits: kubectl patch pod NAME --patch "
        f'\'{{"spec":{{"activeDeadlineSeconds":{excess.limit}}}}}\'',
        permanent=True,
        quota=namespace,
    )


def _never_met(excess: QuotaExcess) -> bool:
    """Return whether the quota refuses the pod, or its gang, even if no other pod has a lease."""
    return excess.requested + excess.by_gang > excess.limit


def _left(excess: QuotaExcess) -> int:
    """Return what other pods leave to the pod, or to its gang."""
    return max(0, excess.limit - excess.used + excess.by_gang)


def _at_most(excess: QuotaExcess, amount: int) -> str:
    of_model = f" of model {excess.model}" if excess.model else ""
    whole = "in all pods of the gang" if excess.by_gang else "in the whole pod"
    number = _amount(excess.measure, amount)
    return f"at most {number} {_MEASURE_NAMES[excess.measure]}{of_model} {whole}"


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
    limit, used_text, wanted = (_amount(excess.measure, n) for n in (excess.limit, used, requested))
    allowed = f"it allows {limit} {_MEASURE_NAMES[excess.measure]}{of_model}"
    return f"{allowed}, {used_text} are used and {wanted} requested{together}"


def _amount(measure: str, number: int) -> str:
    return f"{number / 1000:g}" if measure in {"cores", "milliGPU"} else str(number)
