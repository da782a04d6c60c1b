"""Pods selected by rules, counted by domain; pure."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable

from msgspec import structs

from shared.model.devices.node import NodeFacts
from shared.model.requests.pod_rules import (
    DomainRule,
    DomainScores,
    NodeDomains,
    PodRules,
    PreferenceRule,
    SpreadRule,
)
from shared.model.requests.request import NodeRequirements, PodRequest
from shared.placing.index.threshold_column import store
from shared.placing.mirror.cluster_mirror import ChangeReader, ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.node_filters import check_node_selector, has_untolerated_taint

CACHED_COUNTS = 256
HIGHEST_SCORE = 100

Includes = Callable[[NodeFacts], bool]


class DomainCounts:
    def __init__(
        self, mirror: ClusterMirror, counted_as: str, key: str, includes: Includes | None = None
    ) -> None:
        self._mirror = mirror
        self._changes = ChangeReader(mirror.changes)
        self.counted_as = counted_as
        self._key = key
        self._includes = includes
        self._by_node: dict[MirroredNode, tuple[str, int]] = {}
        self._nodes: Counter[str] = Counter()
        self.pods: dict[str, int] = {}
        """By value, also of those without a selected pod."""
        self.changed_at = 0
        """Where the mirror's changes ended when the counts last changed."""

    def catch_up(self) -> None:
        changed: Iterable[MirroredNode] | None = self._changes.read()
        if changed is None:
            changed = {*self._by_node, *self._mirror.nodes.values()}
        for node in changed:
            self._update(node)

    def _update(self, node: MirroredNode) -> None:
        facts = node.facts
        now = None
        counts = not node.removed and (self._includes is None or self._includes(facts))
        if counts and self._key in facts.labels:
            pods = max(0, -node.free_resources.get(self.counted_as, 0))
            now = facts.labels[self._key], pods
        before = self._by_node.get(node)
        if now == before:
            return
        self.changed_at = self._mirror.changes.end
        if before is not None:
            self._add(before[0], -1, -before[1])
            del self._by_node[node]
        if now is not None:
            self._add(now[0], 1, now[1])
            self._by_node[node] = now

    def _add(self, value: str, nodes: int, pods: int) -> None:
        self._nodes[value] += nodes
        self.pods[value] = self.pods.get(value, 0) + pods
        if not self._nodes[value]:
            del self._nodes[value], self.pods[value]


