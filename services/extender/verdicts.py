"""Which of the offered nodes fit a pod, and why the others do not; pure."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from shared.model.names import NodeName
from shared.model.placement import Refusal
from shared.model.request import PodRequest
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.index.node_sets import Excluded
from shared.placing.refusal.refusals import cached_refusal, explain_refusal

CACHED_SPLITS = 64
CLAIMED = "GpuClaimed"
UNKNOWN = "node(s) were not in Leasehold's ledger"


@dataclass(frozen=True, slots=True)
class NodeSplit:
    """All nodes of the mirror, for one kind of request."""

    position: int
    """The mirror's position then."""
    reasons: dict[NodeName, str]
    """Why each node that does not fit does not, without names of devices."""
    claimed: frozenset[NodeName]
    """Nodes that fit but for devices which a preemption has claimed."""
    excluded: Excluded
    has_fitting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedVerdict:
    """The offered nodes that fit, and why the others do not."""

    fitting: list[NodeName]
    reasons: dict[NodeName, str]


class NodeFilter:
    """Splits the mirror's nodes once per kind of request, until the mirror changes."""

    def __init__(self, index: NodeIndex) -> None:
        self.index = index
        self._splits: dict[Hashable, NodeSplit] = {}

    def verdict(
        self, request: PodRequest, offered: Sequence[NodeName], claimed_on: NodeName | None = None
    ) -> OfferedVerdict:
        """Return the verdict; on the node `claimed_on`, claimed devices are the pod's own."""
        split = self._split(request)
        known, reasons = self.index.mirror.nodes, split.reasons
        fitting = [name for name in offered if name in known and name not in reasons]
        if claimed_on in split.claimed and claimed_on in offered:
            fitting.append(claimed_on)
        if len(fitting) == len(offered):
            return OfferedVerdict(fitting=fitting, reasons={})
        chosen = frozenset(fitting)
        failed = {name: reasons.get(name, UNKNOWN) for name in offered if name not in chosen}
        return OfferedVerdict(fitting=fitting, reasons=failed)

    def refusal(self, request: PodRequest, verdict: OfferedVerdict) -> Refusal:
        """Return why no offered node fits, as the placer explains it where it can."""
        split = self._split(request)
        if not split.has_fitting:
            cached = cached_refusal(request, self.index)
            return cached or explain_refusal(request, self.index, split.excluded)
        total, left = len(self.index.mirror.nodes), len(verdict.reasons)
        return Refusal(
            reason=f"0/{left} nodes are available: {counted(verdict.reasons.values())}; "
            f"kube-scheduler has excluded {total - left} others",
            hint="see its own events about the pod (kubectl describe pod)",
        )

    def _split(self, request: PodRequest) -> NodeSplit:
        key, position = placement_key(request), self.index.mirror.changes.end
        split = self._splits.pop(key, None)
        if split is None or split.position != position:
            split = self._make(request)
            if len(self._splits) >= CACHED_SPLITS:
                del self._splits[next(iter(self._splits))]
        self._splits[key] = split
        return split

    def _make(self, request: PodRequest) -> NodeSplit:
        index = self.index
        fitting, excluded = index.sets.split(request)
        reasons = {
            node.name: text
            for (_, text), members in excluded.items()
            for node in index.sets.nodes_in(members)
        }
        claimed = (
            node.name
            for (code, _), members in excluded.items()
            if code == CLAIMED
            for node in index.sets.nodes_in(members)
        )
        return NodeSplit(
            position=index.mirror.changes.end,
            reasons=reasons,
            claimed=frozenset(claimed),
            excluded=excluded,
            has_fitting=bool(fitting),
        )


def counted(texts: Iterable[str]) -> str:
    """Return each text once with its number, the most frequent first."""
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{number} {text}" for text, number in ordered)


def refused_everywhere(offered: Iterable[NodeName], reason: str) -> OfferedVerdict:
    """Return the verdict on a pod that no node helps."""
    return OfferedVerdict(fitting=[], reasons=dict.fromkeys(offered, reason))
