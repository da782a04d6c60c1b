"""The programs that a simulated container runs, on the GPUs and within the limits of its lease.

The node agent compiles their driver and makes the GPUs.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path, PurePosixPath

from shared.model.errors import UnavailableError
from simcluster.gpu_driver.build import build
from simcluster.gpu_driver.control import device_uuids
from simcluster.gpu_driver.mps_control import PIPES
from simcluster.kubelet.containers.container_commands import host_path
from simcluster.kubelet.containers.container_state import ContainerState
from simcluster.kubelet.containers.runtime_devices import ALL, VISIBLE, visible_variable
from simcluster.kubelet.programs.processes import Launch, Namespaces, possible_namespaces
from simcluster.kubelet.settings import NodeFiles

GPU_PROGRAMS = frozenset({"gpu-load", "nvidia-smi"})
ALWAYS = ("sh", "bash", "tar")
"""Programs of this machine that every container can run; `kubectl cp` runs tar."""
_OWN = ("LD_",)
"""Prefixes of the container's variables that would change how this machine starts a program."""
_REGION = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
_PRELOAD = "/etc/ld.so.preload"
_HAMI_CORE = "libvgpu.so"
_TIME_LIMITS = "/usr/local/leasehold/time-limits"
_TIME_USE = "/tmp/leasehold-time/use"  # noqa: S108 - in the container
"""The files of compute time."""
_MPS_PIPES = "/tmp/nvidia-mps"  # noqa: S108 - in the container
"""Where programs look for a daemon of MPS by default."""
STUCK = "stuck"
"""The fault of a GPU whose processes stay, in uninterruptible sleep, when they are to end."""
SCRATCH = "/tmp"  # noqa: S108 - of the containers of a node, not of this machine


def preloaded(state: ContainerState) -> dict[str, str]:
    """Return the container's variables for a process that has its mounts only by `LD_PRELOAD`.

    Its GPUs are chosen for CUDA alone: the driver lists the others, too.
    """
    given = dict(state.env)
    region = _mounted(state, given.pop(_REGION, ""))
    pipes = _mounted(state, given.pop(PIPES, ""))
    limits = {**_limits(state, region, _preloaded(state)), **({PIPES: str(pipes)} if pipes else {})}
    gpus = {} if ALL in state.gpus else {"CUDA_VISIBLE_DEVICES": ",".join(state.gpus)}
    return {**gpus, **given, **limits}


