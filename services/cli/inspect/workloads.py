"""The pod that `explain` shows of a workload, and why a workload has no pods."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from services.cli.api_client import KubernetesApi, NothingFoundError
from services.cli.arguments import WORKLOADS
from services.cli.pod_summary import PodSummary, summary_of
from shared.kubernetes.errors import ForbiddenError
from shared.kubernetes.paths import objects_path
from shared.kubernetes.types import ApiPod
from shared.model.quantity import timestamp

FAILED_CREATE = "FailedCreate"
DENIED = "denied the request: "
LONGEST_AGO = datetime.min.replace(tzinfo=UTC)


class _Object(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""


class _Event(msgspec.Struct, frozen=True, rename="camel"):
    involved_object: _Object = _Object()
    reason: str = ""
    message: str = ""
    last_timestamp: datetime | None = None
    event_time: datetime | None = None

    @property
    def at(self) -> datetime:
        return self.last_timestamp or self.event_time or LONGEST_AGO


def pod_to_explain(server: KubernetesApi, namespace: str, text: str) -> PodSummary:
    """Return a pod by its name, or the one of a workload that waits, or else its newest.

    Raises NothingFoundError with why a workload has no pods, if its controller reported that.
    """
    before, _, name = text.rpartition("/")
    kind = WORKLOADS.get(before.partition(".")[0], "")
    if kind:
        missing = NothingFoundError(f"there is no pod of {kind} {namespace}/{name}")
    else:
        try:
            return server.pod(namespace, name)
        except NothingFoundError as error:
            missing = error
    try:
        pods = list(_pods_of(server, namespace, kind, name))
        event = None if pods else _newest_failure(server, namespace, kind, name)
    except ForbiddenError:
        raise missing from None
    if pods:
        return summary_of(min(pods, key=_order))
    if event is None:
        raise missing
    of = f"{kind} {namespace}/{name}" if kind else f"{namespace}/{name}"
    raise NothingFoundError(
        f"there is no pod of {of}: its {event.involved_object.kind} {event.involved_object.name} "
        f"could not create one, last at {timestamp(event.at.timestamp())}: "
        f"{event.message.partition(DENIED)[2] or event.message}"
    )


def _order(pod: ApiPod) -> tuple[bool, bool, float]:
    created = pod.metadata.creation_timestamp or LONGEST_AGO
    ended = pod.status.phase in {"Succeeded", "Failed"}
    return ended, bool(pod.spec.node_name), -created.timestamp()


def _pods_of(server: KubernetesApi, namespace: str, kind: str, name: str) -> Iterator[ApiPod]:
    for pod in server.items(objects_path(namespace, "pods"), ApiPod):
        owners = pod.metadata.owner_references
        if any(_is_of(owner.kind, owner.name, kind, name) for owner in owners):
            yield pod


def _newest_failure(server: KubernetesApi, namespace: str, kind: str, name: str) -> _Event | None:
    path = objects_path(namespace, "events")
    events = [
        event
        for event in server.items(path, _Event, {"fieldSelector": f"reason={FAILED_CREATE}"})
        if event.reason == FAILED_CREATE
        and (
            _is_of(event.involved_object.kind, event.involved_object.name, kind, name)
            or (not kind and name.startswith(f"{event.involved_object.name}-"))
        )
    ]
    return max(events, key=lambda event: event.at, default=None)


_MADE_BY = {"ReplicaSet": "Deployment", "Job": "CronJob"}
"""Their names are those of the objects that create them, and a revision or a time."""


def _is_of(owner_kind: str, owner: str, kind: str, name: str) -> bool:
    """Whether an owner of pods is the workload, or was created by it; an empty kind is any."""
    if owner == name:
        return kind in {"", owner_kind}
    return (
        kind in {"", _MADE_BY.get(owner_kind)}
        and owner_kind in _MADE_BY
        and bool(re.fullmatch(rf"{re.escape(name)}-[a-z0-9]+", owner))
    )
