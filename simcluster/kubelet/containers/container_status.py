"""The status of a pod, derived from the state of its containers; pure."""

from collections.abc import Iterable, Mapping, Sequence

from simcluster.apimachinery.objects import Json, rfc3339
from simcluster.apimachinery.pods import qos_class
from simcluster.kubelet.containers.container_spec import ContainerRole, ContainerSpec, PodSpec
from simcluster.kubelet.containers.container_state import (
    ContainerPhase,
    ContainerState,
    ContainerTermination,
    PodState,
)

PAST_DEADLINE = {
    "reason": "DeadlineExceeded",
    "message": "Pod was active on the node longer than the specified deadline",
}
"""Of the status of a pod that was active for longer than its spec allows."""
_KUBELET_CONDITIONS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")
_RESIZE = "PodResizePending"
_OWN_CONDITIONS = (*_KUBELET_CONDITIONS, _RESIZE)


def rejected_status(pod: PodSpec, previous: Json, reason: str, message: str, now: float) -> Json:
    """Return the final status of a pod that was rejected at admission."""
    return {
        **{key: previous[key] for key in ("conditions",) if key in previous},
        "phase": "Failed",
        "reason": reason,
        "message": f"Pod was rejected: {message}",
        "qosClass": qos_class(pod.obj),
        "startTime": rfc3339(now),
    }


_FOREIGN_FIELDS = (
    "extendedResourceClaimStatus",
    "nominatedNodeName",
    "resourceClaimStatuses",
)
"""Fields of a pod's status that schedulers and controllers write."""


def pod_status(pod: PodSpec, state: PodState, previous: Json, host_ip: str, now: float) -> Json:
    """Return the status of an admitted pod, with the conditions of other writers."""
    init = pod.of_role(ContainerRole.INIT, ContainerRole.SIDECAR)
    app = pod.of_role(ContainerRole.APP)
    status: Json = {
        "phase": phase(pod, state),
        "conditions": _conditions(pod, state, previous.get("conditions") or (), now),
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        "podIP": state.pod_ip,
        "podIPs": [{"ip": state.pod_ip}],
        "startTime": rfc3339(state.started_at),
        "qosClass": qos_class(pod.obj),
        "containerStatuses": [_container_status(c, state.containers[c.name]) for c in app],
    }
    if state.past_deadline and status["phase"] == "Failed":
        status |= PAST_DEADLINE
    if init:
        status["initContainerStatuses"] = [
            _container_status(c, state.containers[c.name]) for c in init
        ]
    return status


def with_foreign_conditions(status: Json, stored: Json) -> Json:
    """Return our status with the stored conditions and fields of other writers."""
    kept = {field: stored[field] for field in _FOREIGN_FIELDS if field in stored}
    own = [c for c in status.get("conditions") or () if c["type"] in _OWN_CONDITIONS]
    foreign = [c for c in stored.get("conditions") or () if c["type"] not in _OWN_CONDITIONS]
    return kept | status | {"conditions": own + foreign}


def phase(pod: PodSpec, state: PodState) -> str:
    """Return the pod's phase; a stopped pod is final for any restart policy."""
    codes = _final_codes(pod, state)
    if codes is not None:
        return "Failed" if any(codes) or not codes or state.past_deadline else "Succeeded"
    if state.stopping:
        return "Running"
    apps = [state.containers[c.name] for c in pod.of_role(ContainerRole.APP)]
    never_ran = any(c.phase is ContainerPhase.WAITING and c.last_termination is None for c in apps)
    return "Pending" if never_ran or not initialized(pod, state) else "Running"


def _final_codes(pod: PodSpec, state: PodState) -> list[int] | None:
    """Return the exit codes of a pod in its final phase; None for other pods."""
    failed = [code for code in _exit_codes(pod.of_role(ContainerRole.INIT), state) if code]
    if failed and pod.restart_policy == "Never":
        return failed
    if state.stopping:
        phases = {container.phase for container in state.containers.values()}
        running = ContainerPhase.RUNNING in phases
        return None if running else _exit_codes(pod.containers, state)
    apps = pod.of_role(ContainerRole.APP)
    if any(not _is_terminated(state.containers[spec.name]) for spec in apps):
        return None
    codes = _exit_codes(apps, state)
    restarts = {"Always": True, "OnFailure": any(codes)}.get(pod.restart_policy, False)
    return None if restarts else codes


