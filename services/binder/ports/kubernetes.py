"""Ports to the API server: pods, conditions, Events and evictions."""

from collections.abc import Mapping
from typing import Any, Protocol

from services.binder.ports.observations import (
    ObservedCondition,
    PodAnnotations,
    PodSnapshot,
    SelectedPod,
)
from shared.model.names import NodeName
from shared.model.node import AntiAffinityTerm


class PodReader(Protocol):
    """Reads pods."""

    async def get(self, namespace: str, name: str) -> PodSnapshot | None:
        """Return the pod as it is now; None: there is none."""
        ...


class SelectedPodReader(Protocol):
    """Reads the pods that required anti-affinity selects."""

    async def list_selected(
        self, term: AntiAffinityTerm, node: NodeName | None
    ) -> list[SelectedPod]:
        """Return active pods of schedulers without the extender.

        With a `node`, only those on it or on none yet.
        """
        ...

    async def node_label(self, name: NodeName, key: str) -> str | None:
        """Return a label of a node; None: there is no such label or node."""
        ...


class NodeReader(Protocol):
    """Reads nodes."""

    async def node_exists(self, name: NodeName) -> bool:
        """Return whether the API server has the node now."""
        ...


class PodBindings(PodReader, Protocol):
    """Binds pods, and reads them after an error."""

    async def bind_pod(  # noqa: PLR0917 - the API client's own order
        self,
        namespace: str,
        name: str,
        uid: str,
        node: str,
        annotations: Mapping[str, str],
        labels: Mapping[str, str] | None = None,
        traceparent: str | None = None,
    ) -> None:
        """Bind the pod with this uid, in one write. Raises a LeaseholdError by the response."""
        ...


class PodGates(Protocol):
    """Scheduling gates of pods."""

    async def remove_gate(self, namespace: str, name: str, uid: str, gate: str) -> bool:
        """Remove a scheduling gate from the pod with this uid; False if that pod is gone."""
        ...


class PodConditions(Protocol):
    """Conditions of pods."""

    async def get_condition(self, namespace: str, name: str) -> ObservedCondition | None:
        """Return the pod's condition PodScheduled; None: there is no such pod."""
        ...

    async def patch_status(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Apply a strategic merge patch to `pods/status`.

        Raises ConflictError if the pod's resource version has changed.
        """
        ...


class AnnotatedPods(Protocol):
    """Annotations of pods."""

    async def get_annotations(self, namespace: str, name: str) -> PodAnnotations | None:
        """Return a pod's annotations; None: there is no such pod."""
        ...

    async def annotate(
        self, namespace: str, name: str, read: PodAnnotations, annotations: Mapping[str, str]
    ) -> None:
        """Add annotations, in one write. Raises ConflictError if the pod has changed since."""
        ...


class PodAnnotator(Protocol):
    """The annotation of pods that wait for kube-scheduler."""

    async def add_annotation(
        self, namespace: str, name: str, uid: str, key: str, value: str
    ) -> None:
        """Set one annotation of the pod with this uid. Raises a LeaseholdError by the response."""
        ...


class EventApi(Protocol):
    """Core/v1 Events."""

    async def create_event(self, namespace: str, body: Mapping[str, Any]) -> None:
        """Create an Event. Raises ConflictError if there is one of that name."""
        ...

    async def patch_event(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        """Change an Event. Raises RequestError if there is none."""
        ...

    async def get_event_count(self, namespace: str, name: str) -> int:
        """Return the stored count of an Event; 0 if there is none."""
        ...


class BinderPods(
    PodBindings,
    PodGates,
    PodConditions,
    AnnotatedPods,
    PodAnnotator,
    EventApi,
    NodeReader,
    SelectedPodReader,
    Protocol,
):
    """All ports to the API server except those for evictions."""
