"""One answered Allocate, as the checkpoint keeps it."""

from dataclasses import dataclass

from shared.dialects.dialect import ContainerSetup
from shared.model.events.node_events import Allocation
from shared.model.lease import Lease
from shared.model.names import PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredLease:
    """A smaller lease that a container is held to already, and that the ledger may not have yet."""

    resize_id: str
    """In which the lease may become so."""
    lease: Lease
    """As it may become; its version is the one that this was decided on."""
    setup: ContainerSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One answered Allocate; the setup is kept, so that a repetition is answered word for word."""

    allocation: Allocation
    setup: ContainerSetup
    init: bool = False
    instances: tuple[str, ...] = ()
    """UUIDs of the MIG instances that the container has."""
    lowered: LoweredLease | None = None

    @property
    def key(self) -> tuple[PodUid, str, str]:
        """Pod, container, resource."""
        told = self.allocation
        return told.pod, told.container, told.resource

    @property
    def limits(self) -> ContainerSetup:
        """What the container is held to at this moment."""
        return self.lowered.setup if self.lowered else self.setup

    @property
    def lease(self) -> Lease:
        """The lease that it is held to."""
        return self.lowered.lease if self.lowered else self.allocation.lease
