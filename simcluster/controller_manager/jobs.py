"""Jobs: pods that run until enough of them have succeeded; pure.

Pod failure policies, success policies and a backoff limit per index are not simulated.
https://kubernetes.io/docs/concepts/workloads/controllers/job/
"""

from collections.abc import Iterator

from simcluster.apimachinery.objects import (
    Json,
    Objects,
    annotations_of,
    at_path,
    list_at,
    metadata,
    name_of,
    number_at,
    parse_time,
    rfc3339,
)
from simcluster.apimachinery.pods import is_ready
from simcluster.controller_manager.plans import (
    BURST,
    WorkloadPlan,
    condition_of,
    is_active,
    is_deleted,
    new_pod,
    with_condition,
)

INDEX = "batch.kubernetes.io/job-completion-index"
_BACKOFF_S = 10.0
_MAX_BACKOFF_S = 360.0
_ENDED = ("Complete", "Failed")


def plan_job(job: Json, pods: Objects, now: float) -> WorkloadPlan:
    """Plan for a Job and the pods that it owns."""
    counted = _Counts(job, pods)
    plan = WorkloadPlan(status=_status(job, counted, now))
    if is_deleted(job):
        return plan
    if _is_ended(plan.status):
        return _after_end(plan, job, counted, now)
    failure = _failure(job, counted, now)
    if failure:
        _end(plan, now, "Failed", *failure)
    elif counted.is_complete(job):
        _end(
            plan, now, "Complete", "CompletionsReached", "Reached expected number of succeeded pods"
        )
    if _is_ended(plan.status) or job["spec"]["suspend"]:
        plan.delete = [("pods", pod) for pod in counted.active]
        return plan
    _add_pods(plan, job, counted, now)
    deadline_s = job["spec"].get("activeDeadlineSeconds")
    if deadline_s is not None:
        left_s = parse_time(plan.status["startTime"]) + deadline_s - now
        plan.again_in_s = min(max(left_s, 0.0) + 0.1, plan.again_in_s or left_s + 0.1)
    return plan


class _Counts:
    """The pods of a Job by their outcome; those counted before count on when they are gone."""

    def __init__(self, job: Json, pods: Objects) -> None:
        self.active = [pod for pod in pods if is_active(pod)]
        self.failed_pods = [pod for pod in pods if at_path(pod, "status.phase") == "Failed"]
        self.failed = max(len(self.failed_pods), number_at(job, "status.failed"))
        succeeded = [pod for pod in pods if at_path(pod, "status.phase") == "Succeeded"]
        counted = len(succeeded)
        self.is_indexed = job["spec"]["completionMode"] == "Indexed"
        self.indexes: set[int] = set()
        if self.is_indexed:
            self.indexes = {*_completed_indexes(job), *map(index_of, succeeded)}
            counted = len(self.indexes)
        self.succeeded = max(counted, number_at(job, "status.succeeded"))

    def is_complete(self, job: Json) -> bool:
        """Return whether enough pods have succeeded; of a work queue, one and all have ended."""
        completions = job["spec"].get("completions")
        if completions is not None:
            return self.succeeded >= int(completions)
        return self.succeeded > 0 and not self.active

    def wanted(self, job: Json) -> int:
        """Return the number of pods that should run now."""
        parallelism: int = job["spec"]["parallelism"]
        completions = job["spec"].get("completions")
        if completions is None:
            return len(self.active) if self.succeeded else parallelism
        return min(parallelism, int(completions) - self.succeeded)


def index_of(pod: Json) -> int:
    """Return the completion index of a pod of an indexed Job."""
    return int(annotations_of(pod).get(INDEX, -1))


def _add_pods(plan: WorkloadPlan, job: Json, counted: _Counts, now: float) -> None:
    missing = counted.wanted(job) - len(counted.active)
    if missing < 0:
        plan.delete = [("pods", pod) for pod in counted.active[missing:]]
        return
    pause_s = _pause_s(counted.failed_pods, now)
    if missing and pause_s > 0:
        plan.again_in_s = pause_s
        return
    free = _free_indexes(job, counted)
    for _ in range(min(missing, BURST)):
        pod = new_pod(job, "Job", "batch/v1")
        if counted.is_indexed:
            _set_index(pod, name_of(job), next(free))
        plan.create.append(("pods", pod))


def _free_indexes(job: Json, counted: _Counts) -> Iterator[int]:
    used = counted.indexes | {index_of(pod) for pod in counted.active}
    return (at for at in range(job["spec"].get("completions") or 0) if at not in used)


