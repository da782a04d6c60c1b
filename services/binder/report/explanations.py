"""Conditions and core/v1 Events that explain why a pod waits and what happened to it; pure.

Reasons and wording are kube-scheduler's if it has any (`FailedScheduling`, `Scheduled`).
https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shared.model.bounds import NAME, cut
from shared.model.devices.device import END_LEFTOVERS, Device
from shared.model.events.node_events import (
    DeviceReported,
    HealthChanged,
    LeaseHolder,
    ShareRefused,
    ViolationFound,
)
from shared.model.events.plan_events import StartReported
from shared.model.events.pod_events import (
    MUST_WAIT,
    PLANNED_START,
    PlacementRefused,
    PodGated,
    PodQueued,
    PodRejected,
    PodTerminated,
)
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import Reservation, UnreadableRecord
from shared.model.leases.preemption import ClaimingPod, Victim
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.quantity import timestamp
from shared.pods.observed_pod import AGENT_REFUSES, advice, causes
from shared.pods.pod_snapshot import PodSnapshot

COMPONENT = "leasehold"
FAILED = "FailedScheduling"
PLANNED = "GPUStartPlanned"
WITHDRAWN = "GPUStartWithdrawn"
NO_END = "GPUStartUnknown"
Subject = (
    ClaimingPod | Lease | LeaseHolder | PlacementRefused | PodGated | PodQueued | PodRejected
    | PodTerminated | Reservation | StartReported | Victim | ViolationFound
)  # fmt: skip
"""Names a pod, or a ResourceClaim."""


class KubernetesEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a core/v1 Event; equal ones are one Event with a count.

    For a node, `pod` is its name, as in the kubelet's own Events, and the namespace `default`.
    """

    pod: PodUid
    namespace: Namespace
    name: str
    reason: str
    message: str
    warning: bool = True
    kind: str = "Pod"
    """`Pod`, `ResourceClaim` or `Node`."""

    @property
    def is_of_start(self) -> bool:
        return self.reason in {PLANNED, WITHDRAWN, NO_END}

    @property
    def event_name(self) -> str:
        """Every replica derives the same name."""
        text = "\n".join((self.pod, self.reason, self.message))
        digest = hashlib.blake2s(text.encode(), digest_size=8).hexdigest()
        return f"{self.name[: NAME - len(digest) - 1].rstrip('-.')}.{digest}"


def event_of(
    about: Subject, reason: str, message: str, *, warning: bool = True, kind: str = "Pod"
) -> KubernetesEvent:
    return KubernetesEvent(
        pod=about.pod,
        namespace=about.namespace,
        name=about.name,
        reason=reason,
        message=cut(message),
        warning=warning,
        kind=kind,
    )


def explain(event: PlacementRefused | PodRejected) -> KubernetesEvent:
    text = event.refusal.text if isinstance(event, PlacementRefused) else event.reason
    foreign = isinstance(event, PodRejected) and event.foreign
    return event_of(event, "UnknownResource" if foreign else FAILED, text)


def explain_deferred(lease: Lease, reason: str) -> KubernetesEvent:
    text = f"its share is reserved on node {lease.node}{MUST_WAIT}{reason}"
    return event_of(lease, FAILED, text)


def explain_unbound(lease: Lease, reason: str) -> KubernetesEvent:
    return event_of(lease, FAILED, f"its share on node {lease.node} was given back: {reason}")


def bound_event(lease: Lease) -> KubernetesEvent:
    text = f"Successfully assigned {lease.namespace}/{lease.name} to {lease.node}"
    return event_of(lease, "Scheduled", text, warning=False)


def share_event(event: ShareRefused) -> KubernetesEvent | None:
    """Return None if the pod or ResourceClaim is unknown."""
    if event.pod is None or event.namespace is None or not event.name:
        return None
    what = "it" if event.claim else f"container {event.container}"
    return KubernetesEvent(
        pod=event.pod,
        namespace=event.namespace,
        name=event.name,
        reason="ShareRefused",
        message=cut(f"node {event.node} refused {what}: {event.reason}"),
        kind=_kind_of(event),
    )


def rejected_event(event: PodTerminated) -> KubernetesEvent | None:
    """Return None also if the node's agent refused the pod: `ShareRefused` has the reason."""
    if not event.rejection or event.node is None or AGENT_REFUSES in event.rejection:
        return None
    return event_of(
        event,
        "RejectedByKubelet",
        f"the kubelet of node {event.node} rejected it: {causes(event.rejection)}; "
        f"{advice(event.rejection, event.node)}. The kubelet reports {event.rejection}",
    )


def violation_event(event: ViolationFound) -> KubernetesEvent:
    text = f"node {event.node}: {event.message}"
    return event_of(event, event.reason, text, kind=_kind_of(event))


