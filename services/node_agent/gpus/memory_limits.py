"""Limits of the driver on memory; pure."""

from enum import StrEnum

from msgspec import Struct

from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid, PodUid

UNLIMITED = 2**64 - 1
"""`NVML_DEVICE_MEMORY_LIMIT_MAX`."""


class Accounting(StrEnum):
    DMEM = "dmem"
    """In the kernel, from 6.14: all cgroups above a process hold it. Lowering a limit below the use
    is ignored, and reported as success."""
    MISC = "misc"
    """In the driver: the nearest cgroup with a limit holds a process, and counts from when it was
    set. Lowering a limit below the use is refused."""


class MemoryLimit(Struct, frozen=True, kw_only=True, gc=False):
    hard_bytes: int
    soft_bytes: int = 0
    used_bytes: int = 0

    @property
    def is_none(self) -> bool:
        return self.hard_bytes == UNLIMITED and self.soft_bytes == 0


class LimitTarget(Struct, frozen=True, gc=False):
    device: DeviceUuid
    pod: PodUid
    container_id: str = ""
    """Empty for the cgroup of the pod."""

    def __str__(self) -> str:
        container = f", container {self.container_id}" if self.container_id else ""
        return f"GPU {self.device}, pod {self.pod}{container}"


class ForeignLimit(Struct, frozen=True, kw_only=True, gc=False):
    cgroup: str
    hard_bytes: int
    soft_bytes: int = 0
    pod: PodUid | None = None
    """None outside of pods."""


class DriverAccounting(Struct, frozen=True):
    accounting: Accounting
    agent_limit_mib: int | None = None
    """An agent with a limit would see a smaller GPU."""
    foreign: tuple[ForeignLimit, ...] = ()


class LimitFault(StrEnum):
    TOO_OLD = "too-old"
    NOT_SUPPORTED = "not-supported"
    NO_CGROUP = "no-cgroup"
    CHAIN_BROKEN = "chain-broken"
    """A cgroup on the way from the root has no files of `dmem`."""
    NOT_PERMITTED = "not-permitted"
    REFUSED = "refused"
    OUTDATED = "outdated"


class LimitError(UnavailableError):
    def __init__(self, fault: LimitFault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


TOO_OLD = (
    "the NVIDIA driver is older than R615, which is the first that limits the memory of containers"
)
