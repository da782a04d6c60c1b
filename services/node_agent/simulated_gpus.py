"""GPUs for a machine that has none: a layout, stable UUIDs, and faults read from a file."""

import asyncio
import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from services.node_agent.gpu_profiles import PROFILES, GpuProfile
from services.node_agent.inventory import Gpu
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid, NodeName

UNHEALTHY = "unhealthy"
_NAMESPACE = uuid.UUID("0b7a4d0e-7f0c-4d55-9f5b-2f2f0f9d7a11")
_PART = re.compile(r"(\d+)x(.+)")


def parse_layout(text: str) -> tuple[GpuProfile, ...]:
    """Read `8xA100-80GB` or `4xT4+2xA10`, one profile per GPU in order.

    Raises RequestError naming the part that is none, and the models there are.
    """
    return tuple(profile for part in text.split("+") for profile in _parse_part(part.strip()))


def _parse_part(part: str) -> Iterator[GpuProfile]:
    match = _PART.fullmatch(part)
    profile = PROFILES.get(match[2]) if match else None
    if match is None or profile is None or not 1 <= int(match[1]) <= 64:
        raise RequestError(
            f"{part!r} is no GPU layout: write COUNTxMODEL, such as 8xA100-80GB or 4xT4+2xA10, "
            f"with a count of 1 to 64 and a model of {', '.join(PROFILES)}"
        )
    yield from [profile] * int(match[1])


def uuid_of(node: NodeName, index: int) -> DeviceUuid:
    """Return the UUID of a node's simulated GPU, the same at every start."""
    return DeviceUuid(f"GPU-{uuid.uuid5(_NAMESPACE, f'{node}/{index}')}")


class SimulatedGpus:
    """Behind the same door as NVML. The fault file maps a UUID or an index to `unhealthy`."""

    def __init__(self, node: NodeName, layout: str, fault_file: Path | None = None) -> None:
        self.node = node
        self.profiles = parse_layout(layout)
        self.fault_file = fault_file

    async def discover(self) -> tuple[Gpu, ...]:
        """Return all GPUs. Raises RequestError if the fault file is not what it should be."""
        faults = await asyncio.to_thread(self._faults)
        return tuple(
            Gpu(
                uuid=(name := uuid_of(self.node, index)),
                index=index,
                model=profile.product,
                memory_mib=profile.memory_mib,
                healthy=UNHEALTHY not in {faults.get(name), faults.get(str(index))},
            )
            for index, profile in enumerate(self.profiles)
        )

    def _faults(self) -> dict[str, str]:
        if self.fault_file is None:
            return {}
        try:
            faults = json.loads(self.fault_file.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise RequestError(f"{self.fault_file} is not JSON: {error}") from error
        if not isinstance(faults, dict):
            raise RequestError(f'{self.fault_file} must look like {{"0": "{UNHEALTHY}"}}')
        return {str(device): str(state) for device, state in faults.items()}
