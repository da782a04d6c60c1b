"""Required affinity of pods of a gang to one another; pure."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from shared.dialects.gang_topologies import GangTopology
from shared.kubernetes.types import ApiPodSpec, PodAffinityTerm
from shared.placing.anti_affinity import matches_labels
from shared.pods.pod_anti_affinity import REQUIRED, requirements_of


class Labelled(Protocol):
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def namespace(self) -> str: ...


def affinity_to_members(spec: ApiPodSpec, pod: Labelled) -> Mapping[int, str]:
    """Pods of a gang have equal labels: a term that selects the pod means that they share a domain.

    Return topology keys by the number of the term. Terms that select other namespaces are left out,
    and what no API server stores.
    """
    affinity = spec.affinity
    required = (affinity.pod_affinity or {}).get(REQUIRED) if affinity else None
    try:
        terms = msgspec.convert(required or (), tuple[PodAffinityTerm, ...])
    except msgspec.ValidationError:
        return {}
    return {
        number: term.topology_key
        for number, term in enumerate(terms)
        if term.label_selector is not None
        and term.namespace_selector is None
        and set(term.namespaces) <= {pod.namespace}
        and matches_labels(requirements_of(term.label_selector), pod.labels)
    }


def with_affinity(topology: GangTopology, keys: Mapping[int, str]) -> GangTopology:
    required = tuple(dict.fromkeys((*topology.required, *keys.values())))
    return GangTopology(required, topology.preferred)
