"""Strategies of workloads: defaults and validation of their pod templates and selectors; pure.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/
"""

from collections.abc import Iterator, Sequence
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, JsonValue, at_path, json_text, name_of
from simcluster.apimachinery.schedules import Schedule
from simcluster.apimachinery.selectors import selector_requirements
from simcluster.apiserver.kinds.pod_defaults import complete_pod
from simcluster.apiserver.kinds.pod_validation import pod_causes, required
from simcluster.apiserver.storage.strategy import KindStrategy, ObjectLookup

JOB_LABELS = ("batch.kubernetes.io/controller-uid", "controller-uid")
_ENDING = ("OnFailure", "Never")
_CONCURRENCY = ("Allow", "Forbid", "Replace")
_CRON_JOB: Json = {
    "concurrencyPolicy": "Allow",
    "suspend": False,
    "successfulJobsHistoryLimit": 3,
    "failedJobsHistoryLimit": 1,
}
JOB_NAME_LABELS = ("batch.kubernetes.io/job-name", "job-name")


class WorkloadStrategy(KindStrategy):
    """Workloads keep their selector, which must select the pods of their template."""

    has_generation = True

    def __init__(self, defaults: Json, *, restart_policies: tuple[str, ...] = ("Always",)) -> None:
        self.defaults = defaults
        self.restart_policies = restart_policies

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the defaults of the spec, and of its pod template."""
        spec = obj.get("spec")
        if not isinstance(spec, dict):
            return
        for field, value in self.defaults.items():
            _set_default(spec, field, value)
        if isinstance(spec.get("template"), dict):
            complete_pod(spec["template"])

    def validate(self, obj: Json) -> list[Cause]:
        """Validate the metadata, the selector, the amounts and the template."""
        causes = metadata_causes(obj)
        spec = obj.get("spec")
        if not isinstance(spec, dict):
            return [*causes, required("spec")]
        causes += _amount_causes(spec)
        template = spec.get("template")
        if not isinstance(template, dict):
            return [*causes, required("spec.template")]
        claims = spec.get("volumeClaimTemplates") or ()
        template_causes = pod_causes(template, [name_of(claim) for claim in claims])
        causes += [
            Cause(cause.reason, cause.message, f"spec.template.{cause.field}")
            for cause in template_causes
        ]
        policy = at_path(template, "spec.restartPolicy")
        if not template_causes and policy not in self.restart_policies:
            allowed = ", ".join(f'"{policy}"' for policy in self.restart_policies)
            text = f'Unsupported value: "{policy}": supported values: {allowed}'
            causes.append(Cause("FieldValueNotSupported", text, "spec.template.spec.restartPolicy"))
        return [*causes, *_selector_causes(spec, template)]

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Refuse another selector."""
        if at_path(new, "spec.selector") == at_path(old, "spec.selector"):
            return []
        return [Cause("FieldValueInvalid", "Invalid value: field is immutable", "spec.selector")]


class JobStrategy(WorkloadStrategy):
    """Jobs get a selector of their own, by their uid."""

    def __init__(self) -> None:
        defaults = {
            "parallelism": 1,
            "backoffLimit": 6,
            "completionMode": "NonIndexed",
            "suspend": False,
            "podReplacementPolicy": "TerminatingOrFailed",
        }
        super().__init__(defaults, restart_policies=_ENDING)

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the selector and the labels of the template; only a work queue has no completions."""
        spec = obj.get("spec")
        meta = obj["metadata"]
        if not isinstance(spec, dict) or not isinstance(spec.get("template"), dict):
            return
        if spec.get("parallelism") is None and spec.get("completions") is None:
            spec["completions"] = 1
        if not spec.get("manualSelector"):
            labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
            labels |= dict.fromkeys(JOB_LABELS, meta["uid"])
            labels |= dict.fromkeys(JOB_NAME_LABELS, meta["name"])
            spec["selector"] = {"matchLabels": {JOB_LABELS[0]: meta["uid"]}}

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Refuse another template, too."""
        causes = super().validate_transition(new, old)
        if at_path(new, "spec.template") != at_path(old, "spec.template"):
            text = "Invalid value: field is immutable"
            causes.append(Cause("FieldValueInvalid", text, "spec.template"))
        return causes


class CronJobStrategy(KindStrategy):
    """CronJobs hold the template of a Job."""

    has_generation = True

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the defaults of the spec, and of the pod template."""
        spec = obj.get("spec")
        if isinstance(spec, dict):
            for field, value in _CRON_JOB.items():
                _set_default(spec, field, value)
            template = at_path(spec, "jobTemplate.spec.template")
            if isinstance(template, dict):
                complete_pod(template)

    def validate(self, obj: Json) -> list[Cause]:
        """Validate the schedule, its time zone, and the Job's template."""
        causes = metadata_causes(obj)
        spec = obj.get("spec")
        if not isinstance(spec, dict):
            return [*causes, required("spec")]
        causes += _schedule_causes(spec)
        policy = spec["concurrencyPolicy"]
        if policy not in _CONCURRENCY:
            causes.append(_unsupported(policy, _CONCURRENCY, "spec.concurrencyPolicy"))
        template = at_path(spec, "jobTemplate.spec.template")
        if not isinstance(template, dict):
            return [*causes, required("spec.jobTemplate.spec.template")]
        return [*causes, *_template_causes(template, "spec.jobTemplate.spec.", _ENDING)]


