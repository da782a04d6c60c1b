"""The condition `Progressing` of a Deployment, and its deadline; pure.

https://kubernetes.io/docs/concepts/workloads/controllers/deployment/#deployment-status
"""

from collections.abc import Mapping, Sequence

from simcluster.apimachinery.objects import (
    Json,
    Objects,
    name_of,
    number_at,
    parse_time,
    rfc3339,
)
from simcluster.controller_manager.plans import condition_of, with_condition

PROGRESSING = "Progressing"
CREATED = "NewReplicaSetCreated"
FOUND = "FoundNewReplicaSet"
UPDATED = "ReplicaSetUpdated"
AVAILABLE = "NewReplicaSetAvailable"
TIMED_OUT = "ProgressDeadlineExceeded"
PAUSED = "DeploymentPaused"
RESUMED = "DeploymentResumed"
_NEVER_S = (1 << 31) - 1
"""This deadline stands for none."""


def deadline_in_s(deployment: Json, conditions: Sequence[Json], now: float) -> float | None:
    """Return in how many seconds a rollout without progress has failed; None if it cannot."""
    condition = _progressing(conditions)
    if condition.get("reason") in {None, AVAILABLE, TIMED_OUT, PAUSED}:
        return None
    return _deadline_s(deployment) - (now - _updated_at(condition, now)) + 1.0


def with_progress(
    deployment: Json,
    conditions: Objects,
    current: Json | None,
    counts: Mapping[str, int],
    now: float,
) -> Objects:
    """Return the conditions with that of the rollout's progress.

    `current` is the ReplicaSet of the present template, and `counts` are the Deployment's replicas
    now; its status has those before.
    """
    before = _progressing(conditions)
    if _deadline_s(deployment) >= _NEVER_S:
        return [condition for condition in conditions if condition is not before]
    condition = _condition(deployment, before, current, counts, now)
    if condition is None:
        return conditions
    return with_condition(conditions, rfc3339(now), {**condition, "lastUpdateTime": rfc3339(now)})


def _condition(
    deployment: Json, before: Json, current: Json | None, counts: Mapping[str, int], now: float
) -> Json | None:
    """Return the condition if it changes, or if the rollout has progressed; else None."""
    reason = before.get("reason")
    is_paused = bool(deployment["spec"].get("paused"))
    replicas = deployment["spec"]["replicas"]
    is_complete = all(
        counts[field] == replicas for field in ("replicas", "updatedReplicas", "availableReplicas")
    )
    is_late = now - _updated_at(before, now) > _deadline_s(deployment)
    subject = f'ReplicaSet "{name_of(current or {})}"'
    cases: tuple[tuple[bool, tuple[str, str, str] | None], ...] = (
        (is_paused and reason in {PAUSED, TIMED_OUT}, None),
        (is_paused, ("Unknown", PAUSED, "Deployment is paused")),
        (reason == PAUSED, ("Unknown", RESUMED, "Deployment is resumed")),
        (current is None and reason == CREATED, None),
        (current is None, ("True", CREATED, "Created new replica set")),
        (reason == AVAILABLE and counts["replicas"] == counts["updatedReplicas"], None),
        (is_complete, ("True", AVAILABLE, f"{subject} has successfully progressed.")),
        (_has_progressed(deployment, counts), ("True", UPDATED, f"{subject} is progressing.")),
        (reason is None, ("True", FOUND, f"Found new {subject}")),
        (reason in {AVAILABLE, TIMED_OUT}, None),
        (is_late, ("False", TIMED_OUT, f"{subject} has timed out progressing.")),
    )
    chosen = next((result for applies, result in cases if applies), None)
    return None if chosen is None else condition_of(PROGRESSING, *chosen)


def _has_progressed(deployment: Json, counts: Mapping[str, int]) -> bool:
    def before(field: str) -> int:
        return number_at(deployment, f"status.{field}")

    old = counts["replicas"] - counts["updatedReplicas"]
    return any(
        counts[field] > before(field)
        for field in ("updatedReplicas", "readyReplicas", "availableReplicas")
    ) or old < before("replicas") - before("updatedReplicas")


def _progressing(conditions: Sequence[Json]) -> Json:
    return next((condition for condition in conditions if condition.get("type") == PROGRESSING), {})


def _updated_at(condition: Json, now: float) -> float:
    at = condition.get("lastUpdateTime")
    return parse_time(at) if at else now


def _deadline_s(deployment: Json) -> int:
    deadline_s = deployment["spec"].get("progressDeadlineSeconds")
    return _NEVER_S if deadline_s is None else int(deadline_s)
