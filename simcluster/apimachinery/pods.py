"""Properties of a pod object: containers, QoS class, readiness, status summary; pure."""

from collections.abc import Iterable, Iterator

from simcluster.apimachinery.objects import Json, at_path, metadata


def containers_of(pod: Json) -> Iterator[Json]:
    """Iterate over the init containers, then the containers."""
    spec = pod.get("spec") or {}
    for field in ("initContainers", "containers"):
        for container in spec.get(field) or ():
            if isinstance(container, dict):
                yield container


def has_finished(pod: Json) -> bool:
    """Return whether all containers of a pod have ended for good."""
    return at_path(pod, "status.phase") in {"Succeeded", "Failed"}


def qos_class(pod: Json) -> str:
    """Return the pod's QoS class, which its cpu and memory alone decide."""
    guaranteed = True
    any_set = False
    for container in containers_of(pod):
        resources = container.get("resources")
        resources = resources if isinstance(resources, dict) else {}
        limits = resources.get("limits") or {}
        requests = resources.get("requests") or {}
        for resource in ("cpu", "memory"):
            any_set = any_set or resource in limits or resource in requests
            same = resource in limits and str(limits[resource]) == str(requests.get(resource))
            guaranteed = guaranteed and same
    if not any_set:
        return "BestEffort"
    return "Guaranteed" if guaranteed else "Burstable"


def _statuses(pod: Json, field: str) -> list[Json]:
    return at_path(pod, f"status.{field}") or []


def ready_containers(pod: Json) -> tuple[int, int]:
    """Return the number of ready containers, and of all containers."""
    statuses = _statuses(pod, "containerStatuses")
    ready = sum(
        1 for status in statuses if status.get("ready") and at_path(status, "state.running")
    )
    return ready, len(at_path(pod, "spec.containers") or ())


def restart_count(pod: Json) -> int:
    """Return how many times its containers have restarted."""
    return sum(
        int(container_status.get("restartCount") or 0)
        for container_status in _statuses(pod, "containerStatuses")
    )


def is_ready(pod: Json) -> bool:
    """Return whether the pod's condition `Ready` is true."""
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in _statuses(pod, "conditions")
    )


def status_summary(pod: Json) -> str:
    """Return the STATUS column of `kubectl get pods`: the phase, or a more specific reason."""
    summary = str(at_path(pod, "status.reason") or at_path(pod, "status.phase") or "Unknown")
    for condition in _statuses(pod, "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "SchedulingGated":
            summary = "SchedulingGated"
    summary = (
        _init_summary(pod) or _container_summary(_statuses(pod, "containerStatuses")) or summary
    )
    if metadata(pod).get("deletionTimestamp"):
        return "Unknown" if at_path(pod, "status.reason") == "NodeLost" else "Terminating"
    return summary


def _init_summary(pod: Json) -> str:
    total = len(at_path(pod, "spec.initContainers") or ())
    for at, status in enumerate(_statuses(pod, "initContainerStatuses")):
        if at_path(status, "state.terminated.exitCode") == 0:
            continue
        reason = _reason(status)
        if reason and reason != "PodInitializing":
            return f"Init:{reason}"
        return f"Init:{at}/{total}"
    return ""


def _container_summary(statuses: Iterable[Json]) -> str:
    reasons = [_reason(status) for status in statuses]
    return next((word for word in reasons if word), "")


def _reason(status: Json) -> str:
    waiting = at_path(status, "state.waiting.reason")
    if waiting:
        return str(waiting)
    terminated = at_path(status, "state.terminated")
    if not terminated:
        return ""
    if terminated.get("reason"):
        return str(terminated["reason"])
    if terminated.get("signal"):
        return f"Signal:{terminated['signal']}"
    return f"ExitCode:{terminated.get('exitCode')}"
