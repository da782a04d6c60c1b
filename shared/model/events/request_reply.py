"""Questions that one service puts to another, and their answers."""

from dataclasses import dataclass, field
from typing import ClassVar

from shared.model.events.event import Delivery, Event
from shared.model.lease import Lease, ShareSize
from shared.model.names import NodeName, PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesRequest(Event):
    """A question of a node agent: which leases does my node hold? Answered by any binder."""

    subject: ClassVar[str] = "leases.request.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    node: NodeName
    pods: tuple[PodUid, ...] = ()
    """Only these; empty: all of the node's."""

    @property
    def route(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesReply(Event):
    """The answer to `LeasesAsked`."""

    subject: ClassVar[str] = "leases.reply.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    leases: tuple[Lease, ...] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class BindRequest(Event):
    """A question of the binder to a node's agent: may these pods be bound to your node now?"""

    subject: ClassVar[str] = "bind.request.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    node: NodeName
    leases: tuple[Lease, ...]

    @property
    def route(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class BindReply(Event):
    """The answer to `BindAsked`."""

    subject: ClassVar[str] = "bind.reply.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    deferred_pods: tuple[PodUid, ...] = ()
    """Those that the kubelet would refuse at this moment: to be asked for again."""
    reason: str = ""
    """Why, if there are any."""
    window_open: bool = True
    """For a moment nothing else need be asked for: it is not the pods that matter."""
    retry_soon: bool = False
    """It is a matter of moments: those held come next, once the kubelet has asked for others."""
    node_closed: bool = False
    """No pod whatever may be bound to the node now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationRequest(Event):
    """A question of the binder to a node's agent: has the last container of these pods ended?"""

    subject: ClassVar[str] = "termination.request.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    node: NodeName
    pod: PodUid
    more_pods: tuple[PodUid, ...] = ()
    """Asked for at the same time: what an agent has to look at is the same for all."""

    @property
    def route(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationReply(Event):
    """The answer to `EndAsked`."""

    subject: ClassVar[str] = "termination.reply.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    terminated: bool
    terminated_pods: tuple[PodUid, ...] = ()
    """Those of the others that have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsRequest(Event):
    """A question of the binder to a node's agent: are a pod's containers held to its lease?

    Without a `turn`, `lease` is what the ledger says, and its limits are to be set. With one, it is
    what the lease may become, smaller than it is: containers are to be held to that from now on,
    until the lease changes, the turn is `over`, or nobody can change it in this turn any more.
    """

    subject: ClassVar[str] = "limits.request.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    node: NodeName
    lease: Lease
    resize_id: str = ""
    finished: bool = False

    @property
    def route(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsReply(Event):
    """The answer to `LimitsAsked`."""

    subject: ClassVar[str] = "limits.reply.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    applied: bool
    reason: str = ""
    """Why not."""
    in_use_mib: int = 0
    """Of the device that is in the way: the least that each device's limit can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequest(Event):
    """An operator's wish: a running container is to have another size of each of its devices."""

    subject: ClassVar[str] = "resize.request.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    pod: PodUid
    container: str = ""
    """Empty: the only one with a share."""
    memory_mib: int | None = None
    """None: as much as it has."""
    cores_percent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeReply(Event):
    """The answer to `ResizeAsked`."""

    subject: ClassVar[str] = "resize.reply.v1"
    delivery: ClassVar[Delivery] = Delivery.BROADCAST

    outcome: str
    """resized; unchanged: it has that size already; refused; unavailable: to be asked again."""
    reason: str = ""
    """Of the last two, with numbers."""
    hint: str = ""
    """What to try next."""
    container: str = ""
    node: str = ""
    devices: tuple[int, ...] = ()
    """Their indices on the node."""
    before: ShareSize | None = None
    after: ShareSize | None = None
    pending: tuple[str, ...] = ()
    """What follows by itself and was not seen to be done yet, in words."""
    notes: tuple[str, ...] = ()
    """What the operator should know, in words."""
