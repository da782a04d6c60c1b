"""The pods that rules of waiting pods select, counted by node; pure.

Pods count as far as their lease does not count them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from msgspec import structs

from shared.model.bounds import MOST_ENTRIES
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.pod_rules import MOST_SELECTIONS, PodSelection, PodSelector
from shared.model.requests.request import PodRequest, Uncounted
from shared.placing.anti_affinity import matches_labels
from shared.pods.observed_pod import ObservedPod

LATE_S = 120
"""For this long, a pod may have a reservation from before a rule selected it: longer than any event
waits, or an unbound reservation lasts."""
COUNTED_S = 5
"""Once the pod was seen on its node, until the node's facts are in the ledger."""
TOO_MANY = (
    "TooManyPodRules: wait until other pods with affinity or spread have started, since at most "
    f"{MOST_SELECTIONS} selections of pods are counted at once"
)


class SelectedPods:
    """A pod event costs only what its namespace uses."""

    def __init__(self) -> None:
        self.changed: set[PodUid] = set()
        """Their request may differ now."""
        self.changed_nodes: set[NodeName] = set()
        self._in_use: dict[str, PodSelection] = {}
        """By resource, the last used last."""
        self._by_namespace: dict[Namespace, list[str]] = {}
        self._anywhere: list[str] = []
        """Those that select namespaces by labels."""
        self._holders: dict[str, set[PodUid]] = {}
        self._held: dict[PodUid, frozenset[str]] = {}
        """The newest pods last."""
        self._owners: dict[PodUid, Namespace] = {}
        self._of_namespace: dict[Namespace, Counter[str]] = {}
        self._refused: set[PodUid] = set()
        self._late: dict[str, dict[PodUid, int]] = {}
        """Seconds left of pods that were published without the resource."""
        self._counts: dict[NodeName, Counter[str]] = {}
        self._namespaces: Mapping[Namespace, Mapping[str, str]] = {}

    def on_node(self, node: NodeName) -> Mapping[str, int]:
        """Counts are below 0 for pods that count no longer."""
        return self._counts.get(node, {})

    def count(self, pod: ObservedPod, sign: int) -> None:
        """`sign` is 1 or -1."""
        if self._in_use and pod.node is not None and not pod.is_terminated:
            self._add(pod, self._names_of(pod), pod.counted & self._in_use.keys(), sign)

    def with_rules(
        self, pod: ObservedPod, pods: Mapping[PodUid, ObservedPod], published: Iterable[PodUid]
    ) -> ObservedPod:
        """Return a waiting pod with the resources as which it is counted.

        `pods` are all pods, and the `published` ones wait.
        """
        request = pod.request
        if request is None or not (self._in_use or request.pod_rules):
            return pod
        if request.pod_rules is not None:
            names = frozenset(pod.selections)
            new = names - self._in_use.keys()
            if not self._make_room(pod.namespace, names, len(new)):
                self._refused.add(pod.pod)
                waits = structs.replace(request.node_requirements, waits_for=TOO_MANY)
                request = structs.replace(request, node_requirements=waits)
                return structs.replace(pod, request=request)
            self._refused.discard(pod.pod)
            self._hold(pod, names)
            for name in sorted(new):
                self._begin(name, pod.selections[name], pods, published)
        selected_as = tuple(sorted(self._names_of(pod)))
        uncounted = self._uncounted(pod.pod, request)
        if (selected_as, uncounted) == (request.selected_as, request.uncounted):
            return pod
        request = structs.replace(request, selected_as=selected_as, uncounted=uncounted)
        return structs.replace(pod, request=request)

    def release(self, pod: PodUid) -> None:
        """What its rules select remains counted while there is room: others may follow."""
        self._refused.discard(pod)
        names = self._held.pop(pod, frozenset())
        if names:
            namespace = self._owners.pop(pod)
            self._of_namespace[namespace] -= Counter(names)
            if not self._of_namespace[namespace]:
                del self._of_namespace[namespace]
        for name in names:
            self._holders[name].discard(pod)
            if not self._holders[name]:
                self.changed |= self._refused

    def update_namespaces(
        self,
        namespaces: Mapping[Namespace, Mapping[str, str]],
        pods: Mapping[PodUid, ObservedPod],
        waiting: Iterable[PodUid],
    ) -> None:
        self._namespaces = dict(namespaces)
        for name in self._anywhere:
            self._uncount(name)
            self._count_all(name, pods)
        if self._anywhere:
            self.changed.update(waiting)

    def advance(self, pods: Mapping[PodUid, ObservedPod]) -> None:
        """Note that a second has passed."""
        for name, late in list(self._late.items()):
            for uid in list(late):
                pod = pods.get(uid)
                is_seen = pod is not None and pod.node is not None
                late[uid] = min(late[uid] - 1, COUNTED_S) if is_seen else late[uid] - 1
                if pod is None or late[uid] <= 0:
                    del late[uid]
                    self.changed |= self._holders[name]
            if not late:
                del self._late[name]

    def _hold(self, pod: ObservedPod, names: frozenset[str]) -> None:
        if self._held.get(pod.pod) == names:
            return
        self.release(pod.pod)
        if not names:
            return
        self._held[pod.pod] = names
        self._owners[pod.pod] = pod.namespace
        self._of_namespace.setdefault(pod.namespace, Counter()).update(names)
        for name in names:
            self._holders.setdefault(name, set()).add(pod.pod)

    def _uncounted(self, pod: PodUid, request: PodRequest) -> Uncounted:
        if not self._late or request.pod_rules is None:
            return ()
        names = [name for name in sorted(self._held.get(pod, ())) if name in self._late]
        pairs = [(name, uid) for name in names for uid in sorted(self._late[name]) if uid != pod]
        return tuple(pairs[:MOST_ENTRIES])

    def _make_room(self, namespace: Namespace, wanted: frozenset[str], count: int) -> bool:
        """Return whether `count` more selections can be counted.

        The oldest unused ones are dropped, then those of the namespace with most, unless it would
        have fewer than this one.
        """
        excess = len(self._in_use) + count - MOST_SELECTIONS
        if excess <= 0:
            return True
        unused = self._unused(wanted)
        if len(unused) < excess and self._take(namespace, wanted, excess - len(unused)):
            unused = self._unused(wanted)
        if len(unused) < excess:
            return False
        for name in unused[:excess]:
            self._end(name)
        return True

    def _unused(self, wanted: frozenset[str]) -> list[str]:
        return [name for name in self._in_use if not self._holders[name] and name not in wanted]

    def _take(self, namespace: Namespace, wanted: frozenset[str], count: int) -> bool:
        """Let the newest pods of the largest namespace wait; return whether this helps."""
        own = len(self._of_namespace.get(namespace, {}).keys() | wanted)
        sizes = {name: len(of) for name, of in self._of_namespace.items() if name != namespace}
        largest = max(sizes, key=sizes.__getitem__, default=namespace)
        left = sizes.get(largest, 0) - count
        if left < own:
            return False
        for pod in [pod for pod in reversed(self._held) if self._owners[pod] == largest]:
            if len(self._of_namespace[largest]) <= left:
                break
            self.release(pod)
            self._refused.add(pod)
            self.changed.add(pod)
        return True

    def _begin(
        self,
        name: str,
        selection: PodSelection,
        pods: Mapping[PodUid, ObservedPod],
        published: Iterable[PodUid],
    ) -> None:
        self._in_use[name] = selection
        first = selection.selectors[0]
        if first.namespace_labels is None:
            for namespace in first.namespaces:
                self._by_namespace.setdefault(namespace, []).append(name)
        else:
            self._anywhere.append(name)
        self._count_all(name, pods)
        for uid in published:
            pod = pods.get(uid)
            if pod is None or name in pod.selections or not self._selects(selection, pod):
                continue
            self._late.setdefault(name, {})[uid] = LATE_S
            self.changed.add(uid)

    def _end(self, name: str) -> None:
        self._uncount(name)
        first = self._in_use.pop(name).selectors[0]
        if first.namespace_labels is None:
            for namespace in first.namespaces:
                self._by_namespace[namespace].remove(name)
                if not self._by_namespace[namespace]:
                    del self._by_namespace[namespace]
        else:
            self._anywhere.remove(name)
        del self._holders[name]
        self._late.pop(name, None)

    def _count_all(self, name: str, pods: Mapping[PodUid, ObservedPod]) -> None:
        selection = self._in_use[name]
        for pod in pods.values():
            if pod.node is not None and not pod.is_terminated:
                names = {name} if self._selects(selection, pod) else set[str]()
                self._add(pod, names, pod.counted & {name}, 1)

    def _uncount(self, name: str) -> None:
        for node, counts in list(self._counts.items()):
            if counts.pop(name, 0):
                self.changed_nodes.add(node)
            if not counts:
                del self._counts[node]

    def _add(
        self, pod: ObservedPod, selected: set[str], by_lease: Iterable[str], sign: int
    ) -> None:
        node = pod.node
        if node is None:
            return
        amounts = Counter(dict.fromkeys(selected, sign))
        amounts.subtract(dict.fromkeys(by_lease, sign))
        counts = self._counts.setdefault(node, Counter())
        for name, amount in amounts.items():
            if amount:
                counts[name] += amount
                self.changed_nodes.add(node)
                if not counts[name]:
                    del counts[name]
        if not counts:
            del self._counts[node]

    def _names_of(self, pod: ObservedPod) -> set[str]:
        return {name for name in self._possible(pod) if self._selects(self._in_use[name], pod)}

    def _possible(self, pod: ObservedPod) -> Iterator[str]:
        yield from self._by_namespace.get(pod.namespace, ())
        yield from self._anywhere

    def _selects(self, selection: PodSelection, pod: ObservedPod) -> bool:
        if pod.deleting and not selection.with_terminating:
            return False
        return all(self._is_selected(selector, pod) for selector in selection.selectors)

    def _is_selected(self, selector: PodSelector, pod: ObservedPod) -> bool:
        by_labels = selector.namespace_labels
        in_namespace = pod.namespace in selector.namespaces or (
            by_labels is not None
            and matches_labels(by_labels, self._namespaces.get(pod.namespace, {}))
        )
        return in_namespace and matches_labels(selector.labels, pod.labels)