class PodCounts:
    """Pods count from their reservation on, and from this placer's choice on."""

    def __init__(self, mirror: ClusterMirror) -> None:
        self._mirror = mirror
        self._counts: dict[Hashable, DomainCounts] = {}

    def restricted(self, request: PodRequest, rules: PodRules) -> PodRequest:
        requirements = request.node_requirements
        domains = (
            *self._spread_domains(rules, requirements),
            *self._affinity_domains(rules, request.selected_as),
            *self._anti_affinity_domains(rules),
        )
        scores = (
            *self._preferences(rules.preferred),
            *self._spread_scores(rules, requirements),
        )
        decided = structs.replace(requirements, domains=domains, scores=scores)
        return structs.replace(request, node_requirements=decided)

    def changed_at(self, counted: Collection[str]) -> int:
        last = 0
        for counts in self._counts.values():
            if counts.counted_as in counted:
                counts.catch_up()
                last = max(last, counts.changed_at)
        return last

    def pods_by_value(self, counted_as: str, key: str) -> dict[str, int]:
        return self._count((counted_as, key), counted_as, key).pods

    def _count(
        self, cache_key: Hashable, counted_as: str, key: str, includes: Includes | None = None
    ) -> DomainCounts:
        counts = self._counts.get(cache_key)
        if counts is None:
            counts = DomainCounts(self._mirror, counted_as, key, includes)
            store(self._counts, cache_key, counts, CACHED_COUNTS)
        counts.catch_up()
        return counts

    def _affinity_domains(
        self, rules: PodRules, selected_as: Collection[str]
    ) -> Iterable[NodeDomains]:
        rule = rules.affinity
        if rule is None:
            return
        running = [
            frozenset(
                value
                for value, pods in self.pods_by_value(rule.counted_as, key).items()
                if pods > 0
            )
            for key in rule.keys
        ]
        is_first = rule.counted_as in selected_as and not any(running)
        for key, values in zip(rule.keys, running, strict=True):
            yield NodeDomains(
                rule=DomainRule.AFFINITY, key=key, values=None if is_first else values
            )

    def _anti_affinity_domains(self, rules: PodRules) -> Iterable[NodeDomains]:
        for rule in rules.anti_affinity:
            pods = self.pods_by_value(rule.counted_as, rule.key)
            values = frozenset(value for value, count in pods.items() if count > 0)
            if values:
                yield NodeDomains(
                    rule=DomainRule.ANTI_AFFINITY, key=rule.key, values=values, excluded=True
                )

    def _spread_domains(
        self, rules: PodRules, requirements: NodeRequirements
    ) -> Iterable[NodeDomains]:
        required = [rule for rule in rules.spread if rule.required]
        keys = frozenset(rule.key for rule in required)
        for rule in required:
            yield NodeDomains(rule=DomainRule.SPREAD_LABEL, key=rule.key)
            pods = self._spread_counts(rule, keys, requirements).pods
            least = min(pods.values()) if len(pods) >= rule.min_domains else 0
            most = rule.max_skew + least - rule.selects_itself
            values = frozenset(value for value, count in pods.items() if count > most)
            if values:
                yield NodeDomains(
                    rule=DomainRule.SPREAD, key=rule.key, values=values, excluded=True
                )

    def _spread_counts(
        self, rule: SpreadRule, keys: frozenset[str], requirements: NodeRequirements
    ) -> DomainCounts:
        of_affinity = (requirements.selector, requirements.required) if rule.honors_affinity else ()
        tolerations = requirements.tolerations

        def includes(facts: NodeFacts) -> bool:
            return (
                keys <= facts.labels.keys()
                and not (rule.honors_affinity and check_node_selector(requirements, facts))
                and not (rule.honors_taints and has_untolerated_taint(tolerations, facts))
            )

        cache_key = (
            rule.counted_as,
            rule.key,
            keys,
            of_affinity,
            tolerations if rule.honors_taints else None,
        )
        return self._count(cache_key, rule.counted_as, rule.key, includes)

    def _preferences(self, rules: Iterable[PreferenceRule]) -> Iterable[DomainScores]:
        """Add weights, once for each selected pod, and scale them to a range of 100.

        A domain without an entry has 0.
        """
        sums: dict[str, dict[str, int]] = {}
        for rule in rules:
            of_key = sums.setdefault(rule.key, {})
            for value, pods in self.pods_by_value(rule.counted_as, rule.key).items():
                if pods > 0:
                    of_key[value] = of_key.get(value, 0) + rule.weight * pods
        amounts = [amount for of_key in sums.values() for amount in of_key.values()]
        width = max(0, *amounts, 0) - min(0, *amounts, 0)
        for key, of_key in sums.items():
            scores = {
                value: HIGHEST_SCORE * amount // width for value, amount in of_key.items() if amount
            }
            if scores:
                yield DomainScores(key=key, scores=tuple(sorted(scores.items())))

    def _spread_scores(
        self, rules: PodRules, requirements: NodeRequirements
    ) -> Iterable[DomainScores]:
        """Domains with fewer pods score higher."""
        preferred = [rule for rule in rules.spread if not rule.required]
        keys = frozenset(rule.key for rule in preferred)
        for rule in preferred:
            pods = self._spread_counts(rule, keys, requirements).pods
            most = max(pods.values(), default=0)
            least = min(pods.values(), default=0)
            if most > least:
                yield DomainScores(
                    key=rule.key,
                    scores=tuple(
                        sorted(
                            (value, HIGHEST_SCORE * (most - count) // (most - least))
                            for value, count in pods.items()
                        )
                    ),
                )
