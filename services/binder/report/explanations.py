"""What a pod's owner is told: the condition PodScheduled and core/v1 Events, as kubectl shows them.

Reasons and wording are kube-scheduler's where it has any (`FailedScheduling`, `Scheduled`), so that
what people grep for still works. https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/
"""

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.model.events.node_events import HealthChanged, ShareRefused, ViolationFound
from shared.model.events.pod_events import PlacementRefused, PodRejected
from shared.model.lease import Lease
from shared.model.names import Namespace, PodUid

COMPONENT = "leasehold"
MAX_MESSAGE = 1024
"""The API server refuses Events whose message is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesEvent:
    """One thing to tell about a pod, or a node; equal notes are one Event with a count.

    Of a node, `pod` is its name, as in the kubelet's own Events, and the namespace `default`.
    """

    pod: PodUid
    namespace: Namespace
    name: str
    reason: str
    message: str
    warning: bool = True
    kind: str = "Pod"

    @property
    def event_name(self) -> str:
        """The Event's name: the same for the same note, whoever writes it."""
        text = "\n".join((self.pod, self.reason, self.message))
        return f"{self.name}.{hashlib.blake2s(text.encode(), digest_size=8).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a pod waits, as its condition PodScheduled is to say it."""

    pod: PodUid
    namespace: Namespace
    name: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCondition:
    """A pod's condition PodScheduled as read, with the version it was read at."""

    uid: PodUid
    node: str
    resource_version: str
    status: str = ""
    reason: str = ""
    message: str = ""


def explain(event: PlacementRefused | PodRejected) -> Explanation:
    """Say why the pod waits."""
    message = event.refusal.text if isinstance(event, PlacementRefused) else event.reason
    return Explanation(
        pod=event.pod, namespace=event.namespace, name=event.name, message=cut(message)
    )


def explain_deferred(lease: Lease, why: str) -> Explanation:
    """Say why a pod with a reservation is not bound yet."""
    return Explanation(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        message=cut(f"its share is reserved on node {lease.node}, which must wait: {why}"),
    )


def waiting_event(why: Explanation) -> KubernetesEvent:
    """Return the Event of a pod that waits."""
    return KubernetesEvent(
        pod=why.pod,
        namespace=why.namespace,
        name=why.name,
        reason="FailedScheduling",
        message=why.message,
    )


def bound_event(lease: Lease) -> KubernetesEvent:
    """Return the Event of a pod that was bound."""
    return lease_event(
        lease,
        "Scheduled",
        f"Successfully assigned {lease.namespace}/{lease.name} to {lease.node}",
        warning=False,
    )


def lease_event(
    lease: Lease, reason: str, message: str, *, warning: bool = True
) -> KubernetesEvent:
    """Return an Event about a lease's pod."""
    return KubernetesEvent(
        pod=lease.pod,
        namespace=lease.namespace,
        name=lease.name,
        reason=reason,
        message=cut(message),
        warning=warning,
    )


def share_event(event: ShareRefused) -> KubernetesEvent | None:
    """Return the Event of a container that its node refused, if it is known whose it is."""
    if event.pod is None or event.namespace is None or not event.name:
        return None
    return KubernetesEvent(
        pod=event.pod,
        namespace=event.namespace,
        name=event.name,
        reason="ShareRefused",
        message=cut(f"node {event.node} refused container {event.container}: {event.reason}"),
    )


def violation_event(event: ViolationFound) -> KubernetesEvent:
    """Return the Event of a container that breaks a rule of its node."""
    return KubernetesEvent(
        pod=event.pod,
        namespace=event.namespace,
        name=event.name,
        reason=event.reason,
        message=cut(f"node {event.node}: {event.message}"),
    )


def health_events(event: HealthChanged) -> list[KubernetesEvent]:
    """Return the Events of a device's health: of its node, and of each pod with a lease on it."""
    device = f"GPU {event.index} ({event.device}) of node {event.node}"
    if event.healthy:
        reason, message = "GpuRecovered", f"{device} is healthy again"
        advice = ""
    else:
        reason, message = "GpuCordoned", f"{device} is cordoned: {event.fault}"
        advice = "; the lease stays, and what runs there may fail: to move, delete the pod"
    node = KubernetesEvent(
        pod=PodUid(event.node),
        namespace=Namespace("default"),
        name=event.node,
        reason=reason,
        message=cut(message),
        warning=not event.healthy,
        kind="Node",
    )
    pods = [
        KubernetesEvent(
            pod=holder.pod,
            namespace=holder.namespace,
            name=holder.name,
            reason=reason,
            message=cut(message + advice),
            warning=not event.healthy,
        )
        for holder in event.holders
    ]
    return [node, *pods]


def cut(message: str) -> str:
    """Shorten a message to what the API server takes."""
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"


def condition_patch(why: Explanation, seen: ObservedCondition | None, now_s: float) -> Any:
    """Return the patch of `pods/status` that says why the pod waits, or None if nothing is to do.

    It names the version that was read, so that it can never undo a binding made meanwhile.
    """
    if seen is None or seen.uid != why.pod or seen.node:
        return None
    if (seen.status, seen.reason, seen.message) == ("False", "Unschedulable", why.message):
        return None
    condition: dict[str, Any] = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": why.message,
    }
    if seen.status != "False":
        condition["lastTransitionTime"] = stamp(now_s)
    return {
        "metadata": {"uid": why.pod, "resourceVersion": seen.resource_version},
        "status": {"conditions": [condition]},
    }


def event_body(
    note: KubernetesEvent, *, count: int, first_at: float, last_at: float
) -> Mapping[str, Any]:
    """Return the core/v1 Event of a note that was made `count` times."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": note.event_name, "namespace": note.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": note.kind,
            **({"namespace": note.namespace} if note.kind == "Pod" else {}),
            "name": note.name,
            "uid": note.pod,
        },
        "reason": note.reason,
        "message": note.message,
        "type": "Warning" if note.warning else "Normal",
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": "",
        "count": count,
        "firstTimestamp": stamp(first_at),
        "lastTimestamp": stamp(last_at),
    }


def recount(count: int, last_at: float) -> Mapping[str, Any]:
    """Return the patch of an Event that happened again."""
    return {"count": count, "lastTimestamp": stamp(last_at)}


def stamp(at: float) -> str:
    """Write Unix seconds as Kubernetes writes times."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def summarize(reports: Sequence[str], shown: int = 5) -> str:
    """Join findings for one log line."""
    more = f" and {len(reports) - shown} more" if len(reports) > shown else ""
    return "; ".join(reports[:shown]) + more