def unreadable_event(record: UnreadableRecord, lease: Lease | None = None) -> KubernetesEvent:
    what = "the lease" if lease else f"the record of {record.kind.removesuffix('s')} {record.key}"
    return KubernetesEvent(
        pod=lease.pod if lease else PodUid(record.node),
        namespace=lease.namespace if lease else Namespace("default"),
        name=lease.name if lease else record.node,
        reason="LedgerRecordUnreadable",
        message=cut(f"{what} was damaged in Redis; it is written anew from pods and agents"),
        kind="Node" if lease is None else "ResourceClaim" if lease.claim else "Pod",
    )


def health_events(event: HealthChanged) -> list[KubernetesEvent]:
    device = f"GPU {event.index} ({event.device}) of node {event.node}"
    if event.healthy:
        reason = "GpuRecovered"
        message = f"{device} is healthy again"
        advice = ""
    else:
        reason = "GpuCordoned"
        message = f"{device} is cordoned: {event.fault}"
        advice = (
            "; the lease stays, and its containers may fail. To move the pod, delete it if a "
            "controller creates it again; without one, save its manifest before"
        )
    node = _node_event(event.node, reason, message, warning=not event.healthy)
    owners = [
        event_of(holder, reason, message + advice, warning=not event.healthy, kind=_kind_of(holder))
        for holder in event.holders
    ]
    return [node, *owners]


def refused_event(node: NodeName, reason: str) -> KubernetesEvent:
    return _node_event(
        node,
        "AgentMessageRefused",
        f"Leasehold rejected a message of the node's agent: {reason}. The node gets no new pods "
        "until its agent sends a valid report. If the agent is not broken, its credentials may be "
        "stolen: delete the Node to lock it out",
    )


def leftovers_event(node: NodeName, device: Device) -> KubernetesEvent:
    name = f"GPU {device.index} ({device.uuid})"
    held = "; ".join(leftover.text(name) for leftover in device.leftovers)
    return _node_event(
        node,
        "GpuHeldByEndedPod",
        f"{held}. No other pod gets it until they have ended: {END_LEFTOVERS}",
    )


def config_event(event: DeviceReported) -> KubernetesEvent:
    return _node_event(event.node, "DeviceConfigInvalid", event.config_errors)


def shared_device_event(node: NodeName, device: DeviceUuid, owner: NodeName) -> KubernetesEvent:
    return _node_event(
        node,
        "GpuOnTwoNodes",
        f"device {device} stays with node {owner}, which reports it, too. If it has moved here, "
        f"restart the agent of node {owner}, or delete that Node if it is gone",
    )


def _node_event(
    node: NodeName, reason: str, message: str, *, warning: bool = True
) -> KubernetesEvent:
    return KubernetesEvent(
        pod=PodUid(node),
        namespace=Namespace("default"),
        name=node,
        reason=reason,
        message=cut(message),
        warning=warning,
        kind="Node",
    )


def _kind_of(holder: ViolationFound | ShareRefused | LeaseHolder) -> str:
    return "ResourceClaim" if holder.claim else "Pod"


def condition_patch(
    explanation: KubernetesEvent, observed: PodSnapshot | None, now_s: float
) -> Mapping[str, Any] | None:
    """Return the patch of `pods/status`, or None if none is due.

    A planned start stays behind a new reason until it is changed or withdrawn. The patch names the
    resource version that was read, so that it never undoes a binding.
    """
    if observed is None or observed.pod != explanation.pod or observed.node:
        return None
    now = observed.scheduled
    reason, mark, start = now.message.partition(PLANNED_START)
    if explanation.is_of_start:
        start = "" if explanation.reason == WITHDRAWN else PLANNED_START + explanation.message
        message = f"{reason.rstrip()} {start}".strip()
    else:
        message = f"{explanation.message} {mark}{start}".rstrip()
    if (now.status, now.reason, now.message) == ("False", "Unschedulable", message):
        return None
    condition: dict[str, Any] = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    if now.status != "False":
        condition["lastTransitionTime"] = timestamp(now_s)
    return {
        "metadata": {"uid": explanation.pod, "resourceVersion": observed.resource_version},
        "status": {"conditions": [condition]},
    }


def event_body(
    event: KubernetesEvent, *, count: int, first_at: float, last_at: float
) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event.event_name, "namespace": event.namespace},
        "involvedObject": {
            "apiVersion": "resource.k8s.io/v1" if event.kind == "ResourceClaim" else "v1",
            "kind": event.kind,
            **({"namespace": event.namespace} if event.kind != "Node" else {}),
            "name": event.name,
            "uid": event.pod,
        },
        "reason": event.reason,
        "message": event.message,
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": "",
        "count": count,
        "firstTimestamp": timestamp(first_at),
        "lastTimestamp": timestamp(last_at),
    }


def count_patch(count: int, last_at: float) -> Mapping[str, Any]:
    return {"count": count, "lastTimestamp": timestamp(last_at)}


def summarize(findings: Sequence[str], shown: int = 5) -> str:
    """Join findings for one log line.

    >>> summarize(["a", "b", "c"], shown=2)
    'a; b and 1 more'
    """
    more = f" and {len(findings) - shown} more" if len(findings) > shown else ""
    return "; ".join(findings[:shown]) + more
