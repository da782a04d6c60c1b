"""The attributes of spans about pods and ResourceClaims.

Trace viewers search by OpenTelemetry's names; what has none there begins with `leasehold.`.

https://opentelemetry.io/docs/specs/semconv/registry/attributes/k8s/
"""

from collections.abc import Mapping
from typing import Any

from opentelemetry.util.types import AttributeValue

from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.event import Event
from shared.model.events.pod_events import BindingFailed, PodRejected, PodTerminated
from shared.model.leases.lease import Lease
from shared.model.requests.placement import Refusal

Attributes = dict[str, AttributeValue]

POD_UID = "k8s.pod.uid"
POD_NAME = "k8s.pod.name"
NAMESPACE = "k8s.namespace.name"
NODE = "k8s.node.name"
CONTAINER = "k8s.container.name"
PHASE = "k8s.pod.status.phase"
CLAIM = "leasehold.claim.name"
CLAIM_UID = "leasehold.claim.uid"
CLAIM_PODS = "leasehold.claim.pods"
REASON = "leasehold.reason"
REASON_CODE = "leasehold.reason.code"
EXCLUDED_NODES = "leasehold.excluded_nodes."
"""Before a reason."""


def holder_of(attributes: Mapping[str, AttributeValue]) -> str:
    return str(attributes.get(CLAIM_UID) or attributes.get(POD_UID) or "")


def pod_attributes(event: Event) -> Attributes:
    """Return the pod or the ResourceClaim of an event; empty if it is about neither.

    >>> from shared.model.events.pod_events import BindingFailed
    >>> pod_attributes(BindingFailed(pod="1f0c", namespace="a", name="b", reason="timeout"))
    {'k8s.pod.uid': '1f0c', 'k8s.pod.name': 'b', 'k8s.namespace.name': 'a'}
    """
    subject: Any = event
    allocation = getattr(subject, "allocation", None)
    lease = getattr(allocation or subject, "lease", None)
    if isinstance(lease, Lease):
        return lease_attributes(lease)
    claim = getattr(subject, "claim", None)
    if isinstance(claim, AllocatedClaim):
        return _claim_attributes(claim)
    is_claim = isinstance(claim, str)
    uid = claim if is_claim else getattr(subject, "pod", None)
    if not uid:
        return {}
    namespace = getattr(subject, "namespace", None)  # requests about a pod name it by UID alone
    name = getattr(subject, "name", "")
    node = getattr(subject, "node", None)
    return _attributes(namespace, name, uid, node, is_claim=is_claim)


def lease_attributes(lease: Lease) -> Attributes:
    is_claim = lease.claim is not None
    return _attributes(lease.namespace, lease.name, lease.pod, lease.node, is_claim=is_claim)


def _attributes(
    namespace: str | None, name: str, uid: str, node: str | None, *, is_claim: bool
) -> Attributes:
    uid_key, name_key = (CLAIM_UID, CLAIM) if is_claim else (POD_UID, POD_NAME)
    attributes = {uid_key: uid, name_key: name, NAMESPACE: namespace, NODE: node}
    return {key: str(value) for key, value in attributes.items() if value}


def _claim_attributes(claim: AllocatedClaim) -> Attributes:
    """A single pod is found by the names by which pods are searched."""
    attributes = _attributes(claim.namespace, claim.name, claim.claim, claim.node, is_claim=True)
    attributes[CLAIM_PODS] = claim.consumer_names
    if len(claim.consumers) == len(claim.consumer_names) == 1:
        attributes[POD_UID] = str(claim.consumers[0])
        attributes[POD_NAME] = claim.consumer_names[0]
    return attributes


def reason_attributes(event: Event) -> Attributes:
    refusal = getattr(event, "refusal", None)
    if isinstance(refusal, Refusal):
        return refusal_attributes(refusal)
    attributes: Attributes = {}
    reason = getattr(event, "rejection", "") or getattr(event, "reason", "")
    if reason:
        attributes[REASON] = reason
    if isinstance(event, PodTerminated) and event.phase:
        attributes[PHASE] = event.phase
    return attributes


def refusal_attributes(refusal: Refusal) -> Attributes:
    """Return a refusal as attributes.

    >>> refusal_attributes(Refusal(reason="0/2 nodes are available", counts=(("Cordoned", 2),)))
    {'leasehold.reason': '0/2 nodes are available', 'leasehold.permanent': False, \
'leasehold.reason.code': 'Cordoned', 'leasehold.excluded_nodes.Cordoned': 2}
    """
    attributes: Attributes = {REASON: refusal.reason, "leasehold.permanent": refusal.permanent}
    if refusal.hint:
        attributes["leasehold.hint"] = refusal.hint
    if refusal.quota:
        attributes["leasehold.quota"] = refusal.quota
    if refusal.counts:
        attributes[REASON_CODE] = refusal.counts[0][0]
    attributes.update({f"{EXCLUDED_NODES}{code}": nodes for code, nodes in refusal.counts})
    return attributes


def fault_of(event: Event) -> str:
    """Empty if the pod can run and has not failed."""
    match event:
        case BindingFailed(reason=reason) | PodRejected(reason=reason, foreign=False):
            return reason
        case PodTerminated(phase="Failed", rejection=rejection):
            return rejection or "the pod has failed"
    return ""