def hidden_files(state: ContainerState, gpus: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the device files of GPUs that the container does not get, as its runtime would.

    Without them the driver does not list these GPUs; and what would make them again is hidden too.
    """
    visible = visible_variable(state.gpus)
    if visible == ALL:
        return []
    hidden = []
    for file in gpus.glob("*/information"):
        facts = dict(line.partition(":")[::2] for line in file.read_text().splitlines())
        uuid = facts.get("GPU UUID", "?").strip()
        minor = facts.get("Device Minor", "").strip()
        if "?" not in uuid and minor.isdecimal() and uuid not in visible and "MIG" not in visible:
            hidden.append(f"/dev/nvidia{minor}")
    return [*hidden, "/usr/bin/nvidia-modprobe"] if hidden else []


@cache
def namespaces_here() -> Namespaces:
    """Return the namespaces that processes can have: on all nodes, since their machine is one."""
    with tempfile.TemporaryDirectory() as folder:
        programs = SimulatedPrograms(NodeFiles(Path(folder)))
        return possible_namespaces(partial(programs.in_namespaces, ContainerState(), ["true"], {}))


class SimulatedPrograms:
    """`gpu-load`, `nvidia-smi`, shells, tar, and the programs of this machine that `more` names.

    Those of this machine can write to the node's directory and the container's mounts only. Where
    that cannot be ensured, just those that `more` names are started.
    """

    def __init__(self, files: NodeFiles, more: Iterable[str] = ()) -> None:
        self._files = files
        self._more = tuple(more)

    @cached_property
    def _of_machine(self) -> frozenset[str]:
        names = (*(ALWAYS if namespaces_here() else ()), *self._more)
        return frozenset(filter(shutil.which, names))

    def in_namespaces(
        self,
        state: ContainerState,
        command: Sequence[str],
        variables: Mapping[str, str],
        namespaces: Namespaces,
    ) -> Launch:
        node = self._files.root
        scratch = node / "scratch"
        directory = node / "containers"
        for folder in (scratch, directory):
            folder.mkdir(parents=True, exist_ok=True)
        mounts = {str(Path(mount.host_path)) for mount in state.mounts if not mount.read_only}
        places = [(SCRATCH, str(scratch)), *((path, path) for path in (str(node), *sorted(mounts)))]
        return Launch(
            command=command,
            environment=variables,
            directory=directory,
            writable=[place for place in places if Path(place[1]).exists()] if namespaces else (),
            own_users=namespaces is Namespaces.OF_ANY_USER,
        )

    def has(self, command: Sequence[str], *, built_in: bool) -> bool:
        """Return whether a command is started: one of these that is not simulated."""
        name = PurePosixPath(command[0]).name if command else ""
        return not built_in and (name in GPU_PROGRAMS or name in self._of_machine)

    def launch(self, state: ContainerState, command: Sequence[str]) -> Launch:
        """Return how it is started. Raises UnavailableError until the GPUs are made."""
        name = PurePosixPath(command[0]).name
        folder = self._driver(required=name in GPU_PROGRAMS)
        is_ours = name in GPU_PROGRAMS
        return self.in_namespaces(
            state,
            [str(folder / name) if folder and is_ours else name, *command[1:]],
            environment(state, folder, self._files.gpu_state),
            Namespaces.NONE if is_ours else namespaces_here(),
        )

    def _driver(self, *, required: bool) -> Path | None:
        """Return the folder of the driver; a script may do without it."""
        try:
            folder = build()
        except UnavailableError:
            if required:
                raise
            return None
        if required and not self._files.gpu_state.is_file():
            raise UnavailableError("the node agent has not made the simulated GPUs yet")
        return folder

    def not_run(self, image: str, command: Sequence[str]) -> str:
        """Say for a container's log why its command is not started."""
        what = f"its command {command[0]}" if command else f"image {image}"
        names = ", ".join(sorted({*GPU_PROGRAMS, *self._of_machine}))
        return f"this container is simulated: {what} is not run; the programs here are {names}"

    def pulled(self, image: str) -> str:
        """Say for an Event what became of the image."""
        return f'Container image "{image}" already present on machine'

    def outlive(self, state: ContainerState) -> bool:
        """Return whether the container has a GPU on which processes cannot be ended."""
        stuck = {device for device, fault in self._faults().items() if fault == STUCK}
        if not stuck or not self._files.gpu_state.is_file():
            return False
        visible = visible_variable(state.gpus)
        devices = device_uuids(self._files.gpu_state)
        return any(
            {str(index), *uuids} & stuck
            and (visible == ALL or any(uuid in visible for uuid in uuids))
            for index, uuids in enumerate(devices)
        )

    def _faults(self) -> Mapping[str, str]:
        try:
            document = json.loads(self._files.faults.read_text())
        except (OSError, ValueError):  # there is none
            return {}
        return document if isinstance(document, dict) else {}


def environment(state: ContainerState, folder: Path | None, gpus: Path) -> dict[str, str]:
    """Return the environment of a program; paths of the container become those of this machine.

    A library of HAMi-core is preloaded, and limits the program; without one, the driver does. MIG
    instances have their own memory.
    """
    given = {name: text for name, text in state.env.items() if not name.startswith(_OWN)}
    region = _mounted(state, given.pop(_REGION, ""))
    libraries = _preloaded(state)
    path = os.environ.get("PATH", "")
    pipes = _mounted(state, given.pop(PIPES, _MPS_PIPES))
    driver = {
        "PATH": f"{folder}{os.pathsep}{path}",
        PIPES: str(pipes or gpus.parent / "no-mps"),  # never this machine's own
        "LD_LIBRARY_PATH": str(folder),
        "GPU_DRIVER_STATE": str(gpus),
    }
    return {
        "HOME": os.environ.get("HOME", "/"),
        **given,
        VISIBLE: visible_variable(state.gpus),
        **(driver if folder else {"PATH": path}),
        **_limits(state, region, libraries),
    }


def _limits(
    state: ContainerState, region: Path | None, libraries: Sequence[Path]
) -> Mapping[str, str]:
    limits: dict[str, str] = {}
    hami_core = next((path for path in libraries if path.name == _HAMI_CORE), None)
    if region is None:
        libraries = [path for path in libraries if path != hami_core]
    elif hami_core is None:
        limits["GPU_DRIVER_LIMITS"] = str(region)
    else:
        limits |= {_REGION: str(region), "CUDA_REDIRECT": str(hami_core)}
    time_limits = _mounted(state, _TIME_LIMITS)
    time_use = _mounted(state, _TIME_USE)
    if time_limits is not None and time_use is not None:
        limits |= {"LEASEHOLD_TIME_LIMITS": str(time_limits), "LEASEHOLD_TIME_USE": str(time_use)}
    if libraries:
        limits["LD_PRELOAD"] = " ".join(map(str, libraries))
    return limits


def _preloaded(state: ContainerState) -> list[Path]:
    """Return the libraries that the container's loader preloads, on this machine."""
    preload = _mounted(state, _PRELOAD)
    named = preload.read_text().split() if preload is not None and preload.is_file() else []
    libraries = (_mounted(state, name) for name in named)
    return [library for library in libraries if library is not None and library.is_file()]


def _mounted(state: ContainerState, path: str) -> Path | None:
    return host_path(state, path) if path else None
