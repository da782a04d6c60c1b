"""What the checkpoint holds: an entry for each answered Allocate, a fence for each slot; pure."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from shared.dialects.dialect import ContainerSetup
from shared.model.events.node_events import Allocation
from shared.model.lease import Lease, Share
from shared.model.names import PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """The newest fence honoured for a slot, and for which pod."""

    fence: int
    pod: PodUid


def slot_key(share: Share, pod: PodUid) -> str:
    """Return the key under which fences only rise: a slot's; without a slot, the pod's own."""
    slot = pod if share.slot is None else str(share.slot)
    return f"{share.device}/{slot}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredLease:
    """A smaller lease that a container is held to already; the ledger may not have it yet."""

    resize_id: str
    """The resize in which the lease may become so."""
    lease: Lease
    """As it may become; its version is the one that the resize was decided on."""
    setup: ContainerSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One answered Allocate, with its setup: a repeated call gets the same answer."""

    allocation: Allocation
    setup: ContainerSetup
    init: bool = False
    instances: tuple[str, ...] = ()
    """UUIDs of the container's MIG instances."""
    lowered: LoweredLease | None = None

    @property
    def key(self) -> tuple[PodUid, str, str]:
        """Pod, container, resource."""
        allocation = self.allocation
        return allocation.pod, allocation.container, allocation.resource

    @property
    def limits(self) -> ContainerSetup:
        """What the container is held to now."""
        return self.lowered.setup if self.lowered else self.setup

    @property
    def lease(self) -> Lease:
        """The lease that it is held to now."""
        return self.lowered.lease if self.lowered else self.allocation.lease


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationHistory:
    """The agent's own answers for one resource, by pod and container."""

    answered: Mapping[tuple[PodUid, str], tuple[str, ...]] = field(default_factory=dict)
    """Device IDs of answered Allocate calls."""
    refused: Set[PodUid] = frozenset()


class CheckpointEntries(Protocol):
    """The checkpoint, as far as most rooms need it."""

    @property
    def entries(self) -> tuple[CheckpointEntry, ...]:
        """All answers whose containers have not ended."""
        ...
