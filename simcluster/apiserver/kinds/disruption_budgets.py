"""PodDisruptionBudgets: validation, status, and evictions that respect them."""

import math
import re
from collections.abc import Iterator, Sequence

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.objects import Json, Objects, at_path, metadata, name_of, namespace_of
from simcluster.apimachinery.pods import is_ready
from simcluster.apimachinery.resources import Resource
from simcluster.apimachinery.selectors import selector_requirements
from simcluster.apiserver.storage.records import ObjectChange
from simcluster.apiserver.storage.store import ObjectStore

_ALWAYS_EVICTABLE = frozenset({"Pending", "Succeeded", "Failed"})
_WATCHED = frozenset({"pods", "poddisruptionbudgets"})


def budget_selects(budget: Json, pod: Json) -> bool:
    """Return whether the budget selects the pod; an empty selector selects all of its namespace."""
    labels = metadata(pod).get("labels") or {}
    requirements = selector_requirements(at_path(budget, "spec.selector"))
    same_namespace = namespace_of(budget) == namespace_of(pod)
    return same_namespace and all(holds(labels) for holds in requirements)


def budget_status(budget: Json, pods: Sequence[Json]) -> Json:
    """Return a budget's status, given the pods that it selects."""
    expected = [pod for pod in pods if at_path(pod, "status.phase") not in {"Succeeded", "Failed"}]
    healthy = [
        pod for pod in expected if is_ready(pod) and not metadata(pod).get("deletionTimestamp")
    ]
    spec = budget.get("spec") or {}
    if spec.get("maxUnavailable") is not None:
        desired = len(expected) - _count(spec["maxUnavailable"], len(expected))
    else:
        desired = _count(spec.get("minAvailable", 1), len(expected))
    desired = max(desired, 0)
    return {
        "currentHealthy": len(healthy),
        "desiredHealthy": desired,
        "expectedPods": len(expected),
        "disruptionsAllowed": max(len(healthy) - desired, 0),
        "observedGeneration": metadata(budget).get("generation", 1),
    }


def _count(amount: int | str, of: int) -> int:
    text = str(amount)
    return math.ceil(int(text[:-1]) * of / 100) if text.endswith("%") else int(text)


class DisruptionController:
    """Updates the status of all budgets, and evicts pods as far as they allow."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        store.listeners.append(self._on_change)

    def evict(self, namespace: str, name: str, eviction: Json, *, dry_run: bool) -> None:
        """Delete a pod; 429 if that would violate a budget."""
        pod = self._store.read("pods", namespace, name)
        budgets = [budget for budget in self._budgets(namespace) if budget_selects(budget, pod)]
        if at_path(pod, "status.phase") not in _ALWAYS_EVICTABLE:
            self._check_budgets(pod, budgets)
        options = eviction.get("deleteOptions") or {}
        preconditions = options.get("preconditions") or {}
        self._store.delete(
            "pods",
            namespace,
            name,
            grace_s=options.get("gracePeriodSeconds"),
            uid=preconditions.get("uid"),
            resource_version=preconditions.get("resourceVersion"),
            dry_run=dry_run,
            subresource="eviction",
        )

    def _check_budgets(self, pod: Json, budgets: Objects) -> None:
        if len(budgets) > 1:
            raise ApiError(
                500,
                "InternalError",
                "This pod has more than one PodDisruptionBudget, which the eviction subresource "
                "does not support.",
            )
        for budget in budgets:
            status = budget_status(budget, self._selected_pods(budget))
            if is_ready(pod) and status["disruptionsAllowed"] < 1:
                text = (
                    f"The disruption budget {name_of(budget)} needs {status['desiredHealthy']} "
                    f"healthy pods and has {status['currentHealthy']} currently"
                )
                raise ApiError(
                    429,
                    "TooManyRequests",
                    "Cannot evict pod as it would violate the pod's disruption budget.",
                    details={"causes": [{"reason": "DisruptionBudget", "message": text}]},
                )

    def _budgets(self, namespace: str) -> Objects:
        return self._store.list("poddisruptionbudgets", namespace)

    def _selected_pods(self, budget: Json) -> Objects:
        pods = self._store.list("pods", namespace_of(budget))
        return [pod for pod in pods if budget_selects(budget, pod)]

    def _on_change(self, kind: Resource, change: ObjectChange) -> None:
        if kind.table not in _WATCHED or (
            change.after is None and kind.table == "poddisruptionbudgets"
        ):
            return
        for budget in self._budgets(namespace_of(change.latest.obj)):
            status = budget_status(budget, self._selected_pods(budget))
            if status != budget.get("status"):
                changed = {**budget, "status": status}
                self._store.update("poddisruptionbudgets", changed, subresource="status")


_PERCENT = re.compile(r"\d{1,3}%")


def budget_causes(budget: Json) -> Iterator[Cause]:
    """Validate the amounts and the selector."""
    spec = budget.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    amounts = {
        field: spec[field]
        for field in ("minAvailable", "maxUnavailable")
        if spec.get(field) is not None
    }
    if len(amounts) > 1:
        text = "Invalid value: minAvailable and maxUnavailable cannot be both set"
        yield Cause("FieldValueInvalid", text, "spec")
    for field, amount in amounts.items():
        whole = isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0
        if not whole and not (isinstance(amount, str) and _PERCENT.fullmatch(amount)):
            text = f"Invalid value: {amount!r}: must be a whole number or a percentage"
            yield Cause("FieldValueInvalid", text, f"spec.{field}")
    try:
        selector_requirements(spec.get("selector"))
    except (ApiError, AttributeError, KeyError, TypeError) as error:
        text = f"Invalid value: not a label selector: {error}"
        yield Cause("FieldValueInvalid", text, "spec.selector")
