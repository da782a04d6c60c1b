"""Where required anti-affinity of running pods keeps a pod away; pure."""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import structs

from shared.model.devices.node import LABEL_OPERATORS, AntiAffinityTerm, LabelRequirement, NodeFacts
from shared.model.events.pod_events import PodQueued
from shared.model.names import Namespace
from shared.model.requests.request import PodRequest, RepelledFrom

Domain = tuple[AntiAffinityTerm, str]
"""A term, and its topology key's value on the pod's node."""


def domains(facts: NodeFacts) -> Iterator[Domain]:
    for term in facts.anti_affinity:
        value = facts.labels.get(term.topology_key)
        if value is not None:
            yield term, value


def all_domains(nodes: Iterable[NodeFacts]) -> list[Domain]:
    return [domain for facts in nodes for domain in domains(facts)]


def selects(term: AntiAffinityTerm, namespace: Namespace, labels: Mapping[str, str]) -> bool:
    in_namespace = term.all_namespaces or namespace in term.namespaces
    return in_namespace and matches_labels(term.selector, labels)


def matches_labels(selector: Iterable[LabelRequirement], labels: Mapping[str, str]) -> bool:
    """A requirement with an unknown operator does not hold."""
    return all(
        need.operator in LABEL_OPERATORS
        and LABEL_OPERATORS[need.operator](labels.get(need.key), need.values)
        for need in selector
    )


def repelled_from(
    repelling: Iterable[Domain], namespace: Namespace, labels: Mapping[str, str]
) -> RepelledFrom:
    values: dict[str, set[str]] = {}
    for term, value in repelling:
        if selects(term, namespace, labels):
            values.setdefault(term.topology_key, set()).add(value)
    return as_repelled(values)


def as_repelled(values: Mapping[str, Iterable[str]]) -> RepelledFrom:
    return tuple((key, frozenset(values[key])) for key in sorted(values))


def with_repelled(request: PodRequest, repelled: RepelledFrom) -> PodRequest:
    if repelled == request.node_requirements.repelled_from:
        return request
    requirements = structs.replace(request.node_requirements, repelled_from=repelled)
    return structs.replace(request, node_requirements=requirements)


def repelled_request(queued: PodQueued, repelling: Iterable[Domain]) -> PodRequest:
    return with_repelled(queued.request, repelled_from(repelling, queued.namespace, queued.labels))
