"""The incremental index: for each kind of request, nodes sorted by how well they fit; pure."""

from services.placer.index.eligibility import NodeEligibility
from services.placer.index.node_rank import RequestKind, ranking_for
from services.placer.index.ranked_nodes import RankedNodes
from services.placer.index.request_verdicts import RequestVerdicts
from services.placer.mirror.cluster_mirror import ClusterMirror
from shared.model.request import PodRequest

CACHED_KINDS = 64
CACHED_VERDICTS = 32
EXACT_CORES_USES = 256
"""After cores decided once, the next so many requests of the kind use ranks that count cores."""


class NodeIndex:
    """Ranked nodes by kind of request, and verdicts by exact request.

    Where there are too many, the oldest kind or the least recently used verdicts are dropped.
    """

    def __init__(self, mirror: ClusterMirror) -> None:
        self.mirror = mirror
        self.eligibility = NodeEligibility(mirror)
        self._ranked_nodes: dict[RequestKind, RankedNodes] = {}
        self._exact_uses_left: dict[RequestKind, int] = {}
        self._verdicts: dict[object, RequestVerdicts] = {}

    def likely_nodes(self, kind: RequestKind) -> RankedNodes:
        """Return nodes that probably fit: cores are left out unless they have decided lately.

        So the number of kinds does not grow with the number of different percentages.
        """
        if kind.cores in {0, 1, 100}:
            return self.ranked_nodes(kind)
        uses_left = self._exact_uses_left.get(kind, 0)
        if not uses_left:
            return self.ranked_nodes(kind._replace(cores=1))
        self._exact_uses_left[kind] = uses_left - 1
        return self.ranked_nodes(kind)

    def exact_nodes(self, kind: RequestKind) -> RankedNodes:
        """Return nodes ranked with cores counted, and count cores for the next requests too."""
        self._exact_uses_left[kind] = EXACT_CORES_USES
        return self.ranked_nodes(kind)

    def ranked_nodes(self, kind: RequestKind) -> RankedNodes:
        """Return the ranked nodes of exactly this kind, up to date."""
        ranked_nodes = self._ranked_nodes.get(kind)
        if ranked_nodes is None:
            if len(self._ranked_nodes) >= CACHED_KINDS:
                del self._ranked_nodes[next(iter(self._ranked_nodes))]
            ranked_nodes = self._ranked_nodes[kind] = RankedNodes(
                self.mirror, ranking_for(kind), packs=kind.packs
            )
        ranked_nodes.catch_up()
        return ranked_nodes

    def has_verdicts(self, request: PodRequest) -> bool:
        """Return whether verdicts on an equal request are cached."""
        return placement_key(request) in self._verdicts

    def verdicts(self, request: PodRequest) -> RequestVerdicts:
        """Return the verdicts on a request, up to date."""
        key = placement_key(request)
        verdicts = self._verdicts.pop(key, None)
        if verdicts is None:
            if len(self._verdicts) >= CACHED_VERDICTS:
                del self._verdicts[next(iter(self._verdicts))]
            verdicts = RequestVerdicts(self.mirror, self.eligibility, request)
        self._verdicts[key] = verdicts
        verdicts.catch_up()
        return verdicts


def placement_key(request: PodRequest) -> object:
    """Return a key that is equal for requests that fit the same places."""
    return (
        request.containers,
        request.same_device,
        request.triggers,
        request.selection,
        request.distinct_devices,
        request.anti_affinity_groups,
        request.topology_scope,
        request.prefer_links,
        request.prefer_mig,
        request.allocation_weights,
        request.device_order,
        request.node_order,
        tuple(sorted(request.resources.items())),
        request.node_requirements,
    )
