"""The incremental index: for each kind of request, nodes sorted by how well they would take it."""

from services.placer.index.eligibility import Eligibility
from services.placer.index.ranked_nodes import Lane
from services.placer.index.ranking import Kind, ranking_of
from services.placer.index.verdicts import Verdicts
from services.placer.mirror.cluster_mirror import Mirror
from shared.model.request import PodRequest

KEPT_LANES = 64
KEPT_VERDICTS = 32
STRICT_USES = 256


class Index:
    """Lanes by kind, and verdicts by exact request.

    Where there are too many, the oldest lane or the least used verdicts go.
    """

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self.eligibility = Eligibility(mirror)
        self._lanes: dict[Kind, Lane] = {}
        self._strict: dict[Kind, int] = {}
        self._verdicts: dict[object, Verdicts] = {}

    def likely_lane(self, kind: Kind) -> Lane:
        """Return a lane of nodes that probably fit: cores are left out unless they often decide.

        So the number of lanes to keep does not grow with the number of percentages asked for.
        """
        if kind.cores in {0, 1, 100}:
            return self.lane(kind)
        uses = self._strict.get(kind, 0)
        if not uses:
            return self.lane(kind._replace(cores=1))
        self._strict[kind] = uses - 1
        return self.lane(kind)

    def strict_lane(self, kind: Kind) -> Lane:
        """Return the lane that counts cores, and do so for a while: they do decide."""
        self._strict[kind] = STRICT_USES
        return self.lane(kind)

    def lane(self, kind: Kind) -> Lane:
        """Return the lane of exactly this kind, up to date."""
        lane = self._lanes.get(kind)
        if lane is None:
            if len(self._lanes) >= KEPT_LANES:
                del self._lanes[next(iter(self._lanes))]
            lane = self._lanes[kind] = Lane(self.mirror, ranking_of(kind), packs=kind.packs)
        lane.catch_up()
        return lane

    def known_verdicts(self, request: PodRequest) -> bool:
        """Say whether verdicts on an equal request are kept."""
        return shape_of(request) in self._verdicts

    def verdicts(self, request: PodRequest) -> Verdicts:
        """Return the verdicts on a request, up to date."""
        shape = shape_of(request)
        verdicts = self._verdicts.pop(shape, None)
        if verdicts is None:
            if len(self._verdicts) >= KEPT_VERDICTS:
                del self._verdicts[next(iter(self._verdicts))]
            verdicts = Verdicts(self.mirror, self.eligibility, request)
        self._verdicts[shape] = verdicts
        verdicts.catch_up()
        return verdicts


def shape_of(request: PodRequest) -> object:
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
