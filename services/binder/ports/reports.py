"""Reports to operators: Kubernetes Events, pod conditions and metrics; pure."""

import hashlib
from typing import Protocol

import msgspec

from shared.model.names import Namespace, PodUid


class KubernetesEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a core/v1 Event about a pod, a ResourceClaim or a node.

    Equal ones are one Event with a count.

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
    def event_name(self) -> str:
        """The Event's name: every replica derives the same."""
        text = "\n".join((self.pod, self.reason, self.message))
        return f"{self.name}.{hashlib.blake2s(text.encode(), digest_size=8).hexdigest()}"


class EventRecorder(Protocol):
    """Writes Kubernetes Events in the background."""

    def record(self, event: KubernetesEvent, *, once: bool = False) -> None:
        """Queue an Event; `once`: do not count an equal one up."""
        ...
