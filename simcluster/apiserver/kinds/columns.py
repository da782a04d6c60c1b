"""The printer columns of the built-in kinds; pure."""

from collections.abc import Callable, Mapping

from simcluster.apimachinery.objects import (
    Json,
    JsonValue,
    at_path,
    metadata,
    name_of,
    parse_time,
)
from simcluster.apimachinery.pods import ready_containers, restart_count, status_summary
from simcluster.apimachinery.printer_columns import AGE, NAME, UNKNOWN, Column, format_age

_NONE = "<none>"
_ROLE = "node-role.kubernetes.io/"


def _path(path: str, otherwise: JsonValue = _NONE) -> Callable[[Json, float], JsonValue]:
    def cell(obj: Json, _now: float) -> JsonValue:
        value = at_path(obj, path)
        return otherwise if value in (None, "") else value

    return cell


def _size(path: str) -> Callable[[Json, float], JsonValue]:
    return lambda obj, _now: len(at_path(obj, path) or ())


def _node_status(node: Json, _now: float) -> str:
    conditions = at_path(node, "status.conditions") or ()
    ready = next(
        (condition.get("status") for condition in conditions if condition.get("type") == "Ready"),
        None,
    )
    states = [{"True": "Ready", None: "Unknown"}.get(ready, "NotReady")]
    if at_path(node, "spec.unschedulable"):
        states.append("SchedulingDisabled")
    return ",".join(states)


def _node_roles(node: Json, _now: float) -> str:
    labels = metadata(node).get("labels") or {}
    roles = [key.removeprefix(_ROLE) for key in labels if key.startswith(_ROLE)]
    return ",".join(sorted(roles)) or _NONE


def _node_address(kind: str) -> Callable[[Json, float], str]:
    def cell(node: Json, _now: float) -> str:
        addresses = at_path(node, "status.addresses") or ()
        return next(
            (address.get("address", "") for address in addresses if address.get("type") == kind),
            _NONE,
        )

    return cell


def _event_last_seen(event: Json, now: float) -> str:
    when = at_path(event, "series.lastObservedTime") or event.get("lastTimestamp")
    when = when or event.get("eventTime") or event.get("firstTimestamp")
    return format_age(when or metadata(event).get("creationTimestamp"), now)


def _event_object(event: Json, _now: float) -> str:
    involved = event.get("involvedObject") or {}
    return f"{str(involved.get('kind') or '').lower()}/{involved.get('name') or ''}"


def _event_source(event: Json, _now: float) -> str:
    source = event.get("source") or {}
    parts = (source.get("component") or event.get("reportingComponent"), source.get("host"))
    return ", ".join(part for part in parts if part)


def _ports(service: Json, _now: float) -> str:
    ports = at_path(service, "spec.ports") or ()
    return ",".join(f"{port.get('port')}/{port.get('protocol', 'TCP')}" for port in ports) or _NONE


def _quota(part: str) -> Callable[[Json, float], str]:
    """Show used and hard amounts, either of limits or of everything else."""

    def cell(quota: Json, _now: float) -> str:
        hard = at_path(quota, "status.hard") or {}
        used = at_path(quota, "status.used") or {}
        return ", ".join(
            f"{name}: {used.get(name, '0')}/{hard[name]}"
            for name in sorted(hard)
            if name.startswith("limits.") is (part == "limits")
        )

    return cell


def _template(field: str) -> Callable[[Json, float], str]:
    """Show a field of each container of the pod template."""

    def cell(workload: Json, _now: float) -> str:
        containers = at_path(workload, "spec.template.spec.containers") or ()
        return ",".join(str(container.get(field)) for container in containers)

    return cell


def _labels(path: str) -> Callable[[Json, float], str]:
    def cell(obj: Json, _now: float) -> str:
        labels = at_path(obj, path) or {}
        return ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or _NONE

    return cell


def _fraction(part: str, whole: str) -> Callable[[Json, float], str]:
    return lambda obj, _now: f"{at_path(obj, part) or 0}/{at_path(obj, whole) or 0}"


