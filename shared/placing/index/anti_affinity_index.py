"""Where required anti-affinity of running pods keeps others away, following the mirror; pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from shared.model.devices.node import AntiAffinityTerm
from shared.model.events.pod_events import PodQueued
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import PodRequest, RepelledFrom
from shared.placing.anti_affinity import (
    Domain,
    as_repelled,
    domains,
    matches_labels,
    selects,
    with_repelled,
)
from shared.placing.index.threshold_column import store
from shared.placing.mirror.cluster_mirror import ChangeReader, ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode

CACHED_PODS = 1024
EVERYWHERE = Namespace("")
"""Stands for all namespaces."""

_Key = tuple[Namespace, tuple[tuple[str, str], ...]]


class AntiAffinityIndex:
    def __init__(self, mirror: ClusterMirror) -> None:
        self._mirror = mirror
        self._changes = ChangeReader(mirror.inventory_changes)
        self._domains: Counter[Domain] = Counter()
        self._terms: dict[Namespace, dict[AntiAffinityTerm, set[str]]] = {}
        """The terms of the domains by namespace that they are for, with their values."""
        self._tentative: dict[PodUid, tuple[Domain, ...]] = {}
        """Of pods with a place that the ledger has not granted, or whose facts are not read yet."""
        self._by_node: dict[MirroredNode, frozenset[Domain]] = {}
        self._results: dict[_Key, RepelledFrom] = {}

    def restricted(self, event: PodQueued, request: PodRequest) -> PodRequest:
        self._catch_up()
        if self._tentative:
            self._drop_tentative()
        if not (self._domains or self._tentative):
            return request
        key = (event.namespace, tuple(sorted(event.labels.items())))
        repelled = self._results.get(key)
        if repelled is None:
            repelled = store(self._results, key, self._repelled_from(event), CACHED_PODS)
        return with_repelled(request, repelled)

    def add_tentative(self, pod: PodUid, terms: Iterable[AntiAffinityTerm], node: NodeName) -> None:
        mirrored = self._mirror.nodes.get(node)
        if mirrored is None:
            return
        self._tentative[pod] = tuple(domains(replace(mirrored.facts, anti_affinity=tuple(terms))))
        self._results.clear()

    def _repelled_from(self, event: PodQueued) -> RepelledFrom:
        """Compare each term once: thousands of pods may have it, each in a domain of its own."""
        values: dict[str, set[str]] = {}
        for namespace in (event.namespace, EVERYWHERE):
            for term, of_term in self._terms.get(namespace, {}).items():
                if matches_labels(term.selector, event.labels):
                    values.setdefault(term.topology_key, set()).update(of_term)
        for term, value in chain.from_iterable(self._tentative.values()):
            if selects(term, event.namespace, event.labels):
                values.setdefault(term.topology_key, set()).add(value)
        return as_repelled(values)

    def _drop_tentative(self) -> None:
        dropped = [pod for pod in self._tentative if not self._mirror.is_tentative(pod)]
        for pod in dropped:
            del self._tentative[pod]
        if dropped:
            self._results.clear()

    def _catch_up(self) -> None:
        changed: Iterable[MirroredNode] | None = self._changes.read()
        if changed is None:
            changed = {*self._by_node, *self._mirror.nodes.values()}
        for node in changed:
            self._update(node)

    def _update(self, node: MirroredNode) -> None:
        now = frozenset[Domain]() if node.removed else frozenset(domains(node.facts))
        before = self._by_node.pop(node, frozenset())
        if now:
            self._by_node[node] = now
        if now == before:
            return
        for domain in now - before:
            self._domains[domain] += 1
            if self._domains[domain] == 1:
                self._add(*domain)
        for domain in before - now:
            self._domains[domain] -= 1
            if not self._domains[domain]:
                del self._domains[domain]
                self._remove(*domain)
        self._results.clear()

    def _add(self, term: AntiAffinityTerm, value: str) -> None:
        for namespace in _namespaces_of(term):
            self._terms.setdefault(namespace, {}).setdefault(term, set()).add(value)

    def _remove(self, term: AntiAffinityTerm, value: str) -> None:
        for namespace in _namespaces_of(term):
            terms = self._terms[namespace]
            terms[term].discard(value)
            if not terms[term]:
                del terms[term]
            if not terms:
                del self._terms[namespace]


def _namespaces_of(term: AntiAffinityTerm) -> tuple[Namespace, ...]:
    return (EVERYWHERE,) if term.all_namespaces else tuple(dict.fromkeys(term.namespaces))
