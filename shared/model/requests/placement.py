"""The result of placing a pod: a placement or a refusal; pure."""

import msgspec

from shared.model.bounds import (
    Amount,
    Count,
    Fence,
    Index,
    KeyText,
    LongText,
    MessageText,
    Resources,
    ShortText,
)
from shared.model.leases.lease import Share
from shared.model.names import DeviceUuid, NodeName


class Placement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A choice of node and devices; nothing is reserved yet."""

    node: NodeName
    shares: tuple[Share, ...]
    numa_cpus: Resources = msgspec.field(default_factory=dict)
    """What it takes beside the pod's resources, by `numa_cpus_name`."""
    node_version: Fence = 0
    weighed: LongText = ""


class DeviceVerdict(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    device: DeviceUuid
    index: Index
    reason: MessageText


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    node: NodeName
    reason: MessageText
    devices: tuple[DeviceVerdict, ...] = ()


class DomainRoom(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """For how many pods of a gang the nodes have room that share values of some labels."""

    domain: KeyText
    """The values, separated by slashes."""
    room: Count


class Refusal(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """No node fits. Reasons are counted over all nodes; a few nodes have details."""

    reason: MessageText
    """One line, as Kubernetes' `0/N nodes are available: …`."""
    counts: tuple[tuple[KeyText, Amount], ...] = ()
    """With the number of nodes, most frequent first."""
    nearest_nodes: tuple[NodeVerdict, ...] = ()
    hint: MessageText = ""
    permanent: bool = False
    """Only a change of the pod or the cluster can help."""
    quota: ShortText = ""
    """Namespace whose quota is exceeded; its freed capacity is offered to the pod."""
    forming: bool = False
    """Pods of its gang are missing, and may be created any moment."""
    domains: tuple[DomainRoom, ...] = ()
    """If the pods of its gang must share a domain: the largest first."""

    @property
    def text(self) -> str:
        if not self.hint:
            return self.reason
        parts = (self.reason, f"{self.hint[0].upper()}{self.hint[1:]}")
        return " ".join(part if part.endswith((".", "?")) else f"{part}." for part in parts if part)
