"""The protocol between agent and partitioner, one line of JSON each way; pure.

The partitioner has privileges that the agent does not have, so no request names a call of the
driver.
"""

from typing import TypeVar

import msgspec

from services.node_agent.gpus.memory_limits import (
    DriverAccounting,
    LimitError,
    LimitFault,
    LimitTarget,
    MemoryLimit,
)
from services.node_agent.mig.instances import InUseError, MigInstance, MigState
from services.node_agent.mps.daemon import (
    MpsDaemon,
    MpsLimits,
    MpsTarget,
    StartedDaemon,
    WedgedError,
)
from shared.model.devices.device import MigLayout
from shared.model.devices.time_slices import Interval
from shared.model.errors import UNDECODABLE, LeaseholdError, RequestError, UnavailableError
from shared.model.names import DeviceUuid

MAX_LINE = 256 * 1024
"""About 100 times the size of a device's instances."""
ERROR_CODES: tuple[tuple[str, type[LeaseholdError]], ...] = (
    ("in use", InUseError),
    ("request", RequestError),
    ("wedged", WedgedError),
    ("unavailable", UnavailableError),
)


class InstancesRequest(msgspec.Struct, tag=True, frozen=True):
    device: DeviceUuid
    after_changes: bool = False
    """After all changes that were requested before."""


class PartitionRequest(msgspec.Struct, tag=True, frozen=True):
    device: DeviceUuid
    layout: MigLayout
    in_use: tuple[str, ...] = ()


class SetLimitRequest(msgspec.Struct, tag=True, frozen=True):
    target: LimitTarget
    fence: int
    memory_bytes: int


class GetLimitRequest(msgspec.Struct, tag=True, frozen=True):
    target: LimitTarget


class ClearLimitRequest(msgspec.Struct, tag=True, frozen=True):
    target: LimitTarget
    fence: int


class AccountingRequest(msgspec.Struct, tag=True, frozen=True):
    device: DeviceUuid


class TimeSlicesRequest(msgspec.Struct, tag=True, frozen=True):
    device: DeviceUuid
    interval: Interval


class CheckMpsRequest(msgspec.Struct, tag=True, frozen=True):
    shared: bool = False


class EnsureMpsRequest(msgspec.Struct, tag=True, frozen=True):
    target: MpsTarget
    fence: int
    limits: MpsLimits


class GetMpsRequest(msgspec.Struct, tag=True, frozen=True):
    target: MpsTarget


class TerminateMpsRequest(msgspec.Struct, tag=True, frozen=True):
    target: MpsTarget
    clients: tuple[int, ...]


class ProbeMpsRequest(msgspec.Struct, tag=True, frozen=True):
    target: MpsTarget


class RepairMpsRequest(msgspec.Struct, tag=True, frozen=True):
    target: MpsTarget


class StopMpsRequest(msgspec.Struct, tag=True, frozen=True):
    target: MpsTarget
    fence: int


class InstancesReply(msgspec.Struct, tag=True, frozen=True):
    state: MigState | None
    instances: tuple[MigInstance, ...] = ()


class LimitReply(msgspec.Struct, tag=True, frozen=True):
    limit: MemoryLimit


class AccountingReply(msgspec.Struct, tag=True, frozen=True):
    found: DriverAccounting


class TimeSlicesReply(msgspec.Struct, tag=True, frozen=True):
    """They have the length that was requested."""


class MpsNodeReply(msgspec.Struct, tag=True, frozen=True):
    missing_reason: str
    started: tuple[StartedDaemon, ...] = ()


class MpsReply(msgspec.Struct, tag=True, frozen=True):
    daemon: MpsDaemon


class MpsDoneReply(msgspec.Struct, tag=True, frozen=True):
    text: str = ""


class FailureReply(msgspec.Struct, tag=True, frozen=True):
    code: str
    text: str


LimitRequest = SetLimitRequest | GetLimitRequest | ClearLimitRequest | AccountingRequest
MpsTargetRequest = (
    EnsureMpsRequest
    | GetMpsRequest
    | TerminateMpsRequest
    | ProbeMpsRequest
    | RepairMpsRequest
    | StopMpsRequest
)
MpsRequest = CheckMpsRequest | MpsTargetRequest
DeviceRequest = InstancesRequest | PartitionRequest | TimeSlicesRequest
Request = DeviceRequest | LimitRequest | MpsRequest
GoodReply = (
    InstancesReply
    | LimitReply
    | AccountingReply
    | TimeSlicesReply
    | MpsNodeReply
    | MpsReply
    | MpsDoneReply
)
Reply = GoodReply | FailureReply
R = TypeVar("R", bound=GoodReply)
_request_decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_reply_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def encode_line(message: Request | Reply) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    try:
        return _request_decoder.decode(line)
    except UNDECODABLE as error:
        raise RequestError(f"invalid request: {error}") from error


def decode_reply(line: bytes, reply_type: type[R]) -> R:
    """Raises the error of a reply that reports one."""
    try:
        reply = _reply_decoder.decode(line)
    except UNDECODABLE as error:
        raise UnavailableError(f"the partitioner's reply is invalid: {error}") from error
    if isinstance(reply, FailureReply):
        if reply.code in set(LimitFault):
            raise LimitError(LimitFault(reply.code), reply.text)
        raise dict(ERROR_CODES).get(reply.code, UnavailableError)(reply.text)
    if not isinstance(reply, reply_type):
        raise UnavailableError(f"the partitioner replied with {type(reply).__name__}")
    return reply


def failure_reply(error: LeaseholdError) -> FailureReply:
    if isinstance(error, LimitError):
        return FailureReply(error.fault, str(error))
    fault = next((name for name, kind in ERROR_CODES if isinstance(error, kind)), "unavailable")
    return FailureReply(fault, str(error))