def _job_status(job: Json, _now: float) -> str:
    conditions = at_path(job, "status.conditions") or ()
    held = {condition.get("type") for condition in conditions if condition.get("status") == "True"}
    return next((name for name in ("Complete", "Failed", "Suspended") if name in held), "Running")


def _job_completions(job: Json, _now: float) -> str:
    wanted = at_path(job, "spec.completions")
    parallelism = at_path(job, "spec.parallelism") or 0
    if wanted is None:
        wanted = f"1 of {parallelism}" if parallelism > 1 else 1
    return f"{at_path(job, 'status.succeeded') or 0}/{wanted}"


def _job_duration(job: Json, now: float) -> str:
    started = at_path(job, "status.startTime")
    ended = at_path(job, "status.completionTime")
    return "" if not started else format_age(started, parse_time(ended) if ended else now)


def _controller(revision: Json, _now: float) -> str:
    owners = metadata(revision).get("ownerReferences") or ()
    owner = next((reference for reference in owners if reference.get("controller")), None)
    return f"{owner['kind'].lower()}.apps/{owner['name']}" if owner else _NONE


def _last_schedule(cron_job: Json, now: float) -> str:
    last = at_path(cron_job, "status.lastScheduleTime")
    return format_age(last, now) if last else _NONE


def _in_job(cell: Callable[[Json, float], str]) -> Callable[[Json, float], str]:
    return lambda obj, now: cell(at_path(obj, "spec.jobTemplate"), now)


_WORKLOAD_WIDE = (
    Column("Containers", _template("name"), 1),
    Column("Images", _template("image"), 1),
    Column("Selector", _labels("spec.selector.matchLabels"), 1),
)


def _number(title: str, path: str) -> Column:
    return Column(title, _path(path, 0), type="integer")


