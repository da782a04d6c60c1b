"""The file with the CDI specification of this node's devices.

It is written atomically and compared at every probe: a lost or overwritten file is restored within
seconds.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.node_agent.allocate.cdi import (
    CONTROL_NODES,
    FILE,
    LIBRARIES,
    PROGRAMS,
    build_specification,
    driver_edits,
    names_in,
    parse_minors,
)
from services.node_agent.allocate.device_list_strategies import (
    CDI_STRATEGIES,
    DeviceListStrategies,
    cdi_names_of,
)
from services.node_agent.files import replace_file
from services.node_agent.gpus.inventory import Gpu, driver_version
from services.node_agent.mig.instances import MigInstance
from services.node_agent.records.checkpoint import Checkpoint
from shared.dialects.dialect import ContainerSetup
from shared.model.device import DeviceMode
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
)
"""Where distributions keep the driver's libraries, below its root."""
HOOKS = (
    "/usr/bin/nvidia-cdi-hook",
    "/usr/bin/nvidia-ctk",
    "/usr/local/nvidia/toolkit/nvidia-cdi-hook",
    "/usr/local/nvidia/toolkit/nvidia-ctk",
)
"""Where NVIDIA's container toolkit and GPU operator install the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverPlaces:
    """Where to look for the driver's files."""

    root: Path = Path("/")
    """On the host."""
    seen_at: Path = Path("/")
    """Path of that root for this process."""
    hook: str = ""
    """NVIDIA's program on the host; by default the first of `HOOKS` that exists."""
    proc: Path = Path("/proc")


class CdiFiles:
    """The one file of this node's agent; `places` is None for simulated GPUs."""

    def __init__(
        self,
        directory: Path,
        strategies: DeviceListStrategies,
        *,
        places: DriverPlaces | None,
        list_instances: Callable[[DeviceUuid], Awaitable[tuple[MigInstance, ...]]],
        checkpoint: Checkpoint,
        used_by_claims: bool = False,
    ) -> None:
        self.path = directory / FILE
        self.strategies = strategies
        self.places = places
        self.list_instances = list_instances
        self.checkpoint = checkpoint
        self.used_by_claims = used_by_claims
        """ResourceClaims are served, which name devices by CDI only."""
        self._gpus: tuple[Gpu, ...] = ()
        self._names: frozenset[str] = frozenset()
        self._is_removed = False
        self._writing = asyncio.Lock()

    async def update(self, gpus: Sequence[Gpu]) -> None:
        """Write these GPUs to the file, or remove it if no container uses it.

        It stays while containers run that got devices by it: their restarts need it. Raises
        UnavailableError naming the missing file of the driver, or the path that cannot be written.
        """
        self._gpus = tuple(gpus)
        async with self._writing:
            wanted = self.used_by_claims or not CDI_STRATEGIES.isdisjoint(self.strategies)
            if wanted or any(cdi_names_of(entry.setup) for entry in self.checkpoint.entries):
                await self._write()
            elif not self._is_removed:
                await asyncio.to_thread(self._remove)

    async def ensure_named(self, setup: ContainerSetup) -> None:
        """Ensure that the file contains a container's devices; MIG instances may be new.

        Raises UnavailableError if it cannot: the runtime would not start the container.
        """
        names = cdi_names_of(setup)
        if not names or (names <= self._names and await asyncio.to_thread(self.path.is_file)):
            return
        async with self._writing:
            self._gpus = tuple(await asyncio.gather(*map(self._with_instances, self._gpus)))
            await self._write()
        if not names <= self._names:
            missing = ", ".join(sorted(names - self._names))
            raise UnavailableError(
                f"the CDI specification {self.path} has no {missing}: check `nvidia-smi -L`, and "
                "for MIG instances /proc/driver/nvidia-caps/mig-minors"
            )

    async def _with_instances(self, gpu: Gpu) -> Gpu:
        """Return a GPU with its current instances; unchanged if it does not respond."""
        if gpu.mode is not DeviceMode.MIG or gpu.fault is not None:
            return gpu
        try:
            return replace(gpu, instances=await self.list_instances(gpu.uuid))
        except UnavailableError as error:
            logger.warning(
                "the CDI specification keeps the known instances of GPU %d: %s", gpu.index, error
            )
            return gpu

    async def _write(self) -> None:
        self._names = names_in(await asyncio.to_thread(self._write_specified))

    def _write_specified(self) -> dict[str, Any]:
        self._is_removed = False
        found = self._specified()
        write_specification(self.path, found)
        return found

    def _specified(self) -> dict[str, Any]:
        if self.places is None:
            return build_specification(self._gpus, {}, None)
        minors = self.places.proc / "driver/nvidia-caps/mig-minors"
        known = parse_minors(minors.read_text()) if minors.is_file() else {}
        return build_specification(
            self._gpus, known, find_driver(self.places, driver_version(self._gpus))
        )

    def _remove(self) -> None:
        self._names = frozenset()
        with contextlib.suppress(OSError):
            self.path.unlink()
            logger.info("%s is removed: no container gets devices by CDI", self.path)
        self._is_removed = not os.path.lexists(self.path)


def write_specification(path: Path, specification: Mapping[str, Any]) -> None:
    """Write a specification atomically, unless the file contains it already.

    Raises UnavailableError naming the path that cannot be written.
    """
    content = json.dumps(specification, indent=2).encode() + b"\n"
    try:
        if path.is_file() and path.read_bytes() == content:
            return
        replace_file(path, content)  # runtimes read what ends in .json or .yaml
    except OSError as error:
        raise UnavailableError(
            f"{error.filename or path}: {error.strerror}; --cdi-dir must be a directory of the "
            "host that the node agent may write to"
        ) from error
    logger.info("CDI devices are in %s", path)


def find_driver(places: DriverPlaces, version: str) -> dict[str, Any]:
    """Return what containers get of a driver's version, by its files on the host.

    Raises UnavailableError naming the missing file: no container could use a GPU.
    """
    root = places.seen_at
    folder = next((f for f in FOLDERS if (root / f / f"libcuda.so.{version}").is_file()), None)
    if folder is None:
        raise UnavailableError(
            f"libcuda.so.{version} is not in the usual directories below {root}: mount the host's "
            f"{places.root} here and set --driver-root-ctr-path to its path; where a container "
            "has the driver, --nvidia-driver-root is its root on the host"
        )
    libraries = (f"{folder}/{name}.{version}" for name in LIBRARIES)
    files = (*libraries, *(f"usr/bin/{name}" for name in PROGRAMS))
    return driver_edits(
        str(places.root),
        nodes=[f"/dev/{name}" for name in CONTROL_NODES if (root / "dev" / name).exists()],
        files=[f"/{path}" for path in files if (root / path).exists()],
        folder=f"/{folder}",
        hook=_hook(places),
    )


def _hook(places: DriverPlaces) -> str:
    """Return the program's path on the host, found below the root as this process sees it."""
    if places.hook:
        return places.hook
    for path in HOOKS:
        if (places.seen_at / path[1:]).exists():
            return path
    raise UnavailableError(
        f"none of {', '.join(HOOKS)} exists: install NVIDIA's container toolkit on the node, or "
        "set --nvidia-cdi-hook-path to the program's path there"
    )
