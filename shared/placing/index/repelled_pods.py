"""The domains of running pods' required anti-affinity, over all nodes of the mirror; pure."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from shared.model.events.pod_events import PodQueued
from shared.model.names import Namespace
from shared.model.request import PodRequest, RepelledFrom
from shared.placing.anti_affinity import Domain, domains, repelled_from, with_repelled
from shared.placing.mirror.cluster_mirror import ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode

CACHED_PODS = 1024
"""Namespaces and labels of pods whose domains are cached until a domain changes."""

_Key = tuple[Namespace, tuple[tuple[str, str], ...]]


class RepelledPods:
    """Counts nodes by domain, and looks up those that repel a pod. Pods are never scanned."""

    def __init__(self, mirror: ClusterMirror) -> None:
        self._mirror = mirror
        self._seen_changes = 0
        self._domains: Counter[Domain] = Counter()
        self._by_node: dict[MirroredNode, frozenset[Domain]] = {}
        self._results: OrderedDict[_Key, RepelledFrom] = OrderedDict()

    def restricted(self, event: PodQueued, request: PodRequest) -> PodRequest:
        """Return a request of the pod with the domains that it is repelled from."""
        self._catch_up()
        if not self._domains:
            return request
        key = (event.namespace, tuple(sorted(event.labels.items())))
        repelled = self._results.get(key)
        if repelled is None:
            repelled = repelled_from(self._domains, event.namespace, event.labels)
            self._results[key] = repelled
            if len(self._results) > CACHED_PODS:
                self._results.popitem(last=False)
        return with_repelled(request, repelled)

    def _catch_up(self) -> None:
        changes = self._mirror.inventory_changes
        if self._seen_changes == changes.end:
            return
        changed: Iterable[MirroredNode] | None = changes.since(self._seen_changes)
        self._seen_changes = changes.end
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
