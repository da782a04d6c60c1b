"""Questions that one service puts to another, and their answers."""

from dataclasses import dataclass, field
from typing import ClassVar

from shared.model.event import Delivery, Event
from shared.model.lease import Lease
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
