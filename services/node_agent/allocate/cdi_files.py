"""The file with the CDI specification of this node's devices."""

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
    KIND,
    LIBRARIES,
    PROGRAMS,
    build_specification,
    device_nodes,
    driver_edits,
    names_in,
    parse_minors,
)
from services.node_agent.allocate.device_list_strategies import (
    DEFAULT_STRATEGIES,
    DeviceListStrategies,
    DeviceListStrategy,
    has_cdi,
)
from services.node_agent.files import replace_file
from services.node_agent.gpus.inventory import Gpu, driver_version
from services.node_agent.metrics import DEVICE_LIST
from services.node_agent.mig.instances import MigInstance
from services.node_agent.records.checkpoint import Checkpoint
from shared.dialects.dialect import ContainerSetup
from shared.model.devices.device import DeviceMode
from shared.model.errors import LeaseholdError, UnavailableError
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
HOOKS = (
    "/usr/bin/nvidia-cdi-hook",
    "/usr/bin/nvidia-ctk",
    "/usr/local/nvidia/toolkit/nvidia-cdi-hook",
    "/usr/local/nvidia/toolkit/nvidia-ctk",
)


DRIVER_ROOTS = (Path("/"), Path("/run/nvidia/driver"))
"""Of the host's packages, and of the GPU operator's container."""
BY_CDI: DeviceListStrategies = (DeviceListStrategy.CDI_CRI,)
READ_TIMEOUT_S = 1.0
"""A kubelet refuses pods that arrive while an agent starts."""
USED_BEFORE = "containerd://2.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverPaths:
    roots: Sequence[Path] = DRIVER_ROOTS
    """The first that has the driver's libraries counts."""
    host: Path = Path("/")
    hook: str = ""
    """On the host; by default the first of `HOOKS` that exists."""
    proc: Path = Path("/proc")

    def seen(self, path: Path | str) -> Path:
        return self.host / str(path).lstrip("/")


class CdiFiles:
    """`places` is None for simulated GPUs."""

    def __init__(
        self,
        directory: Path,
        configured: DeviceListStrategies,
        *,
        places: DriverPaths | None,
        read_runtime: Callable[[], Awaitable[str]],
        list_instances: Callable[[DeviceUuid], Awaitable[tuple[MigInstance, ...]]],
        checkpoint: Checkpoint,
        used_by_claims: bool = False,
    ) -> None:
        self.path = directory / FILE
        self.configured = configured
        self.strategies = configured or DEFAULT_STRATEGIES
        self.places = places
        self.read_runtime = read_runtime
        self.list_instances = list_instances
        self.checkpoint = checkpoint
        self.used_by_claims = used_by_claims
        self._gpus: tuple[Gpu, ...] = ()
        self._names: frozenset[str] = frozenset()
        self._is_removed = False
        self._writing = asyncio.Lock()
        self._runtime = ""
        self._why_no_cdi: str | None = None
        self.unwritable_reason = ""

    async def update(self, gpus: Sequence[Gpu]) -> None:
        """Raises UnavailableError naming the missing or unwritable path."""
        self._gpus = tuple(gpus)
        async with self._writing:
            if not self.configured and self.strategies != BY_CDI:
                await self._choose()
            used = any(entry.setup.cdi_devices for entry in self.checkpoint.entries)
            if used or self._gives_devices:
                await self._update_file()
                return
            self.unwritable_reason = ""
            if not self._is_removed:
                await asyncio.to_thread(self._remove)

    @property
    def _gives_devices(self) -> bool:
        return self.used_by_claims or DeviceListStrategy.CDI_CRI in self.strategies

    async def _update_file(self) -> None:
        try:
            await asyncio.to_thread(self._write)
        except UnavailableError as error:
            self.unwritable_reason = str(error) if self._gives_devices else ""
            raise
        self.unwritable_reason = ""

    async def _choose(self) -> None:
        if not self._runtime and self.places is not None:
            with contextlib.suppress(LeaseholdError, TimeoutError):
                async with asyncio.timeout(READ_TIMEOUT_S):
                    self._runtime = await self.read_runtime()
        runtime = self._runtime or (USED_BEFORE if self.path.is_file() else "")
        facts = (runtime, self.places, driver_version(self._gpus), self.path.parent)
        needs_files = self.places is not None and has_cdi(runtime)
        why = await asyncio.to_thread(why_no_cdi, *facts) if needs_files else why_no_cdi(*facts)
        if not why:
            self.strategies = BY_CDI
        if why != self._why_no_cdi:
            self._why_no_cdi = why
            chosen = ",".join(self.strategies)
            logger.info("devices are passed to containers by %s%s", chosen, why and f": {why}")
            DEVICE_LIST.clear()
            DEVICE_LIST.labels(chosen).set(1)

    async def ensure_named(self, setup: ContainerSetup) -> None:
        """MIG instances may be new.

        Raises UnavailableError for devices that the file cannot have.
        """
        names = frozenset(name for name in setup.cdi_devices if name.startswith(f"{KIND}="))
        if not names or (names <= self._names and await asyncio.to_thread(self.path.is_file)):
            return
        async with self._writing:
            self._gpus = tuple(await asyncio.gather(*map(self._with_instances, self._gpus)))
            await self._update_file()
        if not names <= self._names:
            missing = ", ".join(sorted(names - self._names))
            raise UnavailableError(
                f"the CDI specification {self.path} has no {missing}: check `nvidia-smi -L`, and "
                "for MIG instances /proc/driver/nvidia-caps/mig-minors"
            )

    async def _with_instances(self, gpu: Gpu) -> Gpu:
        if gpu.mode is not DeviceMode.MIG or gpu.fault is not None:
            return gpu
        try:
            return replace(gpu, instances=await self.list_instances(gpu.uuid))
        except UnavailableError as error:
            logger.warning(
                "the CDI specification keeps the known instances of GPU %d: %s", gpu.index, error
            )
            return gpu

    def _write(self) -> None:
        self._is_removed = False
        specified = self._specified()
        write_specification(self.path, specified)
        self._names = names_in(specified)

    def _specified(self) -> dict[str, Any]:
        if self.places is None:
            return build_specification(self._gpus, {}, None)
        minors = self.places.proc / "driver/nvidia-caps/mig-minors"
        numbers = parse_minors(minors.read_text()) if minors.is_file() else {}
        common, devices_at = find_driver(self.places, driver_version(self._gpus))
        return build_specification(self._gpus, numbers, common, devices_at)

    def _remove(self) -> None:
        self._names = frozenset()
        with contextlib.suppress(OSError):
            self.path.unlink()
            logger.info("%s is removed: no container gets devices by CDI", self.path)
        self._is_removed = not os.path.lexists(self.path)


