"""Questions that one service puts to another, and their answers."""

from dataclasses import dataclass, field
from typing import ClassVar

from shared.model.events.event import Delivery, Event
from shared.model.lease import Lease, Size
from shared.model.names import NodeName, PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesAsked(Event):
    """A question of a node agent: which leases does my node hold? Answered by any binder."""

    subject: ClassVar[str] = "lease.asked.v1"
    delivery: ClassVar[Delivery] = Delivery.NEWS

    node: NodeName
    pods: tuple[PodUid, ...] = ()
    """Only these; empty: all of the node's."""

    @property
    def route(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesTold(Event):
    """The answer to `LeasesAsked`."""

    subject: ClassVar[str] = "lease.told.v1"
    delivery: ClassVar[Delivery] = Delivery.NEWS

    leases: tuple[Lease, ...] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class BindAsked(Event):
    """A question of the binder to a node's agent: may these pods be bound to your node now?"""

    subject: ClassVar[str] = "bind.asked.v1"
    delivery: ClassVar[Delivery] = Delivery.NEWS

    node: NodeName
    leases: tuple[Lease, ...]

    @property
    def route(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class BindTold(Event):
    """The answer to `BindAsked`."""

    subject: ClassVar[str] = "bind.told.v1"
    delivery: ClassVar[Delivery] = Delivery.NEWS

    held: tuple[PodUid, ...] = ()
    """Those that the kubelet would refuse at this moment: to be asked for again."""
    reason: str = ""
    """Why, if there are any."""
    free: bool = True
    """For a moment nothing else need be asked for: it is not the pods that matter."""
    soon: bool = False
    """It is a matter of moments: those held come next, once the kubelet has asked for others."""
    closed: bool = False
    """No pod whatever may be bound to the node now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAsked(Event):
    """A question of the binder to a node's agent: has the last container of these pods ended?"""

    subject: ClassVar[str] = "end.asked.v1"
    delivery: ClassVar[Delivery] = Delivery.NEWS

    node: NodeName
    pod: PodUid
    more: tuple[PodUid, ...] = ()
    """Asked for at the same time: what an agent has to look at is the same for all."""

    @property
    def route(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTold(Event):
    """The answer to `EndAsked`."""

    subject: ClassVar[str] = "end.told.v1"
    delivery: ClassVar[Delivery] = Delivery.NEWS

    ended: bool
    more: tuple[PodUid, ...] = ()
    """Those of the others that have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsAsked(Event):
    """A question of the binder to a node's agent: are a pod's containers held to its lease?

    Without a `turn`, `lease` is what the ledger says, and its limits are to be set. With one, it is
    what the lease may become, smaller than it is: containers are to be held to that from now on,
    until the lease changes, the turn is `over`, or nobody can change it in this turn any more.
    """

    subject: ClassVar[str] = "limits.asked.v1"
    delivery: ClassVar[Delivery] = Delivery.NEWS

    node: NodeName
    lease: Lease
    turn: str = ""
    over: bool = False

    @property
    def route(self) -> str:
        return self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsTold(Event):
    """The answer to `LimitsAsked`."""

    subject: ClassVar[str] = "limits.told.v1"
    delivery: ClassVar[Delivery] = Delivery.NEWS

    done: bool
    reason: str = ""
    """Why not."""
    in_use_mib: int = 0
    """Of the device that is in the way: the least that each device's limit can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeAsked(Event):
    """An operator's wish: a running container is to have another size of each of its devices."""

    subject: ClassVar[str] = "resize.asked.v1"
    delivery: ClassVar[Delivery] = Delivery.NEWS

    pod: PodUid
    container: str = ""
    """Empty: the only one with a share."""
    memory_mib: int | None = None
    """None: as much as it has."""
    cores_percent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeTold(Event):
    """The answer to `ResizeAsked`."""

    subject: ClassVar[str] = "resize.told.v1"
    delivery: ClassVar[Delivery] = Delivery.NEWS

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
    before: Size | None = None
    after: Size | None = None
    pending: tuple[str, ...] = ()
    """What follows by itself and was not seen to be done yet, in words."""
    notes: tuple[str, ...] = ()
    """What the operator should know, in words."""
