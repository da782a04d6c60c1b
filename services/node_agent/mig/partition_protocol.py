"""What a node's agent and its partitioner say to each other: one line of JSON each way.

The partitioner has rights that the agent has not, so what it is told is data that it checks, and
nothing in it names a call of the driver.
"""

import msgspec

from services.node_agent.mig.instances import InUseError, MigInstance, MigState
from shared.model.device import MigLayout
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.names import DeviceUuid

MAX_LINE = 256 * 1024
"""Bytes; what a device can have is a hundredth of it."""
ERROR_CODES: tuple[tuple[str, type[LeaseholdError]], ...] = (
    ("in use", InUseError),
    ("request", RequestError),
    ("unavailable", UnavailableError),
)
"""How errors are called on the wire; the first that fits counts."""


class InstancesRequest(msgspec.Struct, tag=True, frozen=True):
    """A question: what does this device have?"""

    device: DeviceUuid


class PartitionRequest(msgspec.Struct, tag=True, frozen=True):
    """A request: give this device this layout; instances with the UUIDs `held` stay."""

    device: DeviceUuid
    layout: MigLayout
    held: tuple[str, ...] = ()


class InstancesReply(msgspec.Struct, tag=True, frozen=True):
    """The answer to both: what the device has now."""

    state: MigState | None
    instances: tuple[MigInstance, ...] = ()


class FailureReply(msgspec.Struct, tag=True, frozen=True):
    """The other answer: why not."""

    code: str
    text: str


_request_decoder: msgspec.json.Decoder[InstancesRequest | PartitionRequest] = msgspec.json.Decoder(
    InstancesRequest | PartitionRequest
)
_reply_decoder: msgspec.json.Decoder[InstancesReply | FailureReply] = msgspec.json.Decoder(
    InstancesReply | FailureReply
)


def encode_line(said: InstancesRequest | PartitionRequest | InstancesReply | FailureReply) -> bytes:
    """Encode."""
    return msgspec.json.encode(said) + b"\n"


def decode_request(line: bytes) -> InstancesRequest | PartitionRequest:
    """Decode what the partitioner is asked. Raises RequestError for anything else."""
    try:
        return _request_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"this is no question: {error}") from error


def decode_reply(line: bytes) -> InstancesReply:
    """Decode what the agent is told. Raises what the partitioner says went wrong."""
    try:
        told = _reply_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnavailableError(f"the partitioner's answer cannot be read: {error}") from error
    if isinstance(told, FailureReply):
        raise dict(ERROR_CODES).get(told.code, UnavailableError)(told.text)
    return told


def failure_reply(error: LeaseholdError) -> FailureReply:
    """Put an error into words."""
    fault = next((name for name, kind in ERROR_CODES if isinstance(error, kind)), "unavailable")
    return FailureReply(fault, str(error))
