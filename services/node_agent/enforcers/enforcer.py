"""The port of an enforcer."""

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
    """Operators read it in `docs/limits.md`."""

    name: EnforcerName
    memory: str
    """Empty if it holds none."""
    compute: str
    """Empty if it holds none."""
    parts: bool
    """False if a device or an instance is one share."""
    not_held: str
    needs: str
    resize: str
    shown: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLimit:
    """None for what the enforcer does not hold."""

    device: DeviceUuid
    memory_bytes: int | None = None
    cores_percent: int | None = None
    """0 is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    limits: Sequence[HeldLimit] = ()
    problem: str = ""
    unread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    reason: ViolationReason
    text: str
    device: DeviceUuid | None = None
    """None for all devices of the container."""


class Enforcer:
    """Does nothing by default: what hardware holds needs nothing.

    All calls may be repeated.
    """

    facts: Facts
    missing_reason: ClassVar[ViolationReason] = ViolationReason.LIMIT_MISSING
    differs_reason: ClassVar[ViolationReason] = ViolationReason.LIMIT_DIFFERS
    is_exact: ClassVar[bool] = False
    """`resize` sets the limits of running programs at once, or raises an error while more is in
    use."""

    @property
    def findings(self) -> tuple[ViolationFound, ...]:
        """What is wrong beside differences, such as a container that was not started."""
        return ()

    @property
    def faults(self) -> Mapping[DeviceUuid, str]:
        return {}

    async def find_out(self, gpus: Sequence[Gpu]) -> None:
        """Called with each probe of the GPUs."""

    def unready_reason(self) -> str:
        """Return why what the GPUs report is not to be believed, or an empty text."""
        return ""

    def missing(self, gpu: Gpu, sharing: SharingConfig) -> str:
        """Return why it cannot hold parts of this GPU now, or an empty text."""
        return ""

    async def prepare(self, entry: CheckpointEntry, *, starting: bool, new: bool) -> None:
        """Set the limits of a container before its first process runs, and read them back.

        `new` is a container that cannot have changed its files, `starting` one without processes.
        Raises UnavailableError: the container must not start then.
        """

    def wanted(self, entry: CheckpointEntry) -> tuple[HeldLimit, ...]:
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
        """Return None if there is nothing to read."""
        return None

    def audit(self, entry: CheckpointEntry, read: ReadBack) -> Iterator[Difference]:
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
        """Raises UnavailableError if limits hold only when the container starts again."""

    async def end(self, live: Set[PodUid], mounted: Set[str] | None) -> None:
        """`mounted` are paths that containers have mounted, or None if that is not known."""


def _mib(amount: int | None) -> float | None:
    return None if amount is None else amount / MIB
