"""A pod as the API server has it, with its Events; pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import yaml

from shared.kubernetes.full_pods import FullContainer, FullPod
from shared.kubernetes.pod_status import PodEvent, TimedContainerStatus, TimedPod, seconds_of
from shared.kubernetes.types import OwnerReference, Quantities
from shared.model.names import Namespace, PodUid
from shared.model.views.view import View

HIDDEN = "(hidden)"
"""In place of the values of variables, which may be secrets."""
MOST_EVENTS = 50
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


class ContainerView(View, frozen=True, kw_only=True):
    """A container: what it requests, and what it does."""

    name: str
    image: str
    init: bool = False
    requests: dict[str, str]
    limits: dict[str, str]
    state: str = ""
    """Such as `running` or `ended with code 1: Error`; empty before the kubelet reports it."""
    started: float | None = None
    ended: float | None = None
    restarts: int = 0


class ConditionView(View, frozen=True, kw_only=True):
    type: str
    status: str
    reason: str
    message: str
    at: float | None = None


class PodEventView(View, frozen=True, kw_only=True):
    """An Event of Kubernetes about the pod."""

    at: float | None
    type: str
    reason: str
    message: str
    count: int
    source: str


class PodObjectView(View, frozen=True, kw_only=True):
    """A pod of the API server, and its latest Events."""

    pod: PodUid
    namespace: Namespace
    name: str
    owner: str
    """Such as `Job train`."""
    phase: str
    reason: str
    scheduler: str
    priority: int | None
    priority_class: str
    node_selector: dict[str, str]
    gates: tuple[str, ...]
    created: float | None
    ended: float | None
    """Null until all containers have."""
    containers: tuple[ContainerView, ...]
    conditions: tuple[ConditionView, ...]
    events: tuple[PodEventView, ...] = ()
    """The latest first; at most 50."""
    events_hidden: str = ""
    manifest: str
    """YAML."""


def event_view(event: PodEvent) -> PodEventView:
    repeated = event.series.count if event.series else event.count
    return PodEventView(
        at=event.at,
        type=event.type,
        reason=event.reason,
        message=event.message,
        count=repeated or 1,
        source=event.reporting_component or event.source.component,
    )


def pod_object(
    body: bytes, events: Iterable[PodEvent] = (), events_hidden: str = ""
) -> PodObjectView:
    """Raises msgspec.ValidationError if the JSON is no pod."""
    pod = msgspec.json.decode(body, type=FullPod)
    status = msgspec.json.decode(body, type=TimedPod).status
    spec = pod.spec
    statuses = {
        status_of.name: status_of
        for status_of in (*status.init_container_statuses, *status.container_statuses)
    }
    containers = tuple(
        _container(container, statuses.get(container.name, TimedContainerStatus()), init=init)
        for init, of_kind in ((True, spec.init_containers), (False, spec.containers))
        for container in of_kind
    )
    ends = [container.ended for container in containers if container.ended is not None]
    latest = sorted(events, key=lambda event: event.at or 0.0, reverse=True)
    return PodObjectView(
        pod=PodUid(pod.metadata.uid),
        namespace=Namespace(pod.metadata.namespace),
        name=pod.metadata.name,
        owner=_controller(pod.metadata.owner_references),
        phase=pod.status.phase,
        reason=pod.status.reason,
        scheduler=spec.scheduler_name,
        priority=spec.priority,
        priority_class=spec.priority_class_name,
        node_selector=spec.node_selector,
        gates=tuple(gate.name for gate in spec.scheduling_gates),
        created=seconds_of(pod.metadata.creation_timestamp),
        ended=max(ends) if ends and len(ends) == len(containers) else None,
        containers=containers,
        conditions=tuple(
            ConditionView(
                type=condition.type,
                status=condition.status,
                reason=condition.reason,
                message=condition.message,
                at=seconds_of(condition.last_transition_time),
            )
            for condition in status.conditions
        ),
        events=tuple(event_view(event) for event in latest[:MOST_EVENTS]),
        events_hidden=events_hidden,
        manifest=manifest_of(msgspec.json.decode(body)),
    )


def manifest_of(pod: dict[str, Any]) -> str:
    """Leave out what may be secret and what only servers need."""
    metadata = {key: value for key, value in pod["metadata"].items() if key != "managedFields"}
    annotations = metadata.get("annotations") or {}
    if LAST_APPLIED in annotations:  # it has the values of variables, too
        metadata["annotations"] = {**annotations, LAST_APPLIED: HIDDEN}
    spec = dict(pod.get("spec") or {})
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        if kind in spec:
            spec[kind] = [_without_values(container) for container in spec[kind]]
    shown = {"apiVersion": "v1", "kind": "Pod", **pod, "metadata": metadata, "spec": spec}
    text: str = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    return text


def _without_values(container: Mapping[str, Any]) -> dict[str, Any]:
    variables = [
        {**variable, "value": HIDDEN} if "value" in variable else variable
        for variable in container.get("env") or ()
    ]
    return {**container, **({"env": variables} if variables else {})}


def _container(
    container: FullContainer, status: TimedContainerStatus, *, init: bool
) -> ContainerView:
    terminated = status.state.terminated
    started = terminated or status.state.running
    return ContainerView(
        name=container.name,
        image=container.image,
        init=init,
        requests=dict(_amounts(container.resources.requests)),
        limits=dict(_amounts(container.resources.limits)),
        state=status.state.text,
        started=seconds_of(started.started_at) if started else None,
        ended=seconds_of(terminated.finished_at) if terminated else None,
        restarts=status.restart_count,
    )


def _amounts(quantities: Quantities) -> Iterator[tuple[str, str]]:
    for name, amount in quantities.items():
        yield name, str(amount)


def _controller(owners: Iterable[OwnerReference]) -> str:
    return next((f"{owner.kind} {owner.name}" for owner in owners if owner.controller), "")
