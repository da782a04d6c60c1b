"""Sets the length of a GPU's time slices by nvidia-smi, since NVML has no call for it.

The driver must be R455 or newer.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from services.node_agent.partition.partition_client import exchange
from services.node_agent.partition.partition_protocol import TimeSlicesReply, TimeSlicesRequest
from services.node_agent.programs import execute
from shared.model.devices.time_slices import INTERVALS, Interval
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid

SetTimeSlices = Callable[[DeviceUuid, Interval], Awaitable[None]]
"""Raises RequestError for a GPU without time slices, or UnavailableError, with what to do."""
PROGRAM = "nvidia-smi"
SET_S = 10.0
"""Time limit of nvidia-smi: it takes 1 s or less, unless the driver has to be loaded first."""
REPLY_S = 20.0
"""Time limit of the partitioner's reply: longer than that of nvidia-smi, and of its end."""
OUTPUT_LENGTH = 200
NO_PARTITIONER = (
    "the node agent has no partitioner, which sets them by nvidia-smi: add the component mig, mps "
    "or memory-limits, or leave the interval out of the claim"
)


class SliceSetter:
    """It needs CAP_SYS_ADMIN, and the driver's programs (NVIDIA_DRIVER_CAPABILITIES=utility)."""

    def __init__(self, program: Sequence[str] = (PROGRAM,), *, limit_s: float = SET_S) -> None:
        self.program = tuple(program)
        self.limit_s = limit_s

    async def set(self, device: DeviceUuid, interval: Interval) -> None:
        number = INTERVALS.index(interval)
        arguments = ("compute-policy", "-i", device, "--set-timeslice", str(number))
        try:
            command = (*self.program, *arguments)
            code, output = await execute(command, {}, self.limit_s, reads_errors=True)
        except UnavailableError as error:
            fault = str(error)
        else:
            fault = f"code {code}: {output.strip()[:OUTPUT_LENGTH]}" if code else ""
        if fault:
            raise UnavailableError(
                f"`{' '.join((PROGRAM, *arguments))}` failed ({fault}): run it in the "
                "partitioner's container, or on the node as root, or leave the interval out of the "
                "claim"
            )


class RemoteSliceSetter:
    def __init__(self, socket: Path) -> None:
        self.socket = socket

    async def set(self, device: DeviceUuid, interval: Interval) -> None:
        request = TimeSlicesRequest(device, interval)
        await exchange(self.socket, request, TimeSlicesReply, REPLY_S)
