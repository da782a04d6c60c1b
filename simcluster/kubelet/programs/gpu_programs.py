"""Runs `gpu-load` and `nvidia-smi` for a container, on the GPUs and within the limits of its lease.

The node agent compiles their driver and makes the GPUs.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from shared.model.errors import UnavailableError
from simcluster.gpu_driver.build import build
from simcluster.kubelet.containers.container_commands import host_path
from simcluster.kubelet.containers.container_state import ContainerPhase, ContainerState
from simcluster.kubelet.settings import NodeFiles
from simcluster.ports import ExecStreams

HOST = Path("/proc")
_LINKED = ("status", "stat")


class ProcessTable:
    """The node's /proc, with the processes of its containers only.

    A node agent finds a process's container by its cgroup. The processes of simulated containers
    have no cgroup of their own: here each has one, with the name that a kubelet gives it, beside
    links to its other files.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def clear(self) -> None:
        """Forget the processes of an earlier run."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)

    def add_tree(self, pid: int, pod_uid: str, container_id: str) -> None:
        """Add a process of a container, and its present children."""
        for each in (pid, *_descendants(pid)):
            entry = self.root / str(each)
            if entry.exists():
                continue
            draft = self.root / f".{each}"
            draft.mkdir(exist_ok=True)
            (draft / "cgroup").write_text(cgroup(pod_uid, container_id))
            for name in _LINKED:
                with contextlib.suppress(FileExistsError):
                    (draft / name).symlink_to(HOST / str(each) / name)
            draft.rename(entry)

    def remove_ended(self) -> None:
        """Remove the entries of processes that have ended."""
        for entry in self.root.iterdir():
            if entry.name.isdecimal() and not (HOST / entry.name).exists():
                shutil.rmtree(entry, ignore_errors=True)


def cgroup(pod_uid: str, container_id: str) -> str:
    """Return the content of a process's `cgroup`, with systemd as the cgroup driver."""
    slice_name = f"kubepods-pod{pod_uid.replace('-', '_')}.slice"
    container = container_id.rpartition("/")[2]
    return f"0::/kubepods.slice/{slice_name}/cri-containerd-{container}.scope\n"


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in (HOST / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


PROGRAMS = frozenset({"gpu-load", "nvidia-smi"})
CANNOT_RUN = 126
_LOOK_S = 0.2
"""How often the container and the program's children are looked at."""
_CHUNK_BYTES = 32 * 1024
_PASSED_ON = ("CUDA_", "GPU_CORE_", "LIBCUDA_", "NVIDIA_")
"""Variables of the container that the program gets."""
_REGION = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
_PRELOAD = "/etc/ld.so.preload"
Writer = Callable[[bytes], Awaitable[None]]
Program = subprocess.Popen[bytes]
"""Not a process of asyncio: gRPC's handlers of fork, which that would run, crash the child."""


class GpuPrograms:
    """The programs of one node's containers."""

    def __init__(self, files: NodeFiles) -> None:
        self._files = files
        self._processes = ProcessTable(files.proc)

    def start(self) -> None:
        """Forget the processes of an earlier run."""
        self._processes.clear()

    async def run(
        self, pod_uid: str, state: ContainerState, command: Sequence[str], streams: ExecStreams
    ) -> int:
        """Run a program in a container until it or the container ends; return its exit code."""
        name = PurePosixPath(command[0]).name
        try:
            folder = await asyncio.to_thread(self._driver)
            variables = environment(state, folder, self._files.gpu_state)
        except UnavailableError as error:
            await streams.write_stderr(f"{name}: {error}\n".encode())
            return CANNOT_RUN
        program = [str(folder / name), *command[1:]]
        process = await asyncio.to_thread(_start, program, variables)
        try:
            return await self._attend(process, pod_uid, state, streams)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.to_thread(process.wait)
            await asyncio.to_thread(self._processes.remove_ended)

    async def _attend(
        self, process: Program, pod_uid: str, state: ContainerState, streams: ExecStreams
    ) -> int:
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(_feed(process, streams)),
                tasks.create_task(self._watch(process, pod_uid, state)),
            ]
            outputs = [
                tasks.create_task(_copy(process.stdout, streams.write_stdout)),
                tasks.create_task(_copy(process.stderr, streams.write_stderr)),
            ]
            await asyncio.wait(outputs)
            code = await asyncio.to_thread(process.wait)
            for helper in helpers:
                helper.cancel()
        return code if code >= 0 else 128 - code

    async def _watch(self, process: Program, pod_uid: str, state: ContainerState) -> None:
        """Show the program and its children in the node's /proc; kill it with its container."""
        container = state.container_id
        while True:
            running = state.phase is ContainerPhase.RUNNING and state.container_id == container
            if not running:
                os.killpg(process.pid, signal.SIGKILL)
                return
            await asyncio.to_thread(self._processes.add_tree, process.pid, pod_uid, container)
            await asyncio.sleep(_LOOK_S)

    def _driver(self) -> Path:
        """Return the folder of the driver. Raises UnavailableError while there is none."""
        folder = build()
        if not self._files.gpu_state.is_file():
            raise UnavailableError("the node agent has not made the simulated GPUs yet")
        return folder


def environment(state: ContainerState, folder: Path, gpus: Path) -> dict[str, str]:
    """Return the environment of a program; paths of the container become those of this machine.

    A library of HAMi-core is preloaded, and limits the program; without one, the driver does. MIG
    instances have their own memory.
    """
    given = {name: text for name, text in state.env.items() if name.startswith(_PASSED_ON)}
    region = _mounted(state, given.pop(_REGION, ""))
    library = _preloaded(state)
    return {
        "NVIDIA_VISIBLE_DEVICES": "void",
        **given,
        "PATH": os.environ.get("PATH", ""),
        "LD_LIBRARY_PATH": str(folder),
        "GPU_DRIVER_STATE": str(gpus),
        **_limits(region, library),
    }


def _start(program: Sequence[str], variables: Mapping[str, str]) -> Program:
    return subprocess.Popen(  # noqa: S603 - one of `PROGRAMS`
        program,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )


def _limits(region: Path | None, library: Path | None) -> Mapping[str, str]:
    if region is None:
        return {}
    if library is None:
        return {"GPU_DRIVER_LIMITS": str(region)}
    return {_REGION: str(region), "LD_PRELOAD": str(library), "CUDA_REDIRECT": str(library)}


def _preloaded(state: ContainerState) -> Path | None:
    """Return the library that the container's loader preloads, on this machine."""
    preload = _mounted(state, _PRELOAD)
    named = preload.read_text().strip() if preload is not None and preload.is_file() else ""
    library = _mounted(state, named)
    return library if library is not None and library.is_file() else None


def _mounted(state: ContainerState, path: str) -> Path | None:
    return host_path(state, path) if path else None


async def _copy(source: IO[bytes] | None, write: Writer) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), source
    )
    try:
        while data := await reader.read(_CHUNK_BYTES):
            await write(data)
    finally:
        transport.close()


async def _feed(process: Program, streams: ExecStreams) -> None:
    """Pass the client's input on; a pipe holds what the program has not read yet."""
    if process.stdin is None:
        return
    with contextlib.suppress(OSError):
        while data := await streams.read_stdin():
            await asyncio.to_thread(process.stdin.write, data)
        process.stdin.close()
