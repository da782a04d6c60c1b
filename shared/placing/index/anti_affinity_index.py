"""Where required anti-affinity of running pods keeps others away, following the mirror; pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from shared.model.devices.node import AntiAffinityTerm
from shared.model.events.pod_events import PodQueued
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import PodRequest, RepelledFrom
from shared.placing.anti_affinity import Domain, domains, repelled_from, with_repelled
from shared.placing.index.threshold_column import store
from shared.placing.mirror.cluster_mirror import ChangeReader, ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode

CACHED_PODS = 1024

_Key = tuple[Namespace, tuple[tuple[str, str], ...]]


class AntiAffinityIndex:
    def __init__(self, mirror: ClusterMirror) -> None:
        self._mirror = mirror
        self._changes = ChangeReader(mirror.inventory_changes)
        self._domains: Counter[Domain] = Counter()
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
            tentative = chain.from_iterable(self._tentative.values())
            repelled = repelled_from((*self._domains, *tentative), event.namespace, event.labels)
            store(self._results, key, repelled, CACHED_PODS)
        return with_repelled(request, repelled)

    def add_tentative(self, pod: PodUid, terms: Iterable[AntiAffinityTerm], node: NodeName) -> None:
        mirrored = self._mirror.nodes.get(node)
        if mirrored is None:
            return
        self._tentative[pod] = tuple(domains(replace(mirrored.facts, anti_affinity=tuple(terms))))
        self._results.clear()

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
        self._domains.update(now - before)
        for domain in before - now:
            self._domains[domain] -= 1
            if not self._domains[domain]:
                del self._domains[domain]
        self._results.clear()
