"""Domains: nodes with equal values of the labels that the pods of a gang share; pure."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from services.placer.rounds.room_counts import pods_on_empty_nodes, pods_on_nodes
from shared.model.events.pod_events import PodQueued
from shared.model.names import NodeName
from shared.model.requests.request import PodRequest, Within
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.index.threshold_column import NodeSet

Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """The labels that the pods of a gang share, or should share."""

    required: Keys = ()
    preferred: Keys = ()
    one_node_claim: str = ""


NO_TOPOLOGY = Topology()


def topology_of(members: Iterable[PodQueued]) -> Topology:
    required: dict[str, None] = {}
    preferred: dict[str, None] = {}
    claim = ""
    gangs = dict.fromkeys(event.request.gang for event in members)
    for gang in gangs:
        if gang is not None:
            required |= dict.fromkeys(gang.required_topology)
            preferred |= dict.fromkeys(gang.preferred_topology)
            claim = claim or gang.one_node_claim
    if not (required or preferred):
        return NO_TOPOLOGY
    only_preferred = tuple(key for key in preferred if key not in required)
    return Topology(tuple(required), only_preferred, claim)


def names_any(event: PodQueued, keys: Iterable[str]) -> bool:
    gang = event.request.gang
    return gang is not None and any(
        key in gang.required_topology or key in gang.preferred_topology for key in keys
    )


def own_part(within: Within, event: PodQueued) -> Within:
    """Return the part of `within` with labels that the pod names itself."""
    return tuple((key, values) for key, values in within if names_any(event, (key,)))


def part_of(within: Within, keys: Keys) -> Within:
    return tuple((key, values) for key, values in within if key in keys)


def values_on(nodes: Iterable[NodeName], keys: Keys, index: NodeIndex) -> Within:
    """Return the labels of these keys that the nodes have, each with all of its values there."""
    values: dict[str, set[str]] = {}
    for name in nodes:
        node = index.mirror.nodes.get(name)
        labels = {} if node is None else node.facts.labels
        for key in keys:
            if key in labels:
                values.setdefault(key, set()).add(labels[key])
    return tuple((key, frozenset(values[key])) for key in keys if key in values)


@dataclass(frozen=True, slots=True)
class PodKind:
    """Pods of a gang that fit the same places."""

    pods: tuple[PodQueued, ...]
    request: PodRequest
    """With what repels the first of them from nodes."""
    fitting: NodeSet
    """The nodes that fit one of them."""


@dataclass(frozen=True, slots=True)
class Domain:
    within: Within
    nodes: NodeSet

    @property
    def name(self) -> str:
        """The values of its labels, such as `zone-a/rack-7`."""
        return "/".join(" or ".join(sorted(values)) for _, values in self.within)


def kinds_of(members: Iterable[PodQueued], keys: Keys, index: NodeIndex) -> list[PodKind]:
    """Pods that name none of these labels are left out."""
    alike: dict[Hashable, list[PodQueued]] = {}
    for event in members:
        if names_any(event, keys):
            alike.setdefault(placement_key(event.request), []).append(event)
    kinds = []
    for pods in alike.values():
        request = index.restricted(pods[0], pods[0].request)
        fitting = index.fitting_nodes(request)
        nodes = 0 if isinstance(fitting, NoFit) else fitting
        kinds.append(PodKind(tuple(pods), request, nodes))
    return kinds


def nodes_within(within: Within, index: NodeIndex) -> NodeSet:
    nodes = index.sets.positions.all
    for key, values in within:
        nodes = index.sets.by_labels((key,)).among(nodes, ((value,) for value in values))
    return nodes


def domains_by_size(
    kinds: Sequence[PodKind], keys: Keys, within: Within, index: NodeIndex
) -> list[Domain]:
    """Domains that fit on the fewest nodes come first, and leave larger ones to larger gangs."""
    fitting: NodeSet = 0
    for kind in kinds:
        fitting |= kind.fitting
    domains = []
    for values, nodes in index.sets.by_labels(keys).split(nodes_within(within, index)).items():
        if values is not None:
            labels = zip(keys, values, strict=True)
            parts = ((key, frozenset({value})) for key, value in labels)
            domains.append(Domain((*within, *parts), nodes))
    domains.sort(key=lambda domain: ((domain.nodes & fitting).bit_count(), domain.name))
    return domains


def room_in(kinds: Sequence[PodKind], index: NodeIndex, nodes: NodeSet) -> int:
    return sum(
        pods_on_nodes(kind.request, index, kind.fitting & nodes, len(kind.pods)) for kind in kinds
    )


def room_if_empty(
    kinds: Sequence[PodKind], index: NodeIndex, nodes: NodeSet, *, as_is: bool = False
) -> int:
    return sum(
        pods_on_empty_nodes(kind.request, index, len(kind.pods), as_is=as_is, among=nodes)
        for kind in kinds
    )
