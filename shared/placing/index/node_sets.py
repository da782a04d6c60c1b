"""Which nodes fit a request, and why others do not, for all nodes at once; pure.

A request passes stages: requirements on the node, served resources, ordinary resources, devices.
Each is a set of nodes that requests share. A node counts at the first stage that excludes it; one
of devices excludes it if it leaves fewer devices than needed. `device_refusal` defines the result.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from shared.model.requests.host_ports import HOST_PORT_PARTS, TOO_MANY
from shared.model.requests.pod_rules import DomainScores, NodeDomains
from shared.model.requests.request import NodeRequirements, PodRequest
from shared.placing.choice.device_choice import (
    allowed_devices,
    choose_devices,
    device_key,
    is_selective,
    is_simple,
)
from shared.placing.choice.device_refusals import explain_no_devices
from shared.placing.index.device_stages import (
    Amount,
    Excluded,
    Reason,
    keep,
    split_by_device_stages,
    with_devices,
)
from shared.placing.index.ranked_nodes import ranking_for, request_kind
from shared.placing.index.threshold_column import (
    NodePositions,
    NodeSet,
    ThresholdColumn,
    nodes_at,
    positions_in,
    store,
)
from shared.placing.mirror.cluster_mirror import ChangeLog, ChangeReader, ClusterMirror
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.node_filters import (
    DOMAIN_TEXTS,
    NO_PORTS,
    REPELLED,
    NodeFilterFailure,
    check_node,
    check_served,
    has_no_node_constraints,
    insufficient_resource,
    outside,
    preference,
)

CACHED_REQUIREMENTS = 64
ACCEPTED: tuple[NodeFilterFailure | None, int] = (None, 0)


class NodeEligibility:
    """Pods of one template have equal requirements, and facts seldom change."""

    def __init__(self, mirror: ClusterMirror) -> None:
        self.mirror = mirror
        self._results: dict[
            NodeRequirements, dict[MirroredNode, tuple[NodeFilterFailure | None, int]]
        ] = {}
        self._last: NodeRequirements | None = None
        """Those of the last check: requirements with a thousand terms are slow to find."""
        self._last_results: dict[MirroredNode, tuple[NodeFilterFailure | None, int]] = {}
        self._changes = ChangeReader(mirror.inventory_changes)

    def has_preferences(self, requirements: NodeRequirements) -> bool:
        return bool(
            requirements.preferred or requirements.scores or self.mirror.soft_taint_nodes > 0
        )

    def check(
        self, requirements: NodeRequirements, node: MirroredNode
    ) -> tuple[NodeFilterFailure | None, int]:
        self._catch_up()
        results = self._last_results
        if requirements is not self._last:
            cached = self._results.get(requirements)
            if cached is None:
                cached = store(self._results, requirements, {}, CACHED_REQUIREMENTS)
            self._last = requirements
            self._last_results = results = cached
        result = results.get(node)
        if result is None:
            facts = node.facts
            result = (check_node(requirements, facts), preference(requirements, facts))
            results[node] = result = ACCEPTED if result == ACCEPTED else result
        return result

    def _catch_up(self) -> None:
        changed = self._changes.read()
        if changed is None:
            self._results.clear()
            self._last = None
        elif changed:
            for results in self._results.values():
                for node in changed:
                    results.pop(node, None)


def is_plain(node: MirroredNode) -> int:
    return int(
        not (
            node.has_divided
            or node.isolation_restricted
            or node.aligns_numa
            or node.facts.excluded_devices
        )
        and not [device for device in node.devices if device.layout]
    )


def largest_free_mib(node: MirroredNode) -> int:
    free = [
        device.free_instance_mib if device.in_mig_mode else device.total_mib - device.used_mib
        for device in node.devices
        if device.healthy and device.replicas is None
    ]
    return max(free) if free else 0


def hardware_of(node: MirroredNode, *, uuids: bool, locations: bool) -> Hashable:
    """Return what decides whether pods fit the node's devices when they are empty."""
    return tuple(
        [
            (
                device.total_mib,
                device.unit_mib,
                device.slots,
                device.device.model,
                device.device.mode,
                device.device.layouts,
                device.device.replicas,
                device.device.isolation,
                device.uuid if uuids else "",
                (device.device.numa, device.device.pcie) if locations else None,
                device.device.numa if device.device.one_numa else None,
            )
            for device in node.devices
        ]
    )


Class = TypeVar("Class")