def _set_index(pod: Json, job: str, index: int) -> None:
    meta = pod["metadata"]
    spec = pod["spec"]
    meta.setdefault("annotations", {})[INDEX] = str(index)
    meta.setdefault("labels", {})[INDEX] = str(index)
    meta["generateName"] = f"{job}-{index}-"
    spec["hostname"] = f"{job}-{index}"
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        variables = container.setdefault("env", [])
        variables.append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})


def _pause_s(failed: Objects, now: float) -> float:
    """Return the seconds until a failed pod is replaced: 10, 20, 40 and so on after a failure."""
    if not failed:
        return 0.0
    ended: float = max(_ended_at(pod) for pod in failed)
    return ended + min(_BACKOFF_S * 2.0 ** (len(failed) - 1), _MAX_BACKOFF_S) - now


def _ended_at(pod: Json) -> float:
    statuses = list_at(pod, "status.containerStatuses")
    ends = (at_path(status, "state.terminated.finishedAt") for status in statuses)
    return max(
        (parse_time(end) for end in ends if end),
        default=parse_time(metadata(pod)["creationTimestamp"]),
    )


def _failure(job: Json, counted: _Counts, now: float) -> tuple[str, str] | None:
    """Return reason and message if the Job has failed."""
    if counted.failed > job["spec"]["backoffLimit"]:
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    deadline_s = job["spec"].get("activeDeadlineSeconds")
    started = at_path(job, "status.startTime")
    if deadline_s is not None and started and now >= parse_time(started) + deadline_s:
        return "DeadlineExceeded", "Job was active longer than specified deadline"
    return None


def _end(plan: WorkloadPlan, now: float, kind: str, reason: str, message: str) -> None:
    conditions = plan.status.get("conditions") or []
    time = rfc3339(now)
    condition = condition_of(kind, "True", reason, message)
    plan.status["conditions"] = with_condition(conditions, time, condition)
    if kind == "Complete":
        plan.status["completionTime"] = time


def _after_end(plan: WorkloadPlan, job: Json, counted: _Counts, now: float) -> WorkloadPlan:
    """Plan for a Job that has ended: it is deleted after `ttlSecondsAfterFinished`."""
    plan.delete = [("pods", pod) for pod in counted.active]
    ttl_s = job["spec"].get("ttlSecondsAfterFinished")
    if ttl_s is None:
        return plan
    ended = max(
        parse_time(condition["lastTransitionTime"])
        for condition in plan.status["conditions"]
        if condition["type"] in _ENDED
    )
    plan.delete_itself = now >= ended + ttl_s
    plan.again_in_s = None if plan.delete_itself else ended + ttl_s - now + 0.1
    return plan


def _is_ended(status: Json) -> bool:
    conditions = status.get("conditions") or ()
    return any(
        condition["type"] in _ENDED and condition["status"] == "True" for condition in conditions
    )


def _status(job: Json, counted: _Counts, now: float) -> Json:
    before = job.get("status") or {}
    status = {key: before[key] for key in ("completionTime", "conditions") if key in before}
    if not job["spec"]["suspend"]:
        status["startTime"] = before.get("startTime") or rfc3339(now)
    _set_suspended(status, now, suspended=job["spec"]["suspend"])
    active = [] if _is_ended(status) else counted.active
    status |= {
        "active": len(active),
        "ready": sum(map(is_ready, active)),
        "succeeded": counted.succeeded,
        "failed": counted.failed,
    }
    if counted.is_indexed:
        status["completedIndexes"] = _format_indexes(counted.indexes)
    return status


def _set_suspended(status: Json, now: float, *, suspended: bool) -> None:
    """Set the condition Suspended of a Job that is or was suspended."""
    conditions = list_at(status, "conditions")
    if suspended:
        condition = condition_of("Suspended", "True", "JobSuspended")
    elif any(condition["type"] == "Suspended" for condition in conditions):
        condition = condition_of("Suspended", "False", "JobResumed")
    else:
        return
    status["conditions"] = with_condition(conditions, rfc3339(now), condition)


def _completed_indexes(job: Json) -> Iterator[int]:
    return _parse_indexes(str(at_path(job, "status.completedIndexes") or ""))


def _parse_indexes(text: str) -> Iterator[int]:
    """Parse indexes such as `1,3-5`."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _format_indexes(indexes: set[int]) -> str:
    runs: list[list[int]] = []
    for at in sorted(indexes):
        if runs and at == runs[-1][1] + 1:
            runs[-1][1] = at
        else:
            runs.append([at, at])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
