"""A control daemon of MPS as the agent sees it; pure."""

import math
import re
from collections.abc import Hashable, Mapping

from msgspec import Struct

from shared.model.bounds import MOST_MIB
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import DeviceUuid, PodUid

ALL_THREADS = 100
_DEVICE = re.compile(r"[\w.-]{1,64}", re.ASCII)
_PERCENT = re.compile(r"\d{1,3}(\.\d{1,6})?", re.ASCII)
_SIZE = re.compile(r"(\d{1,18})([KMG]?)B?", re.ASCII)
_PID = re.compile(r"\d{1,10}", re.ASCII)
MOST_PIDS = 1024
"""A server has 60 clients at most (CUDA 13.1)."""
_MIB_OF: Mapping[str, float] = {"": 2**-20, "K": 2**-10, "M": 1, "G": 2**10}


class WedgedError(UnavailableError):
    """New clients of a server hang, or ending one does."""


class MpsTarget(Struct, frozen=True):
    """A container, or a request of a ResourceClaim."""

    holder: PodUid
    container: str
    gpu: DeviceUuid = DeviceUuid("")
    """Whose shared server has a namespace for it; empty if it has a daemon of its own."""

    @property
    def server(self) -> Hashable:
        """What all targets have in common whose processes end together."""
        return self.gpu or self

    def __str__(self) -> str:
        return f"container {self.container} of {self.holder}"


class MpsLimits(Struct, frozen=True, kw_only=True):
    percent: int
    """Of the threads of each device, 1 to 100."""
    memory_mib: dict[DeviceUuid, int | None]
    """All devices that it sees; None if MPS does not limit its memory there."""


def check_limits(limits: MpsLimits) -> None:
    """Raise RequestError for what cannot be a part of a command or variable."""
    amounts = [mib for mib in limits.memory_mib.values() if mib is not None]
    if not all(map(_DEVICE.fullmatch, limits.memory_mib)) or not limits.memory_mib:
        raise RequestError(f"MPS limits GPUs by their UUIDs, not {list(limits.memory_mib)[:4]}")
    if not 1 <= limits.percent <= ALL_THREADS or not all(1 <= mib <= MOST_MIB for mib in amounts):
        raise RequestError(f"MPS limits to 1 to 100 % and 1 MiB or more, not {limits}")


class MpsServer(Struct, frozen=True, kw_only=True):
    pid: int
    status: str
    percent: float
    memory_mib: dict[DeviceUuid, int | None]
    clients: tuple[int, ...] = ()
    """PIDs on the node."""


class MpsDaemon(Struct, frozen=True, kw_only=True):
    pipes: str
    """The container mounts it."""
    pid: int = 0
    problem: str = ""
    percent: float = ALL_THREADS
    memory_mib: dict[DeviceUuid, int | None] = {}
    servers: tuple[MpsServer, ...] = ()

    @property
    def clients(self) -> frozenset[int]:
        return frozenset(pid for server in self.servers for pid in server.clients)

    def held_percent(self) -> int:
        return math.ceil(max([self.percent, *(server.percent for server in self.servers)]))

    def held_mib(self, device: DeviceUuid) -> int | None:
        """Return the most that a process can get, or None without a limit."""
        amounts = [self.memory_mib.get(device)]
        amounts += (server.memory_mib.get(device) for server in self.servers)
        limits = [amount for amount in amounts if amount is not None]
        return max(limits) if len(limits) == len(amounts) else None


class StartedDaemon(Struct, frozen=True):
    target: MpsTarget
    fence: int
    started_at: float
    """Unix seconds."""


def parse_percent(reply: str) -> float:
    """Raises UnavailableError for another text.

    >>> parse_percent("25.0")
    25.0
    """
    text = reply.strip()
    if _PERCENT.fullmatch(text) is None:
        raise UnavailableError(f"MPS replied {text[:80]!r}, which is no percentage")
    return float(text)


def parse_memory_mib(reply: str) -> int | None:
    """Round up to MiB; None is an empty line. Raises UnavailableError for another text.

    >>> parse_memory_mib("3G"), parse_memory_mib("")
    (3072, None)
    """
    text = reply.strip()
    match = _SIZE.fullmatch(text)
    if match is None and text:
        raise UnavailableError(f"MPS replied {text[:80]!r}, which is no amount of memory")
    return None if match is None else math.ceil(int(match[1]) * _MIB_OF[match[2]])


def parse_pids(reply: str) -> tuple[int, ...]:
    """Read PIDs, one a line. Raises UnavailableError for another text.

    >>> parse_pids("4194303")
    (4194303,)
    """
    lines = reply.split()
    if len(lines) > MOST_PIDS or not all(map(_PID.fullmatch, lines)):
        raise UnavailableError(f"MPS replied {reply.strip()[:80]!r}, which is no list of PIDs")
    return tuple(int(line) for line in lines)