def _set_default(holder: Json, field: str, value: JsonValue) -> None:
    if holder.get(field) is None:
        holder[field] = value
    elif isinstance(value, dict) and isinstance(holder[field], dict):
        same_type = holder[field].get("type") in (None, value.get("type"))
        for name, below in value.items():
            if name == "type" or same_type:
                _set_default(holder[field], name, below)


def _schedule_causes(spec: Json) -> Iterator[Cause]:
    schedule = str(spec.get("schedule") or "")
    zone = str(spec.get("timeZone") or "UTC")
    try:
        Schedule.parse(schedule)
    except ValueError as error:
        text = f'Invalid value: "{schedule}": {error}'
        yield Cause("FieldValueInvalid", text, "spec.schedule")
    try:
        ZoneInfo(zone)
    except (ValueError, ZoneInfoNotFoundError, OSError):
        text = f'Invalid value: "{zone}": unknown time zone {zone}'
        yield Cause("FieldValueInvalid", text, "spec.timeZone")


def _template_causes(template: Json, path: str, restart_policies: Sequence[str]) -> list[Cause]:
    causes = [
        Cause(cause.reason, cause.message, f"{path}template.{cause.field}")
        for cause in pod_causes(template)
    ]
    policy = at_path(template, "spec.restartPolicy")
    if causes or policy in restart_policies:
        return causes
    field = f"{path}template.spec.restartPolicy"
    return [_unsupported(str(policy), restart_policies, field)]


def _unsupported(value: str, allowed: Sequence[str], field: str) -> Cause:
    listed = ", ".join(f'"{value}"' for value in allowed)
    text = f'Unsupported value: "{value}": supported values: {listed}'
    return Cause("FieldValueNotSupported", text, field)


def _amount_causes(spec: Json) -> Iterator[Cause]:
    for field in ("replicas", "parallelism", "completions", "backoffLimit"):
        amount = spec.get(field)
        if amount is None:
            continue
        if not isinstance(amount, int) or isinstance(amount, bool) or amount < 0:
            text = f"Invalid value: {amount!r}: must be greater than or equal to 0"
            yield Cause("FieldValueInvalid", text, f"spec.{field}")
    yield from _rolling_causes(spec)


def _rolling_causes(spec: Json) -> Iterator[Cause]:
    """Require that a rolling update can begin, and of a DaemonSet that it begins in one way."""
    of_deployment = at_path(spec, "strategy.rollingUpdate")
    if isinstance(of_deployment, dict) and not any(map(_is_some, of_deployment.values())):
        text = "Invalid value: 0: may not be 0 when `maxSurge` is 0"
        yield Cause("FieldValueInvalid", text, "spec.strategy.rollingUpdate.maxUnavailable")
    where = "spec.updateStrategy.rollingUpdate"
    rolling = at_path(spec, "updateStrategy.rollingUpdate")
    if not isinstance(rolling, dict) or "maxSurge" not in rolling:
        return
    surge = rolling["maxSurge"]
    unavailable = rolling.get("maxUnavailable")
    if _is_some(surge) and _is_some(unavailable):
        text = f"Invalid value: {json_text(surge)}: may not be set when maxUnavailable is non-zero"
        yield Cause("FieldValueInvalid", text, f"{where}.maxSurge")
    elif not (_is_some(surge) or _is_some(unavailable)):
        text = "Required value: cannot be 0 when maxSurge is 0"
        yield Cause("FieldValueRequired", text, f"{where}.maxUnavailable")


def _is_some(amount: JsonValue) -> bool:
    return str(amount or 0) not in {"0", "0%"}


def _selector_causes(spec: Json, template: Json) -> Iterator[Cause]:
    selector = spec.get("selector")
    if not isinstance(selector, dict):
        yield required("spec.selector")
        return
    labels = at_path(template, "metadata.labels") or {}
    try:
        selects = all(holds(labels) for holds in selector_requirements(selector))
    except (ApiError, AttributeError, KeyError, TypeError) as error:
        text = f"Invalid value: not a label selector: {error}"
        yield Cause("FieldValueInvalid", text, "spec.selector")
        return
    if not selector:
        text = "Invalid value: {}: empty selector is invalid"
        yield Cause("FieldValueInvalid", text, "spec.selector")
    elif not selects:
        text = "Invalid value: `selector` does not match template `labels`"
        yield Cause("FieldValueInvalid", text, "spec.template.metadata.labels")


_ROLLING = {"maxSurge": "25%", "maxUnavailable": "25%"}
WORKLOAD_STRATEGIES = {
    "deployments": WorkloadStrategy(
        {
            "replicas": 1,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": _ROLLING},
            "revisionHistoryLimit": 10,
            "progressDeadlineSeconds": 600,
        }
    ),
    "replicasets": WorkloadStrategy({"replicas": 1}),
    "statefulsets": WorkloadStrategy(
        {
            "replicas": 1,
            "podManagementPolicy": "OrderedReady",
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
            "revisionHistoryLimit": 10,
        }
    ),
    "daemonsets": WorkloadStrategy(
        {
            "updateStrategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "revisionHistoryLimit": 10,
        }
    ),
    "jobs": JobStrategy(),
    "cronjobs": CronJobStrategy(),
}
