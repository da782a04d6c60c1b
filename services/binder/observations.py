"""Pods and PodDisruptionBudgets, as the binder reads them from the API server; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.model.names import Namespace, NodeName, PodUid


@dataclass(frozen=True, slots=True)
class PodSnapshot:
    """A pod as the API server has it now."""

    uid: PodUid
    node: NodeName | None
    deleting: bool = False
    """Whether it has a deletion timestamp."""
    terminal: bool = False
    """Whether its phase is Succeeded or Failed."""
    lease: str = ""
    """The copy of its lease; empty: it carries none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCondition:
    """A pod's condition PodScheduled, with the pod's resource version."""

    uid: PodUid
    node: str
    resource_version: str
    status: str = ""
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedPod:
    """A pod that a selector selects."""

    uid: PodUid
    namespace: Namespace
    name: str
    node: NodeName | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAnnotations:
    """A pod's annotations, with its resource version."""

    uid: PodUid
    resource_version: str
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """Facts that decide whether a pod may be evicted, besides its lease."""

    pod: PodUid
    namespace: Namespace
    name: str
    owner: str = ""
    """Uid of its controller; empty: none."""
    labels: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0
    preempts: bool = True
    preemptible: bool = True
    deleting: bool = False
    """Whether it has a deletion timestamp."""
    node: str = ""
    """Where it runs; empty: it is not bound."""
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DisruptionBudget:
    """A PodDisruptionBudget: the pods it selects, and how many of them may be evicted now."""

    name: str
    """`NAMESPACE/NAME`."""
    pods: frozenset[PodUid]
    allowed: int