class NodeClasses(Generic[Class]):
    def __init__(
        self,
        positions: NodePositions,
        changes: ChangeLog,
        class_of: Callable[[MirroredNode], Class],
    ) -> None:
        self._positions = positions
        self._changes = ChangeReader(changes)
        self._class_of = class_of
        self._known: NodeSet = 0
        self._sets: dict[Class, NodeSet] = {}

    def split(self, nodes: NodeSet) -> dict[Class, NodeSet]:
        self._catch_up()
        unknown = nodes & ~self._known
        if unknown:
            self._classify(unknown)
        classes = ((node_class, members & nodes) for node_class, members in self._sets.items())
        return {node_class: members for node_class, members in classes if members}

    def _classify(self, unknown: NodeSet) -> None:
        members = self._positions.nodes
        classes: dict[Class, list[int]] = {}
        for position in positions_in(unknown, unknown.bit_count()):
            node = members[position]
            if node is not None:
                classes.setdefault(self._class_of(node), []).append(position)
        for node_class, positions in classes.items():
            self._sets[node_class] = self._sets.get(node_class, 0) | nodes_at(positions)
        self._known |= unknown

    def among(self, nodes: NodeSet, classes: Iterable[Class]) -> NodeSet:
        self._catch_up()
        unknown = nodes & ~self._known
        if unknown:
            self._classify(unknown)
        of_classes: NodeSet = 0
        for node_class in classes:
            of_classes |= self._sets.get(node_class, 0)
        return of_classes & nodes

    def _catch_up(self) -> None:
        changed = self._changes.read()
        if changed is None:
            self._known = 0
            self._sets.clear()
        if not changed:
            return
        # The position of a removed node counts as changed once another node has it.
        positions = self._positions.positions
        kept = ~nodes_at({positions[node] for node in changed if node in positions})
        self._known &= kept
        self._sets = {
            node_class: members & kept
            for node_class, members in self._sets.items()
            if members & kept
        }


LabelValues = tuple[str, ...]
CACHED_COLUMNS = 256
CACHED_CLASSES = 64
_SOME_ALLOWED = NodeFilterFailure("", "")
"""The pod's selection excludes some of a node's devices, not all."""

_Cached = TypeVar("_Cached")


