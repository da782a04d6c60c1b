"""CronJobs: Jobs at the times of a schedule; pure.

https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from simcluster.apimachinery.objects import (
    Json,
    Objects,
    annotations_of,
    at_path,
    deep_copy,
    list_at,
    metadata,
    name_of,
    namespace_of,
    parse_time,
    rfc3339,
)
from simcluster.apimachinery.schedules import Schedule
from simcluster.controller_manager.plans import WorkloadPlan, is_deleted, owner_reference

SCHEDULED = "batch.kubernetes.io/cronjob-scheduled-timestamp"
_MOST_MISSED = timedelta(days=2)
"""How far back a missed start is looked for."""


def plan_cron_job(cron_job: Json, jobs: Objects, now: float) -> WorkloadPlan:
    """Plan for a CronJob and the Jobs that it owns."""
    spec = cron_job["spec"]
    active = [job for job in jobs if not _ended(job)]
    plan = WorkloadPlan(status=_status(cron_job, jobs, active))
    plan.delete = [("jobs", job) for job in _forgotten(spec, jobs)]
    if is_deleted(cron_job) or spec["suspend"]:
        return plan
    zone: tzinfo = ZoneInfo(spec["timeZone"]) if spec.get("timeZone") else UTC
    schedule = Schedule.parse(spec["schedule"])
    moment = datetime.fromtimestamp(now, zone)
    due = schedule.last(moment, max(_last_start(cron_job, zone), moment - _MOST_MISSED))
    following = schedule.next(moment)
    if following is not None:
        plan.again_in_s = following.timestamp() - now + 0.1
    deadline_s = spec.get("startingDeadlineSeconds")
    if due is None or (deadline_s is not None and now - due.timestamp() > deadline_s):
        return plan
    if active and spec["concurrencyPolicy"] == "Forbid":
        return plan
    if spec["concurrencyPolicy"] == "Replace":
        plan.delete += [("jobs", job) for job in active]
    plan.create.append(("jobs", _job_of(cron_job, due)))
    plan.status["lastScheduleTime"] = rfc3339(due.timestamp())
    return plan


def _last_start(cron_job: Json, zone: tzinfo) -> datetime:
    since = at_path(cron_job, "status.lastScheduleTime")
    since = since or metadata(cron_job)["creationTimestamp"]
    return datetime.fromtimestamp(parse_time(since), zone)


def _ended(job: Json) -> str:
    """Return the condition with which a Job has ended, empty if it has not."""
    held = (
        condition["type"]
        for condition in list_at(job, "status.conditions")
        if condition.get("status") == "True"
    )
    return next((kind for kind in held if kind in {"Complete", "Failed"}), "")


def _forgotten(spec: Json, jobs: Objects) -> Iterator[Json]:
    limits = {"Complete": "successfulJobsHistoryLimit", "Failed": "failedJobsHistoryLimit"}
    for kind, limit in limits.items():
        ended = sorted(
            (job for job in jobs if _ended(job) == kind),
            key=lambda job: str(metadata(job)["creationTimestamp"]),
        )
        yield from ended[: max(len(ended) - spec[limit], 0)]


def _status(cron_job: Json, jobs: Objects, active: Objects) -> Json:
    status = dict(cron_job.get("status") or {})
    references = [
        {"apiVersion": "batch/v1", "kind": "Job", "name": name_of(job),
         "namespace": namespace_of(job), "uid": job["metadata"]["uid"]}
        for job in active
    ]  # fmt: skip
    status.pop("active", None)
    if references:
        status["active"] = references
    ends = [str(at_path(job, "status.completionTime")) for job in jobs if _ended(job) == "Complete"]
    if ends:
        status["lastSuccessfulTime"] = max(ends)
    return status


def _job_of(cron_job: Json, due: datetime) -> Json:
    template = deep_copy(cron_job["spec"]["jobTemplate"])
    meta = metadata(template)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": f"{name_of(cron_job)}-{int(due.timestamp()) // 60}",
            "namespace": namespace_of(cron_job),
            "labels": meta.get("labels") or {},
            "annotations": {**annotations_of(template), SCHEDULED: rfc3339(due.timestamp())},
            "ownerReferences": [owner_reference(cron_job, "CronJob", "batch/v1")],
        },
        "spec": template["spec"],
    }
