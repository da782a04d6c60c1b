r"""GPUs that NVIDIA's kernel driver lists, also those that NVML cannot read.

https://download.nvidia.com/XFree86/Linux-x86_64/580.65.06/README/procinterface.html. A file
`information` has lines such as `GPU UUID: \t GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b`, with
question marks until the GPU is initialised.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.worker_threads import SingleFlight
from shared.model.bounds import HIGHEST_INDEX, LONGEST_MODEL, MOST_DEVICES, cut, printable
from shared.model.devices.device import UNNAMED, UnreadDevice
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import DeviceUuid

GPUS = Path("driver/nvidia/gpus")
MOST_BYTES = 4096
EXCLUDED = "Yes"
"""By the driver's parameter `NVreg_ExcludedGpus`: no program can use the GPU."""
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MINOR = re.compile(r"[0-9]{1,4}", re.ASCII)
_LIST = "list"

Information = Mapping[str, str] | None
"""None if the GPU was removed meanwhile."""


class KernelGpus:
    """A GPU that hangs may block a read."""

    def __init__(self, proc: Path, *, limit_s: Callable[[], float]) -> None:
        self._folder = proc / GPUS
        self._limit_s = limit_s
        self._list_calls: SingleFlight[tuple[str, ...]] = SingleFlight()
        self._read_calls: SingleFlight[Information] = SingleFlight()

    async def unread(self, gpus: Iterable[Gpu]) -> tuple[UnreadDevice, ...]:
        read = tuple(gpus)
        try:
            listed = await self._list_calls.call(_LIST, self._addresses, self._limit_s)
        except UnavailableError as error:
            return (UnreadDevice(reason=_reason(f"the driver's list cannot be read: {error}")),)
        others = sorted(set(listed).difference(gpu.bus for gpu in read))
        results = await self._read_calls.call_each(
            {address: functools.partial(self._read, address) for address in others}, self._limit_s
        )
        uuids = {gpu.uuid for gpu in read}
        unread = (_unread_device(address, result) for address, result in results.items())
        return tuple(gpu for gpu in unread if gpu is not None and gpu.uuid not in uuids)

    def _addresses(self) -> tuple[str, ...]:
        try:
            names = sorted(path.name for path in self._folder.iterdir())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise UnavailableError(f"{error.filename}: {error.strerror}") from error
        return tuple(name for name in names if _ADDRESS.fullmatch(name))[:MOST_DEVICES]

    def _read(self, address: str) -> Information:
        path = self._folder / address / "information"
        try:
            with path.open("rb") as file:
                text = file.read(MOST_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UnavailableError(f"{path}: {error.strerror}") from error
        lines = (line.partition(":") for line in text.splitlines())
        return {name.strip(): value.strip() for name, _, value in lines}


def _unread_device(address: str, result: Information | LeaseholdError) -> UnreadDevice | None:
    if isinstance(result, LeaseholdError):
        return UnreadDevice(
            bus=address,
            reason=_reason(f"the driver lists a GPU at {address}, but not its UUID: {result}"),
        )
    if result is None or result.get("GPU Excluded") == EXCLUDED:
        return None
    uuid = result.get("GPU UUID", "")
    is_named = _UUID.fullmatch(uuid) is not None
    cause = "NVML cannot read it" if is_named else "could not initialise it, so its UUID is unknown"
    return UnreadDevice(
        uuid=DeviceUuid(uuid) if is_named else UNNAMED,
        index=_minor_number(result.get("Device Minor", "")),
        model=printable(result.get("Model", ""))[:LONGEST_MODEL],
        bus=address,
        reason=_reason(f"the driver lists a GPU at {address}, and {cause}"),
    )


def _minor_number(text: str) -> int:
    number = int(text) if _MINOR.fullmatch(text) else -1
    return number if number <= HIGHEST_INDEX else -1


def _reason(cause: str) -> str:
    return cut(f"{cause}: check `nvidia-smi`, and the kernel log for Xid messages")
