"""A pod's required anti-affinity, as written and as it concerns other pods; pure.

The API server has merged `matchLabelKeys` and `mismatchLabelKeys` into the label selectors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import msgspec

from shared.kubernetes.types import ApiPod, LabelSelector, PodAffinityTerm
from shared.model.bounds import MOST_FACTS, check_size
from shared.model.devices.node import AntiAffinityTerm, LabelRequirement
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.placing.anti_affinity import matches_labels

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
MOST_SELECTORS = 64
"""For the pods of a node."""
Selector = tuple[LabelRequirement, ...]
_Sized = TypeVar("_Sized", Selector, AntiAffinityTerm)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAntiAffinity:
    topology_key: str
    selector: Selector
    namespaces: frozenset[Namespace]
    """The pod's own if the term names none."""
    namespace_selector: Selector | None = None
    """Further namespaces by their labels; () means all."""


def parse_anti_affinity(pod: ApiPod) -> tuple[PodAntiAffinity, ...]:
    """A term without a label selector selects no pod.

    Raises RequestError for what no API server stores, and for what is too large.
    """
    affinity = pod.spec.affinity
    required = (affinity.pod_anti_affinity or {}).get(REQUIRED) if affinity else None
    check_size(f"{REQUIRED} of podAntiAffinity", len(msgspec.json.encode(required)))
    try:
        terms = msgspec.convert(required or (), tuple[PodAffinityTerm, ...])
    except msgspec.ValidationError as error:
        raise RequestError(f"{REQUIRED} of podAntiAffinity: {error}") from error
    own = Namespace(pod.metadata.namespace)
    return tuple(_parse(term, term.label_selector, own) for term in terms if term.label_selector)


def _parse(term: PodAffinityTerm, selector: LabelSelector, own: Namespace) -> PodAntiAffinity:
    named = frozenset(map(Namespace, term.namespaces))
    by_label = term.namespace_selector
    return PodAntiAffinity(
        topology_key=term.topology_key,
        selector=requirements_of(selector),
        namespaces=named if named or by_label is not None else frozenset({own}),
        namespace_selector=None if by_label is None else requirements_of(by_label),
    )


def requirements_of(selector: LabelSelector) -> Selector:
    equal = (LabelRequirement(key, "In", (value,)) for key, value in selector.match_labels.items())
    others = (
        LabelRequirement(requirement.key, requirement.operator, requirement.values)
        for requirement in selector.match_expressions
    )
    return tuple(sorted((*equal, *others)))


def resolve_all(
    terms: Iterable[PodAntiAffinity], namespaces: Mapping[Namespace, Mapping[str, str]]
) -> tuple[AntiAffinityTerm, ...]:
    """Return the terms with the namespaces that they select by these labels, sorted.

    The largest beyond `MOST_FACTS` bytes are left out, or the node's facts could be too large to
    publish. The largest selectors beyond `MOST_SELECTORS` select all: each is compared with every
    namespace.
    """
    terms = list(terms)
    selectors = _smallest({term.namespace_selector for term in terms if term.namespace_selector})
    selected = {
        selector: frozenset(
            name for name, labels in namespaces.items() if matches_labels(selector, labels)
        )
        for selector, _ in selectors[:MOST_SELECTORS]
    }
    smallest = _smallest({_resolve(term, selected) for term in terms})
    total = accumulate(size for _, size in smallest)
    return tuple(
        sorted(term for (term, _), size in zip(smallest, total, strict=True) if size <= MOST_FACTS)
    )


def _smallest(items: Iterable[_Sized]) -> list[tuple[_Sized, int]]:
    sizes = [(item, len(msgspec.msgpack.encode(item))) for item in items]
    return sorted(sizes, key=lambda sized: (sized[1], sized[0]))


def widest(terms: Iterable[PodAntiAffinity]) -> tuple[AntiAffinityTerm, ...]:
    """Where they select namespaces by labels, terms are for all."""
    return tuple(
        AntiAffinityTerm(
            topology_key=term.topology_key,
            selector=term.selector,
            namespaces=tuple(sorted(term.namespaces)),
            all_namespaces=term.namespace_selector is not None,
        )
        for term in terms
    )


def _resolve(
    term: PodAntiAffinity, by_selector: Mapping[Selector, frozenset[Namespace]]
) -> AntiAffinityTerm:
    selector = term.namespace_selector
    selected = term.namespaces
    is_all = selector is not None and selector not in by_selector
    if selector:
        selected |= by_selector.get(selector, frozenset())
    return AntiAffinityTerm(
        topology_key=term.topology_key,
        selector=term.selector,
        namespaces=() if is_all else tuple(sorted(selected)),
        all_namespaces=is_all,
    )