COLUMNS: Mapping[str, tuple[Column, ...]] = {
    "pods": (
        NAME,
        Column("Ready", lambda pod, _now: "{}/{}".format(*ready_containers(pod))),
        Column("Status", lambda pod, _now: status_summary(pod)),
        Column("Restarts", lambda pod, _now: str(restart_count(pod))),
        AGE,
        Column("IP", _path("status.podIP"), 1),
        Column("Node", _path("spec.nodeName"), 1),
        Column("Nominated Node", _path("status.nominatedNodeName"), 1),
        Column("Readiness Gates", lambda _pod, _now: _NONE, 1),
    ),
    "nodes": (
        NAME,
        Column("Status", _node_status),
        Column("Roles", _node_roles),
        AGE,
        Column("Version", _path("status.nodeInfo.kubeletVersion", "")),
        Column("Internal-IP", _node_address("InternalIP"), 1),
        Column("External-IP", _node_address("ExternalIP"), 1),
        Column("OS-Image", _path("status.nodeInfo.osImage", UNKNOWN), 1),
        Column("Kernel-Version", _path("status.nodeInfo.kernelVersion", UNKNOWN), 1),
        Column("Container-Runtime", _path("status.nodeInfo.containerRuntimeVersion", UNKNOWN), 1),
    ),
    "namespaces": (NAME, Column("Status", _path("status.phase", "")), AGE),
    "events": (
        Column("Last Seen", _event_last_seen),
        Column("Type", _path("type", "")),
        Column("Reason", _path("reason", "")),
        Column("Object", _event_object),
        Column("Subobject", _path("involvedObject.fieldPath", ""), 1),
        Column("Source", _event_source, 1),
        Column("Message", _path("message", "")),
        Column("First Seen", lambda event, now: format_age(event.get("firstTimestamp"), now), 1),
        Column("Count", _path("count", 1), 1, "integer"),
        Column("Name", lambda obj, _now: name_of(obj), 1, format="name"),
    ),
    "configmaps": (NAME, Column("Data", _size("data"), type="integer"), AGE),
    "secrets": (
        NAME,
        Column("Type", _path("type", "")),
        Column("Data", _size("data"), type="integer"),
        AGE,
    ),
    "serviceaccounts": (NAME, Column("Secrets", _size("secrets"), type="integer"), AGE),
    "services": (
        NAME,
        Column("Type", _path("spec.type", "")),
        Column("Cluster-IP", _path("spec.clusterIP")),
        Column("External-IP", lambda _service, _now: _NONE),
        Column("Port(s)", _ports),
        AGE,
        Column("Selector", _labels("spec.selector"), 1),
    ),
    "persistentvolumeclaims": (
        NAME,
        Column("Status", _path("status.phase", "")),
        Column("Volume", _path("spec.volumeName", "")),
        Column("StorageClass", _path("spec.storageClassName", "")),
        AGE,
    ),
    "resourcequotas": (
        NAME,
        Column("Request", _quota("requests")),
        Column("Limit", _quota("limits")),
        AGE,
    ),
    "customresourcedefinitions": (NAME, Column("Created At", _path("metadata.creationTimestamp"))),
    "mutatingwebhookconfigurations": (NAME, Column("Webhooks", _size("webhooks")), AGE),
    "validatingwebhookconfigurations": (NAME, Column("Webhooks", _size("webhooks")), AGE),
    "deployments": (
        NAME,
        Column("Ready", _fraction("status.readyReplicas", "spec.replicas")),
        _number("Up-to-date", "status.updatedReplicas"),
        _number("Available", "status.availableReplicas"),
        AGE,
        *_WORKLOAD_WIDE,
    ),
    "replicasets": (
        NAME,
        _number("Desired", "spec.replicas"),
        _number("Current", "status.replicas"),
        _number("Ready", "status.readyReplicas"),
        AGE,
        *_WORKLOAD_WIDE,
    ),
    "statefulsets": (
        NAME,
        Column("Ready", _fraction("status.readyReplicas", "spec.replicas")),
        AGE,
        *_WORKLOAD_WIDE[:2],
    ),
    "daemonsets": (
        NAME,
        _number("Desired", "status.desiredNumberScheduled"),
        _number("Current", "status.currentNumberScheduled"),
        _number("Ready", "status.numberReady"),
        _number("Up-to-date", "status.updatedNumberScheduled"),
        _number("Available", "status.numberAvailable"),
        AGE,
        *_WORKLOAD_WIDE,
    ),
    "controllerrevisions": (
        NAME,
        Column("Controller", _controller),
        _number("Revision", "revision"),
        AGE,
    ),
    "jobs": (
        NAME,
        Column("Status", _job_status),
        Column("Completions", _job_completions),
        Column("Duration", _job_duration),
        AGE,
        *_WORKLOAD_WIDE,
    ),
    "cronjobs": (
        NAME,
        Column("Schedule", _path("spec.schedule", "")),
        Column("Timezone", _path("spec.timeZone")),
        Column("Suspend", lambda obj, _now: str(_path("spec.suspend", False)(obj, 0))),
        Column("Active", _size("status.active"), type="integer"),
        Column("Last Schedule", _last_schedule),
        AGE,
        Column("Containers", _in_job(_template("name")), 1),
        Column("Images", _in_job(_template("image")), 1),
        Column("Selector", lambda _obj, _now: _NONE, 1),
    ),
    "leases": (NAME, Column("Holder", _path("spec.holderIdentity", "")), AGE),
    "priorityclasses": (
        NAME,
        Column("Value", _path("value", 0), type="integer"),
        Column("Global-Default", lambda obj, _now: bool(obj.get("globalDefault")), type="boolean"),
        AGE,
        Column("PreemptionPolicy", _path("preemptionPolicy", "")),
    ),
    "poddisruptionbudgets": (
        NAME,
        Column("Min Available", lambda obj, _now: str(_path("spec.minAvailable", "N/A")(obj, 0))),
        Column("Max Unavailable", lambda o, _now: str(_path("spec.maxUnavailable", "N/A")(o, 0))),
        Column("Allowed Disruptions", _path("status.disruptionsAllowed", 0), type="integer"),
        AGE,
    ),
}
