"""What the node agent needs of others: a port for each, with the methods that it calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from services.node_agent.allocate.device_list_strategies import DeviceListStrategies
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.sharing_config import SharingConfig
from services.node_agent.mig.instances import MigInstance
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.usage.violations import Violation
from services.node_agent.views.advertisement import NodeAdvertisement
from shared.dialects.advertised import PluginDeviceId
from shared.model.device import Device
from shared.model.events.node_events import Allocation
from shared.model.events.request_reply import LimitsReply, LimitsRequest
from shared.model.names import DeviceUuid, PodUid


class Gpus(Protocol):
    """The GPUs of the node, real or simulated."""

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs; UnavailableError, saying what to do, while they cannot be asked."""
        ...


class SharingConfigSource(Protocol):
    """How the operator wants devices divided."""

    async def load(self) -> SharingConfig:
        """Return what holds now."""
        ...


class MigLayouts(Protocol):
    """Devices in MIG mode."""

    def update_devices(self, gpus: Iterable[Gpu], devices: Iterable[Device]) -> None:
        """Take what there is."""
        ...

    def leases_changed(self) -> None:
        """Make ready what leases are for."""
        ...

    async def run(self) -> None:
        """Lay devices out."""
        ...

    async def list_instances(self) -> dict[DeviceUuid, tuple[MigInstance, ...]]:
        """Return what devices have."""
        ...


class Plugins(Protocol):
    """Our device plugins."""

    def serve(self, served: Mapping[str, Mapping[str, PluginDeviceId]]) -> None:
        """Serve these lists."""
        ...

    async def run(self) -> None:
        """Keep them registered."""
        ...

    def unready_reason(self) -> str | None:
        """Say which are not registered."""
        ...


class NodeViews(Protocol):
    """What Kubernetes shows of the node."""

    def set_advertisement(self, shown: NodeAdvertisement) -> None:
        """Have the node show this."""
        ...

    async def run(self) -> None:
        """Keep the views."""
        ...


class Reporting(Protocol):
    """Something that tells somebody regularly that the agent lives."""

    async def run(self) -> None:
        """Report until cancelled."""
        ...


class Records(Protocol):
    """The checkpoint."""

    lost: bool

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Everything the kubelet was told and that is not over."""
        ...

    @property
    def entries(self) -> tuple[CheckpointEntry, ...]:
        """The same, with what containers were given."""
        ...

    @property
    def pods(self) -> frozenset[PodUid]:
        """Pods with an entry."""
        ...

    async def save(self, entry: CheckpointEntry) -> None:
        """Record an answer."""
        ...

    async def forget(self, pods: Iterable[PodUid]) -> None:
        """Drop pods that are gone."""
        ...


class Limits(Protocol):
    """What holds running containers to their leases."""

    changed: Callable[[], None]
    """To be called when `beyond` may have changed."""

    async def apply_request(self, asked: LimitsRequest) -> LimitsReply:
        """Set the limits of a lease, or hold containers to what it may become."""
        ...

    def wake(self) -> None:
        """Look at the leases without delay."""
        ...

    @property
    def beyond(self) -> Mapping[str, int]:
        """Return what pods ask of resources in node status beyond what they have by now."""
        ...

    async def run(self) -> None:
        """Keep containers to their leases."""
        ...


class Watching(Protocol):
    """What containers use of the GPUs."""

    async def run(self) -> None:
        """Look at it all the time."""
        ...

    async def violations(self) -> list[Violation]:
        """Wait for rules that are broken anew."""
        ...


class Specifying(Protocol):
    """The CDI specification of the node's devices."""

    strategies: DeviceListStrategies

    async def update(self, gpus: Sequence[Gpu]) -> None:
        """Have it say what there is; UnavailableError if it cannot."""
        ...


class Cleaning(Protocol):
    """The host's disk."""

    async def can_isolate(self) -> bool:
        """Say whether HAMi-core's library is there and could be loaded."""
        ...

    unwritable_reason: str
    """Why no container could be prepared when it was last looked at; empty: it could."""

    async def probe_disk(self) -> None:
        """See whether it can be written to."""
        ...

    def disk_pressure(self) -> str:
        """Say at once why there is no room on it; empty: there is."""
        ...

    async def remove_unused(self, keep: set[PodUid], mounted: set[str] | None) -> None:
        """Remove the directories of other pods, and libraries not mounted; None: not known."""
        ...
