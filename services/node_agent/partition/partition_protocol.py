"""The protocol between agent and partitioner, one line of JSON each way; pure.

The partitioner has privileges that the agent does not have, so no request names a call of the
driver.
"""

import msgspec

from services.node_agent.mig.instances import InUseError, MigInstance, MigState
from shared.model.devices.device import MigLayout
from shared.model.errors import UNDECODABLE, LeaseholdError, RequestError, UnavailableError
from shared.model.names import DeviceUuid

MAX_LINE = 256 * 1024
"""In bytes; about 100 times the size of a device's instances."""
ERROR_CODES: tuple[tuple[str, type[LeaseholdError]], ...] = (
    ("in use", InUseError),
    ("request", RequestError),
    ("unavailable", UnavailableError),
)


class InstancesRequest(msgspec.Struct, tag=True, frozen=True):
    device: DeviceUuid
    after_changes: bool = False
    """Changes that were requested before have ended."""


class PartitionRequest(msgspec.Struct, tag=True, frozen=True):
    device: DeviceUuid
    layout: MigLayout
    in_use: tuple[str, ...] = ()


class InstancesReply(msgspec.Struct, tag=True, frozen=True):
    state: MigState | None
    instances: tuple[MigInstance, ...] = ()


class FailureReply(msgspec.Struct, tag=True, frozen=True):
    code: str
    text: str


Request = InstancesRequest | PartitionRequest
Reply = InstancesReply | FailureReply
_request_decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_reply_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def encode_line(message: Request | Reply) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    try:
        return _request_decoder.decode(line)
    except UNDECODABLE as error:
        raise RequestError(f"invalid request: {error}") from error


def decode_reply(line: bytes) -> InstancesReply:
    try:
        reply = _reply_decoder.decode(line)
    except UNDECODABLE as error:
        raise UnavailableError(f"the partitioner's reply is invalid: {error}") from error
    if isinstance(reply, FailureReply):
        raise dict(ERROR_CODES).get(reply.code, UnavailableError)(reply.text)
    return reply


def failure_reply(error: LeaseholdError) -> FailureReply:
    fault = next((name for name, kind in ERROR_CODES if isinstance(error, kind)), "unavailable")
    return FailureReply(fault, str(error))