class NodeSets:
    def __init__(self, mirror: ClusterMirror, eligibility: NodeEligibility) -> None:
        self.mirror = mirror
        self.eligibility = eligibility
        self.positions = NodePositions(mirror)
        self._columns: dict[Hashable, ThresholdColumn] = {}
        self._reasons: dict[Hashable, NodeClasses[Reason | None]] = {}
        self._preferences: dict[Hashable, NodeClasses[int]] = {}
        self._hardware: dict[Hashable, NodeClasses[Hashable]] = {}
        self._labels: dict[Hashable, NodeClasses[LabelValues | None]] = {}
        self._kinds: dict[
            tuple[bool, bool], tuple[int, NodeSet, list[tuple[MirroredNode, NodeSet]]]
        ] = {}
        """The last kinds of hardware, with the inventory's position and the nodes."""

    def split(self, request: PodRequest, *, explained: bool = True) -> tuple[NodeSet, Excluded]:
        self.positions.catch_up()
        excluded: Excluded = {}
        left = self._split_by_facts(request, excluded)
        for name, amount in request.node_requirements.host_ports:
            for port, least in ((name, amount - HOST_PORT_PARTS), (TOO_MANY, 0)):
                column = self._column(("resource", port), _free_amount(port))
                left = keep(left, column.at_least(least), NO_PORTS, excluded)
        for name, amount in request.resources.items():
            if not left:
                return left, excluded
            column = self._column(("resource", name), _free_amount(name))
            left = keep(left, column.at_least(amount), insufficient_resource(name), excluded)
        if left and request.containers:
            fitting, unexplained = self._split_by_devices(request, left, excluded)
            if explained or not fitting:
                split_by_device_stages(request, unexplained, excluded, self._column)
            return fitting, excluded
        return left, excluded

    def by_labels(self, keys: tuple[str, ...]) -> NodeClasses[LabelValues | None]:
        """Nodes that lack one of the labels are of class None."""

        def values_of(node: MirroredNode) -> LabelValues | None:
            labels = node.facts.labels
            values = [labels[key] for key in keys if key in labels]
            return tuple(values) if len(values) == len(keys) else None

        changes = self.mirror.inventory_changes
        return _cached(
            self._labels,
            keys,
            lambda: NodeClasses(self.positions, changes, values_of),
            CACHED_CLASSES,
        )

    def by_preference(self, requirements: NodeRequirements, nodes: NodeSet) -> Iterator[NodeSet]:
        if not self.eligibility.has_preferences(requirements):
            yield nodes
            return
        check = self.eligibility.check
        changes = self.mirror.inventory_changes
        scores = requirements.scores
        of_template = requirements.of_template
        weights = {0: nodes}
        if self.eligibility.has_preferences(of_template):
            weights = _cached(
                self._preferences,
                of_template,
                lambda: NodeClasses(
                    self.positions, changes, lambda node: check(of_template, node)[1]
                ),
                CACHED_CLASSES,
            ).split(nodes)
        for of_label in scores:
            weights = self._with_scores(weights, of_label)
        for weight in sorted(weights, reverse=True):
            yield weights[weight]

    def _with_scores(
        self, weights: Mapping[int, NodeSet], of_label: DomainScores
    ) -> dict[int, NodeSet]:
        scores = dict(of_label.scores)
        added = dict[int, NodeSet]()
        by_label = self.by_labels((of_label.key,))
        for weight, nodes in weights.items():
            for values, members in by_label.split(nodes).items():
                score = 0 if values is None else scores.get(values[0], 0)
                added[weight + score] = added.get(weight + score, 0) | members
        return added

    def nodes_in(self, nodes: NodeSet) -> Iterator[MirroredNode]:
        members = self.positions.nodes
        for position in positions_in(nodes, len(members)):
            node = members[position]
            if node is not None:
                yield node

    def random_nodes(
        self, nodes: NodeSet, count: int, rng: Callable[[], float]
    ) -> Iterator[MirroredNode]:
        """Yield random nodes of a set, some perhaps twice."""
        digits = bin(nodes)[:1:-1]
        members = self.positions.nodes
        for _ in range(count):
            position = digits.find("1", int(rng() * len(digits)))
            node = members[position] if position >= 0 else None
            if node is not None:
                yield node

    def membership(self, nodes: NodeSet) -> Callable[[MirroredNode], bool]:
        digits = f"{nodes:b}"[::-1].ljust(len(self.positions.nodes), "0")
        positions = self.positions
        return lambda node: digits[positions.positions[node]] == "1"

    def largest_free_mib(self) -> list[int]:
        return self._column("largest free MiB", largest_free_mib).amounts

    def kinds_of_hardware(
        self, resources: Mapping[str, int], *, uuids: bool, locations: bool
    ) -> Sequence[tuple[MirroredNode, NodeSet]]:
        """Divide nodes by hardware; return an example of each kind, too."""
        nodes = self.positions.all
        changes = self.mirror.inventory_changes
        for name, amount in resources.items():
            column = self._column(("allocatable", name), _allocatable(name), changes)
            nodes &= column.at_least(amount)
        last = self._kinds.get((uuids, locations))
        if last is not None and last[:2] == (changes.end, nodes):
            return last[2]
        kinds = _cached(
            self._hardware,
            (uuids, locations),
            lambda: NodeClasses(
                self.positions,
                changes,
                lambda node: hardware_of(node, uuids=uuids, locations=locations),
            ),
            CACHED_CLASSES,
        ).split(nodes)
        examples = [(next(self.nodes_in(alike & -alike)), alike) for alike in kinds.values()]
        self._kinds[uuids, locations] = changes.end, nodes, examples
        return examples

    def _split_by_facts(self, request: PodRequest, excluded: Excluded) -> NodeSet:
        left = self.positions.all
        requirements = request.node_requirements
        repelled_from = requirements.repelled_from
        within = requirements.within
        domains = requirements.domains
        requirements = requirements.of_template
        triggers = request.triggers
        changes = self.mirror.inventory_changes
        if self.mirror.restricted_nodes or not has_no_node_constraints(requirements):
            check = self.eligibility.check
            nodes = self._classes(
                ("facts", requirements), changes, lambda node: check(requirements, node)[0]
            )
            left = _keep_passing(nodes.split(left), excluded)
        for item in domains:
            among = self._in_domains(item, left)
            left = keep(left, among, (item.rule, DOMAIN_TEXTS[item.rule]), excluded)
        for key, values in repelled_from:
            repelled = self.by_labels((key,)).among(left, ((value,) for value in values))
            left = keep(left, left ^ repelled, REPELLED, excluded)
        for key, values in within:
            inside = self.by_labels((key,)).among(left, ((value,) for value in values))
            left = keep(left, inside, outside(key, values), excluded)
        if triggers:
            nodes = self._classes(
                ("served", triggers),
                changes,
                lambda node: check_served(
                    triggers, node.serving, node.paused, all_sick=node.all_sick
                ),
            )
            left = _keep_passing(nodes.split(left), excluded)
        return left

    def _in_domains(self, domains: NodeDomains, nodes: NodeSet) -> NodeSet:
        by_label = self.by_labels((domains.key,))
        if domains.values is None:
            return nodes ^ by_label.among(nodes, (None,))
        with_values = by_label.among(nodes, ((value,) for value in domains.values))
        return nodes ^ with_values if domains.excluded else with_values

    def _split_by_devices(
        self, request: PodRequest, left: NodeSet, excluded: Excluded
    ) -> tuple[NodeSet, NodeSet]:
        """Return the nodes that fit, and those that `split_by_device_stages` explains.

        Nodes that no column describes are checked one by one.
        """
        fitting: NodeSet = 0
        unexplained: NodeSet = 0
        if is_simple(request):
            left, differing = self._split_by_selection(request, left, excluded)
            kind, need = request_kind(request)
            plain = left & self._column("plain", is_plain).at_least(1)
            left = left ^ plain | differing

            def free(gpus: int, cores: int) -> ThresholdColumn:
                least = kind._replace(gpus=gpus, cores=cores, packs=True)
                return self._column(("fit", least), ranking_for(least).headroom)

            fitting = with_devices(plain, kind.gpus, kind.cores, need, free)
            unexplained = plain ^ fitting
        if left:
            nodes = self._classes(
                ("devices", device_key(request)),
                self.mirror.changes,
                lambda node: _check_devices(request, node),
            )
            fitting |= _keep_passing(nodes.split(left), excluded)
        return fitting, unexplained

    def _split_by_selection(
        self, request: PodRequest, left: NodeSet, excluded: Excluded
    ) -> tuple[NodeSet, NodeSet]:
        """Return nodes of which all devices are allowed, and those of which some are."""
        selection = request.selection
        if not is_selective(selection):
            return left, 0

        def failure(node: MirroredNode) -> NodeFilterFailure | None:
            allowed = allowed_devices(selection, node)
            if allowed:
                return None if len(allowed) == len(node.devices) else _SOME_ALLOWED
            return explain_no_devices(request, node)

        nodes = self._classes(
            ("selection", selection, request.containers[0].gpus),
            self.mirror.inventory_changes,
            failure,
        ).split(left)
        differing = nodes.pop((_SOME_ALLOWED.code, _SOME_ALLOWED.message), 0)
        return _keep_passing(nodes, excluded), differing

    def _column(
        self, key: Hashable, amount_of: Amount, changes: ChangeLog | None = None
    ) -> ThresholdColumn:
        column = self._columns.pop(key, None)
        if column is None:
            column = ThresholdColumn(self.positions, amount_of, changes or self.mirror.changes)
        column.catch_up()
        return store(self._columns, key, column, CACHED_COLUMNS)

    def _classes(
        self,
        key: Hashable,
        changes: ChangeLog,
        check: Callable[[MirroredNode], NodeFilterFailure | None],
    ) -> NodeClasses[Reason | None]:
        def reason_of(node: MirroredNode) -> Reason | None:
            failure = check(node)
            return None if failure is None else (failure.code, failure.message)

        return _cached(
            self._reasons,
            key,
            lambda: NodeClasses(self.positions, changes, reason_of),
            CACHED_CLASSES,
        )


def _cached(
    cache: dict[Hashable, _Cached], key: Hashable, make: Callable[[], _Cached], limit: int
) -> _Cached:
    cached = cache.pop(key, None)
    return store(cache, key, make() if cached is None else cached, limit)


def _keep_passing(classes: dict[Reason | None, NodeSet], excluded: Excluded) -> NodeSet:
    left: NodeSet = 0
    for reason, nodes in classes.items():
        if reason is None:
            left = nodes
        else:
            excluded[reason] = excluded.get(reason, 0) | nodes
    return left


def _free_amount(name: str) -> Amount:
    return lambda node: node.free_resources.get(name, 0)


def _allocatable(name: str) -> Amount:
    return lambda node: node.facts.allocatable.get(name, 0)


def _check_devices(request: PodRequest, node: MirroredNode) -> NodeFilterFailure | None:
    if choose_devices(request, node) is not None:
        return None
    return explain_no_devices(request, node)
