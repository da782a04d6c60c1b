"""One answered Allocate, as the checkpoint keeps it."""

from dataclasses import dataclass

from shared.dialects.dialect import ContainerSetup
from shared.model.names import PodUid
from shared.model.node_events import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One answered Allocate; the setup is kept, so that a repetition is answered word for word."""

    activation: Activation
    setup: ContainerSetup
    init: bool = False
    instances: tuple[str, ...] = ()
    """UUIDs of the MIG instances that the container has."""

    @property
    def key(self) -> tuple[PodUid, str, str]:
        """Pod, container, resource."""
        told = self.activation
        return told.pod, told.container, told.resource
