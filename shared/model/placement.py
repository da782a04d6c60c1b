"""The answer to a request: where it goes, or why it goes nowhere."""

from dataclasses import dataclass

from shared.model.lease import Share
from shared.model.names import DeviceUuid, NodeName


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A choice of node and devices; nothing is held yet."""

    node: NodeName
    shares: tuple[Share, ...]
    node_version: int = 0
    """The ledger's version of the node when the choice was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceVerdict:
    """Why one device did not fit."""

    device: DeviceUuid
    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """Why one node did not fit, with its devices where it came to them."""

    node: NodeName
    reason: str
    devices: tuple[DeviceVerdict, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """No node fits. Reasons are counted over all nodes; only the nearest few are spelled out."""

    reason: str
    """One line with the numbers, as Kubernetes' `0/N nodes are available: …` reads."""
    counts: tuple[tuple[str, int], ...] = ()
    """(machine-readable reason, number of nodes), most frequent first."""
    nearest_nodes: tuple[NodeVerdict, ...] = ()
    hint: str = ""
    """The next thing to try."""
    permanent: bool = False
    """No freed capacity could ever help; only a changed pod or cluster can."""
    quota: str = ""
    """The namespace whose quota is in the way; what it frees is offered to the pod."""

    @property
    def text(self) -> str:
        """The refusal in whole sentences: the numbers, then the next thing to try."""
        if not self.hint:
            return self.reason
        end = "" if self.hint.endswith((".", "?")) else "."
        return f"{self.reason} {self.hint[0].upper()}{self.hint[1:]}{end}".strip()
