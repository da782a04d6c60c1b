"""The port of an enforcer: what it holds and needs, and how the agent drives it."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.devices.enforcers import LABELS
from shared.model.devices.enforcers import Enforcer as EnforcerName
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.leases.lease import MIB
from shared.model.names import DeviceUuid, PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What operators read about an enforcer; `docs/limits.md` has these sentences."""

    name: EnforcerName
    memory: str
    """What of a share's memory it holds; empty if nothing."""
    compute: str
    """What of a share's cores it holds; empty if nothing."""
    parts: bool
    """Whether it divides a device among shares; else a device or an instance is one share."""
    not_held: str
    needs: str
    resize: str
    shown: str
    """How it is seen whether it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLimit:
    """What a share of a container is held to; None for what the enforcer does not hold."""

    device: DeviceUuid
    memory_bytes: int | None = None
    cores_percent: int | None = None
    """0 is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    limits: Sequence[HeldLimit] = ()
    problem: str = ""
    """Why the limits are not there or cannot be read; or empty."""
    unread: str = ""
    """Why it is not known now what holds, as while the partitioner starts again; or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What is held is not what was leased."""

    reason: ViolationReason
    text: str
    device: DeviceUuid | None = None
    """None for all devices of the container."""


class Enforcer:
    """Does nothing by default: what hardware holds needs nothing.

    A subclass in a module of its own, and its entry in `table.py`, are a new enforcer. All calls
    may be repeated.
    """

    facts: Facts
    missing_reason: ClassVar[ViolationReason] = ViolationReason.LIMIT_MISSING
    differs_reason: ClassVar[ViolationReason] = ViolationReason.LIMIT_DIFFERS
    is_exact: ClassVar[bool] = False
    """Whether `resize` sets the limits of running programs at once, or raises an error while more
    is in use. Then a smaller limit is set before it is recorded; otherwise the use is looked at."""

    @property
    def findings(self) -> tuple[ViolationFound, ...]:
        """What is wrong now beside differences, such as a container that was not started."""
        return ()

    @property
    def faults(self) -> Mapping[DeviceUuid, str]:
        """Devices that get no new share now, and why."""
        return {}

    async def find_out(self, gpus: Sequence[Gpu]) -> None:
        """Find out what it can hold now; called with each probe of the GPUs."""

    def unready_reason(self) -> str:
        """Return why what the GPUs report is not to be believed, or an empty text."""
        return ""

    def missing(self, gpu: Gpu, sharing: SharingConfig) -> str:
        """Return why it cannot hold parts of this GPU now, or an empty text."""
        return ""

    async def prepare(self, entry: CheckpointEntry, *, starting: bool, new: bool) -> None:
        """Set the limits of a container before its first process runs, and read them back.

        `new` is a container that cannot have changed its files, `starting` one without processes.
        Raises UnavailableError if they cannot be set: the container must not start then.
        """

    def wanted(self, entry: CheckpointEntry) -> tuple[HeldLimit, ...]:
        """Return the limits that the lease of a container has, as far as this enforcer holds it."""
        name = self.facts.name
        return tuple(
            HeldLimit(
                device=share.device,
                memory_bytes=share.limit_bytes if share.memory == name else None,
                cores_percent=share.cores_percent if share.compute == name else None,
            )
            for share in entry.lease.shares_of(entry.allocation.container)
            if name in (share.memory, share.compute)
        )

    async def read_back(self, entry: CheckpointEntry) -> ReadBack | None:
        """Return what holds a container now, or None if there is nothing to read."""
        return None

    def audit(self, entry: CheckpointEntry, read: ReadBack) -> Iterator[Difference]:
        """Yield what differs between a container's lease and what was read back."""
        label = LABELS[self.facts.name]
        if read.unread:
            return
        if read.problem:
            yield Difference(reason=self.missing_reason, text=f"{label}: {read.problem}")
            return
        held = {limit.device: limit for limit in read.limits}
        for wanted in self.wanted(entry):
            limit = held.get(wanted.device)
            if limit is None:
                text = f"{label} has no limit of GPU {wanted.device}"
                yield Difference(reason=self.missing_reason, text=text, device=wanted.device)
                continue
            for unit, is_held, is_wanted in (
                ("MiB", _mib(limit.memory_bytes), _mib(wanted.memory_bytes)),
                ("% of the cores", limit.cores_percent, wanted.cores_percent),
            ):
                if is_wanted is not None and is_held != is_wanted:
                    text = (
                        f"{label} holds it to {is_held} {unit} of GPU {wanted.device} instead of "
                        f"{is_wanted}"
                    )
                    yield Difference(reason=self.differs_reason, text=text, device=wanted.device)

    async def resize(self, entry: CheckpointEntry) -> None:
        """Set the limits of a running container to those of its entry.

        Raises UnavailableError if they hold only when the container starts again.
        """

    async def end(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        """Remove what it keeps for pods other than `live`.

        `mounted` are paths that containers have mounted, or None if that is not known.
        """


def _mib(amount: int | None) -> float | None:
    return None if amount is None else amount / MIB