def _exit_codes(specs: Iterable[ContainerSpec], state: PodState) -> list[int]:
    containers = [state.containers[spec.name] for spec in specs]
    return [c.termination.exit_code for c in containers if c.termination is not None]


def _is_terminated(container: ContainerState) -> bool:
    return container.phase is ContainerPhase.TERMINATED and container.termination is not None


def initialized(pod: PodSpec, state: PodState) -> bool:
    """Return whether all init containers have succeeded and all sidecars have started."""
    for spec in pod.of_role(ContainerRole.INIT, ContainerRole.SIDECAR):
        container = state.containers[spec.name]
        done = container.termination is not None and container.termination.exit_code == 0
        started = spec.role is ContainerRole.SIDECAR and bool(container.container_id)
        if not (done or started):
            return False
    return True


def _conditions(pod: PodSpec, state: PodState, previous: Sequence[Json], now: float) -> list[Json]:
    ready = (
        all(
            state.containers[c.name].phase is ContainerPhase.RUNNING
            for c in pod.of_role(ContainerRole.APP)
        )
        and not state.stopping
    )
    completed = _final_codes(pod, state) is not None
    reason = "PodCompleted" if completed else "ContainersNotReady"
    waiting = [
        c.name
        for c in pod.of_role(ContainerRole.APP)
        if state.containers[c.name].phase is not ContainerPhase.RUNNING
    ]
    message = "" if completed else f"containers with unready status: [{' '.join(waiting)}]"
    wanted: Mapping[str, tuple[bool, str, str]] = {
        "PodReadyToStartContainers": (True, "", ""),
        "Initialized": (initialized(pod, state), "ContainersNotInitialized", ""),
        "Ready": (ready, reason, message),
        "ContainersReady": (ready, reason, message),
    }
    previous_by_type = {condition["type"]: condition for condition in previous}
    others = [condition for condition in previous if condition["type"] not in _OWN_CONDITIONS]
    own = [
        _condition(kind, wanted[kind], previous_by_type.get(kind), now)
        for kind in _KUBELET_CONDITIONS
    ]
    if state.waiting_resize is not None:
        why, text = state.waiting_resize
        pending = _condition(_RESIZE, (True, "", ""), previous_by_type.get(_RESIZE), now)
        own.append({**pending, "reason": why, "message": text})
    return own + others


def _condition(kind: str, wanted: tuple[bool, str, str], old: Json | None, now: float) -> Json:
    holds, reason, message = wanted
    status = "True" if holds else "False"
    since = rfc3339(now)
    if old is not None and old.get("status") == status:
        since = old.get("lastTransitionTime") or since
    condition: Json = {"type": kind, "status": status, "lastProbeTime": None}
    condition["lastTransitionTime"] = since
    if not holds:
        condition["reason"] = reason
        if message:
            condition["message"] = message
    return condition


def _container_status(spec: ContainerSpec, state: ContainerState) -> Json:
    running = state.phase is ContainerPhase.RUNNING
    done = (
        state.termination is not None
        and state.termination.exit_code == 0
        and spec.role is ContainerRole.INIT
    )
    status: Json = {
        "name": spec.name,
        "image": spec.image,
        "imageID": f"sim://{spec.image}" if state.container_id else "",
        "ready": running or done,
        "started": running,
        "restartCount": state.restarts,
        "state": {str(state.phase): _state(state)},
        "lastState": {},
    }
    if state.container_id:
        status["containerID"] = state.container_id
    if state.container_id and state.resources:
        status["resources"] = state.resources
        status["allocatedResources"] = state.resources.get("requests") or {}
    if state.last_termination is not None and state.phase is not ContainerPhase.TERMINATED:
        status["lastState"] = {"terminated": _terminated(state.last_termination)}
    return status


def _state(state: ContainerState) -> Json:
    if state.phase is ContainerPhase.RUNNING:
        return {"startedAt": rfc3339(state.started_at)}
    if state.phase is ContainerPhase.TERMINATED and state.termination is not None:
        return _terminated(state.termination)
    return {"reason": state.reason} | ({"message": state.message} if state.message else {})


def _terminated(ending: ContainerTermination) -> Json:
    return {
        "exitCode": ending.exit_code,
        "reason": ending.reason,
        "startedAt": rfc3339(ending.started_at),
        "finishedAt": rfc3339(ending.finished_at),
        "containerID": ending.container_id,
    } | ({"message": ending.message} if ending.message else {})