def write_specification(path: Path, specification: Mapping[str, Any]) -> None:
    """Raises UnavailableError naming the path."""
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


def why_no_cdi(runtime: str, places: DriverPaths | None, driver: str, directory: Path) -> str:
    if places is None:
        return "simulated GPUs have no device files"
    if not has_cdi(runtime):
        return (
            f"{runtime or 'the container runtime, unknown without the API server,'} is not known to"
            " have CDI enabled; if it has, set --device-list-strategy cdi-cri"
        )
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return f"{existing} is not writable"
    try:
        find_driver(places, driver)
    except UnavailableError as error:
        return str(error)
    return ""


def find_driver(places: DriverPaths, version: str) -> tuple[dict[str, Any], str]:
    """Return what containers get of the driver, and the directory that has its /dev.

    Raises UnavailableError naming the missing file.
    """
    candidates = ((root, places.seen(root), folder) for root in places.roots for folder in FOLDERS)
    name = f"libcuda.so.{version}"
    place = next((it for it in candidates if (it[1] / it[2] / name).is_file()), None)
    if place is None:
        raise UnavailableError(
            f"{name} is not in the usual directories below "
            f"{' or '.join(map(str, places.roots))} of the node, which the agent sees at "
            f"{places.host}: --nvidia-driver-root is the root of the driver's files on the node, "
            "--host-root is where the agent sees the node's files"
        )
    where, root, folder = place
    devices_at = str(where) if (root / "dev/nvidiactl").exists() else "/"
    libraries = (f"{folder}/{name}.{version}" for name in LIBRARIES)
    files = (*libraries, *(f"usr/bin/{name}" for name in PROGRAMS))
    nodes = [f"/dev/{name}" for name in CONTROL_NODES]
    seen = [path for path in nodes if places.seen(f"{devices_at}{path}").exists()]
    edits = driver_edits(
        str(where),
        nodes=device_nodes(seen, devices_at),
        files=[f"/{path}" for path in files if (root / path).exists()],
        folder=f"/{folder}",
        hook=_hook(places),
    )
    return edits, devices_at


def _hook(places: DriverPaths) -> str:
    if places.hook:
        return places.hook
    for path in HOOKS:
        if places.seen(path).exists():
            return path
    raise UnavailableError(
        f"none of {', '.join(HOOKS)} exists: install NVIDIA's container toolkit on the node, or "
        "set --nvidia-cdi-hook-path to the program's path there"
    )
