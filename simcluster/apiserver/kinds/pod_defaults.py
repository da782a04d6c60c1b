"""Defaults of pods: API defaults, priority, tolerations, service account; pure."""

import re
from collections.abc import Iterable

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, name_of
from simcluster.apimachinery.pods import containers_of, qos_class

_SPEC_DEFAULTS = {
    "restartPolicy": "Always",
    "terminationGracePeriodSeconds": 30,
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "enableServiceLinks": True,
}
_EVICTING_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_EVICTED_AFTER_S = 300
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_PROBE_DEFAULTS = {
    "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3,
}  # fmt: skip
_ZERO = re.compile(r"[+-]?(?:0+\.?0*|\.0+)(?:[numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?", re.ASCII)
_FILE_MODE = 420  # 0644
_GATED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "SchedulingGated",
    "message": "Scheduling is blocked due to non-empty scheduling gates",
}


def admit_pod(pod: Json, priority_classes: Iterable[Json]) -> None:
    """Set a new pod's priority, tolerations and service account; 403 if it sets others."""
    spec = pod.get("spec")
    if not isinstance(spec, dict):
        return
    _give_priority(pod, spec, priority_classes)
    _tolerate_lost_nodes(spec)
    spec.setdefault("serviceAccountName", "default")
    spec.setdefault("serviceAccount", spec["serviceAccountName"])


def begin_pod(pod: Json) -> None:
    """Set a new pod's initial status: Pending, with its QoS class.

    A pod with scheduling gates gets a condition for it, which a scheduler replaces later.
    """
    pod["status"] = {"phase": "Pending"}
    spec = pod.get("spec")
    if isinstance(spec, dict) and spec.get("schedulingGates"):
        pod["status"]["conditions"] = [dict(_GATED)]
    complete_pod(pod)
    pod["status"]["qosClass"] = qos_class(pod)


def complete_pod(pod: Json) -> None:
    """Set the API's defaults, in place; a repetition changes nothing."""
    spec = pod.get("spec")
    if not isinstance(spec, dict):
        return
    for field, value in _SPEC_DEFAULTS.items():
        if spec.get(field) is None:
            spec[field] = value
    if spec.get("securityContext") is None:
        spec["securityContext"] = {}
    for container in containers_of(pod):
        _complete_container(container, host_network=bool(spec.get("hostNetwork")))
    for volume in spec.get("volumes") or ():
        _complete_volume(volume)


def _complete_container(container: Json, *, host_network: bool) -> None:
    image = str(container.get("image") or "")
    tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
    latest = "@" not in image and tag in {"", "latest"}
    container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    if container.get("resources") is None:
        container["resources"] = {}
    if isinstance(container["resources"], dict):
        _complete_resources(container["resources"])
    for port in container.get("ports") or ():
        port.setdefault("protocol", "TCP")
        if host_network:
            port.setdefault("hostPort", port.get("containerPort"))
    for probe in filter(None, (container.get(name) for name in _PROBES)):
        for field, value in _PROBE_DEFAULTS.items():
            probe.setdefault(field, value)


def _complete_resources(resources: Json) -> None:
    """Write quantities as text; requests that are not set equal the limits."""
    for field in ("limits", "requests"):
        if isinstance(resources.get(field), dict):
            resources[field] = {k: _quantity(v) for k, v in resources[field].items()}
    if isinstance(resources.get("limits"), dict):
        resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}


def _quantity(value: object) -> object:
    """Write a quantity as text: pods may set numbers, and the API shows text, every zero as 0."""
    if isinstance(value, str) and _ZERO.fullmatch(value):
        return "0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return str(int(value)) if float(value).is_integer() else str(value)


def _complete_volume(volume: Json) -> None:
    for source in ("configMap", "secret", "projected", "downwardAPI"):
        if isinstance(volume.get(source), dict):
            volume[source].setdefault("defaultMode", _FILE_MODE)
    if isinstance(volume.get("hostPath"), dict):
        volume["hostPath"].setdefault("type", "")


def _give_priority(pod: Json, spec: Json, classes: Iterable[Json]) -> None:
    chosen = _priority_class(pod, spec.get("priorityClassName"), classes)
    if chosen is not None:
        spec["priorityClassName"] = name_of(chosen)
    value = int(chosen["value"]) if chosen else 0
    if spec.get("priority") not in (None, value):
        detail = (
            f"the integer value of priority ({spec['priority']}) must not be provided in pod spec;"
            f" priority admission controller computed {value} from the given PriorityClass name"
        )
        raise ApiError.forbidden("pods", name_of(pod), detail)
    spec["priority"] = value
    policy = (chosen or {}).get("preemptionPolicy") or "PreemptLowerPriority"
    if spec.get("preemptionPolicy") not in (None, policy):
        detail = (
            f"the string value of PreemptionPolicy ({spec['preemptionPolicy']}) must not be "
            f"provided in pod spec; priority admission controller computed {policy} from the given "
            "PriorityClass name"
        )
        raise ApiError.forbidden("pods", name_of(pod), detail)
    spec["preemptionPolicy"] = policy


def _priority_class(pod: Json, name: str | None, classes: Iterable[Json]) -> Json | None:
    """Return the pod's class, else the lowest global default; 403 if it does not exist."""
    by_name = {name_of(priority_class): priority_class for priority_class in classes}
    if name:
        if name not in by_name:
            detail = f"no PriorityClass with name {name} was found"
            raise ApiError.forbidden("pods", name_of(pod), detail)
        return by_name[name]
    defaults = [
        priority_class for priority_class in by_name.values() if priority_class.get("globalDefault")
    ]
    return min(defaults, key=lambda priority_class: int(priority_class["value"]), default=None)


def _tolerate_lost_nodes(spec: Json) -> None:
    tolerations = spec.setdefault("tolerations", [])
    if not isinstance(tolerations, list):
        return
    for taint in _EVICTING_TAINTS:
        covered = any(
            toleration.get("key") in (None, "", taint)
            and toleration.get("effect") in (None, "", "NoExecute")
            and (toleration.get("key") or toleration.get("operator") == "Exists")
            for toleration in tolerations
        )
        if not covered:
            tolerations.append(
                {
                    "key": taint,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": _EVICTED_AFTER_S,
                }
            )
