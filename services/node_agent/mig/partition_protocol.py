"""What a node's agent and its partitioner say to each other: one line of JSON each way.

The partitioner has rights that the agent has not, so what it is told is data that it checks, and
nothing in it names a call of the driver.
"""

import msgspec

from services.node_agent.mig.layout_changes import InUseError, MigInstance, MigState
from shared.model.device import MigLayout
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import DeviceUuid

MAX_LINE = 256 * 1024
"""Bytes; what a device can have is a hundredth of it."""
FAULTS: tuple[tuple[str, type[LeaseholdError]], ...] = (
    ("in use", InUseError),
    ("request", RequestError),
    ("unavailable", UnavailableError),
)
"""How errors are called on the wire; the first that fits counts."""


class Look(msgspec.Struct, tag=True, frozen=True):
    """A question: what does this device have?"""

    device: DeviceUuid


class Partition(msgspec.Struct, tag=True, frozen=True):
    """A request: give this device this layout; instances with the UUIDs `held` stay."""

    device: DeviceUuid
    layout: MigLayout
    held: tuple[str, ...] = ()


class Seen(msgspec.Struct, tag=True, frozen=True):
    """The answer to both: what the device has now."""

    state: MigState | None
    instances: tuple[MigInstance, ...] = ()


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The other answer: why not."""

    fault: str
    text: str


_asked: msgspec.json.Decoder[Look | Partition] = msgspec.json.Decoder(Look | Partition)
_told: msgspec.json.Decoder[Seen | Failed] = msgspec.json.Decoder(Seen | Failed)


def line_of(said: Look | Partition | Seen | Failed) -> bytes:
    """Encode."""
    return msgspec.json.encode(said) + b"\n"


def asked_in(line: bytes) -> Look | Partition:
    """Decode what the partitioner is asked. Raises RequestError for anything else."""
    try:
        return _asked.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"this is no question: {error}") from error


def seen_in(line: bytes) -> Seen:
    """Decode what the agent is told. Raises what the partitioner says went wrong."""
    try:
        told = _told.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnavailableError(f"the partitioner's answer cannot be read: {error}") from error
    if isinstance(told, Failed):
        raise dict(FAULTS).get(told.fault, UnavailableError)(told.text)
    return told


def failed(error: LeaseholdError) -> Failed:
    """Put an error into words."""
    fault = next((name for name, kind in FAULTS if isinstance(error, kind)), "unavailable")
    return Failed(fault, str(error))
