"""A pod's rules about other pods, as its manifest has them; pure.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#scheduling
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from shared.kubernetes.types import ApiPod, LabelSelector, PodAffinityTerm
from shared.model.bounds import check_size
from shared.model.devices.node import LabelRequirement
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.requests.pod_rules import (
    MOST_RULES,
    AffinityRule,
    AntiAffinityRule,
    PodRules,
    PodSelection,
    PodSelector,
    PreferenceRule,
    SpreadRule,
)
from shared.placing.anti_affinity import matches_labels
from shared.pods.pod_anti_affinity import REQUIRED, PodAntiAffinity, requirements_of, widest

PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
SPREAD = "topologySpreadConstraints"
IGNORE = "Ignore"
Selections = Mapping[str, PodSelection]
"""What the rules select, by the resource as which it is counted."""
_Read = TypeVar("_Read")


class _SpreadConstraint(Struct, frozen=True, rename="camel", gc=False):
    topology_key: str
    max_skew: int = 1
    when_unsatisfiable: str = "DoNotSchedule"
    label_selector: LabelSelector | None = None
    min_domains: int | None = None
    node_affinity_policy: str = "Honor"
    node_taints_policy: str = IGNORE
    match_label_keys: tuple[str, ...] = ()


class _Term(PodAffinityTerm, frozen=True, rename="camel", gc=False):
    match_label_keys: tuple[str, ...] = ()
    mismatch_label_keys: tuple[str, ...] = ()


class _WeightedTerm(Struct, frozen=True, rename="camel", gc=False):
    weight: int = 0
    pod_affinity_term: _Term = _Term()


def has_rules(pod: ApiPod) -> bool:
    affinity = pod.spec.affinity
    return bool(
        pod.spec.topology_spread_constraints
        or (affinity and (affinity.pod_affinity or affinity.pod_anti_affinity))
    )


def parse_pod_rules(
    pod: ApiPod, repels: Iterable[PodAntiAffinity], of_gang: Iterable[int] = ()
) -> tuple[PodRules | None, Selections]:
    """Return the rules of a pod, or None without any, and what they select.

    `repels` is its required anti-affinity. Terms numbered in `of_gang` are obeyed otherwise. Raises
    RequestError for what no API server stores, and for what is too large.
    """
    if not has_rules(pod):
        return None, {}
    reader = _Rules(pod)
    affinity = pod.spec.affinity
    to_pods: Mapping[str, object] = (affinity.pod_affinity if affinity else None) or {}
    from_pods: Mapping[str, object] = (affinity.pod_anti_affinity if affinity else None) or {}
    rules = PodRules(
        affinity=reader.affinity(to_pods, set(of_gang)),
        anti_affinity=reader.anti_affinity(from_pods),
        spread=reader.spread(),
        preferred=(*reader.preferred(to_pods, 1), *reader.preferred(from_pods, -1)),
        repels=widest(repels),
    )
    return (None if rules == PodRules() else rules), reader.selections


class _Rules:
    def __init__(self, pod: ApiPod) -> None:
        self._pod = pod
        self._labels = pod.metadata.labels
        self._namespace = Namespace(pod.metadata.namespace)
        self.selections: dict[str, PodSelection] = {}

    def affinity(self, of_pod: Mapping[str, object], left_out: set[int]) -> AffinityRule | None:
        """One pod has to be selected by all required terms."""
        read = _read(of_pod.get(REQUIRED), _Term, f"podAffinity.{REQUIRED}")
        terms = [term for number, term in enumerate(read) if number not in left_out]
        if not terms:
            return None
        selectors = [self._selector(term) for term in terms]
        return AffinityRule(
            counted_as=self._counted(selectors),
            keys=tuple(dict.fromkeys(term.topology_key for term in terms)),
        )

    def anti_affinity(self, of_pod: Mapping[str, object]) -> tuple[AntiAffinityRule, ...]:
        terms = _read(of_pod.get(REQUIRED), _Term, f"podAntiAffinity.{REQUIRED}")
        return tuple(
            AntiAffinityRule(counted_as=counted, key=term.topology_key)
            for term in terms
            if (counted := self._counted([self._selector(term)]))
        )

    def preferred(self, of_pod: Mapping[str, object], sign: int) -> list[PreferenceRule]:
        return [
            PreferenceRule(
                counted_as=counted, key=weighted.pod_affinity_term.topology_key, weight=weight
            )
            for weighted in _read(of_pod.get(PREFERRED), _WeightedTerm, PREFERRED)
            if (counted := self._counted([self._selector(weighted.pod_affinity_term)]))
            and (weight := sign * weighted.weight)
        ]

    def spread(self) -> tuple[SpreadRule, ...]:
        constraints = _read(self._pod.spec.topology_spread_constraints, _SpreadConstraint, SPREAD)
        return tuple(map(self._spread_rule, constraints))

    def _spread_rule(self, constraint: _SpreadConstraint) -> SpreadRule:
        selector = constraint.label_selector
        counted = ""
        selects_itself = False
        if selector is not None:
            labels = _with_keys(
                requirements_of(selector), constraint.match_label_keys, "In", self._labels
            )
            selects_itself = matches_labels(labels, self._labels)
            if labels:  # kube-scheduler counts no pods for an empty selector
                own = PodSelector(labels=labels, namespaces=(self._namespace,))
                counted = self._counted([own], with_terminating=False)
        return SpreadRule(
            counted_as=counted,
            key=constraint.topology_key,
            max_skew=constraint.max_skew,
            min_domains=constraint.min_domains or 1,
            required=constraint.when_unsatisfiable == "DoNotSchedule",
            honors_affinity=constraint.node_affinity_policy != IGNORE,
            honors_taints=constraint.node_taints_policy != IGNORE,
            selects_itself=selects_itself,
        )

    def _selector(self, term: _Term) -> PodSelector | None:
        """A term without a label selector selects no pod."""
        if term.label_selector is None:
            return None
        labels = requirements_of(term.label_selector)
        labels = _with_keys(labels, term.match_label_keys, "In", self._labels)
        labels = _with_keys(labels, term.mismatch_label_keys, "NotIn", self._labels)
        by_label = term.namespace_selector
        named = tuple(sorted({Namespace(name) for name in term.namespaces}))
        return PodSelector(
            labels=labels,
            namespaces=named if named or by_label is not None else (self._namespace,),
            namespace_labels=None if by_label is None else requirements_of(by_label),
        )

    def _counted(
        self, selectors: Sequence[PodSelector | None], *, with_terminating: bool = True
    ) -> str:
        """Return the resource as which the pods are counted that all of these select, or ""."""
        listed = [selector for selector in selectors if selector is not None]
        if not listed or len(listed) < len(selectors):
            return ""
        selection = PodSelection(selectors=tuple(listed), with_terminating=with_terminating)
        name = selection.resource
        self.selections[name] = selection
        return name


def _with_keys(
    requirements: tuple[LabelRequirement, ...],
    keys: Iterable[str],
    operator: str,
    labels: Mapping[str, str],
) -> tuple[LabelRequirement, ...]:
    """Add requirements on the pod's own values, unless the API server has."""
    merged = {item.key for item in requirements if item.operator == operator}
    added = [
        LabelRequirement(key, operator, (labels[key],))
        for key in keys
        if key in labels and key not in merged
    ]
    return tuple(sorted((*requirements, *added)))


def _read(value: object, of: type[_Read], name: str) -> tuple[_Read, ...]:
    check_size(name, len(msgspec.json.encode(value)))
    try:
        items = msgspec.convert(value or (), tuple[of, ...])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise RequestError(f"{name}: {error}") from error
    if len(items) > MOST_RULES:
        raise RequestError(f"{name} has {len(items)} items; at most {MOST_RULES} are supported")
    return items
