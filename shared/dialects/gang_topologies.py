"""Labels of nodes that pods of a gang share, in annotations of Kueue and KAI; pure.

https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/
https://github.com/kai-scheduler/KAI-Scheduler/tree/main/docs/topology
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.dialects.strict_values import parse_label_key
from shared.model.errors import RequestError

KUEUE_REQUIRED = "kueue.x-k8s.io/podset-required-topology"
KUEUE_PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"
KAI_REQUIRED = "kai.scheduler/topology-required-placement"
KAI_PREFERRED = "kai.scheduler/topology-preferred-placement"
KAI_SEGMENTS = "kai.scheduler/segment-size"

READ_ANNOTATIONS = frozenset(
    {KUEUE_REQUIRED, KUEUE_PREFERRED, KAI_REQUIRED, KAI_PREFERRED, KAI_SEGMENTS}
)


@dataclass(frozen=True, slots=True)
class GangTopology:
    """All pods must, or should, run on nodes with the same values."""

    required: tuple[str, ...] = ()
    preferred: tuple[str, ...] = ()


NO_TOPOLOGY = GangTopology()


def parse_topology(annotations: Mapping[str, str]) -> GangTopology:
    """Raise RequestError for what is no key of a label, and for KAI's segments.

    >>> parse_topology({"kueue.x-k8s.io/podset-required-topology": "example.com/rack"}).required
    ('example.com/rack',)
    """
    if READ_ANNOTATIONS.isdisjoint(annotations):
        return NO_TOPOLOGY
    if KAI_SEGMENTS in annotations:
        raise RequestError(
            f"{KAI_SEGMENTS} is not supported: make a gang of each segment, or remove it"
        )
    return GangTopology(
        _keys(annotations, KUEUE_REQUIRED, KAI_REQUIRED),
        _keys(annotations, KUEUE_PREFERRED, KAI_PREFERRED),
    )


def _keys(annotations: Mapping[str, str], *names: str) -> tuple[str, ...]:
    keys = (parse_label_key(name, annotations[name]) for name in names if name in annotations)
    return tuple(dict.fromkeys(keys))
