"""The GPU that the tests use, of this machine or simulated, and pods that have shares of it."""

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from services.node_agent.gpus.inventory import DeviceSample, Gpu
from services.node_agent.gpus.nvml.gpus import NvmlGpus
from services.node_agent.gpus.nvml.processes import NvmlProcesses
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.library import NodeLibrary
from services.node_agent.isolation.region import DeviceSums, Region, sums
from services.node_agent.isolation.region_image import RegionSeed, region_path_of, seed_of
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.isolation.region_writer import write_limits
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup
from shared.dialects.hami_core import OVERRIDES
from shared.model.leases.lease import Lease
from simcluster.kubelet.containers.container_state import ContainerState, MountPoint
from simcluster.kubelet.programs.gpu_programs import hidden_files
from simcluster.kubelet.programs.processes import Launch, start_process
from tests.support import build
from tests.support.gpu_driver import MIB, GpuDriver, GpuLoad, started
from tests.support.hami_core import can_unshare

PASSED_ON = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR")
TORCH_PROGRAM = Path(__file__).with_name("torch_program.py")
ANSWER_S = 30.0
TORCH_ANSWER_S = 100.0
"""Importing PyTorch from a cold disk takes up to a minute."""
PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Starts a program with process IDs of its own, as a container runtime does."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine with a GPU."""

    folder: Path
    """With `gpu-load`."""
    root: Path
    library: Path | None
    """HAMi-core's; without it the simulated driver enforces the limits."""
    driver: GpuDriver | None
    """Of simulated GPUs."""
    gpu: Gpu
    """Its first one."""
    quick: bool
    """For `make test`: shorter, and fewer cases."""

    @property
    def real(self) -> bool:
        """Whether the GPU is."""
        return self.driver is None

    @property
    def environment(self) -> dict[str, str]:
        """What a program on the node gets."""
        given = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return given | (self.driver.environment if self.driver else {})

    def load(self, *command: str | Path, **variables: str) -> GpuLoad:
        """Start a program on the node, without any limits."""
        line = command or [self.folder / "gpu-load"]
        return GpuLoad(started(line, self.environment | variables))

    def torch(self, **variables: str) -> GpuLoad:
        """Start PyTorch on the node."""
        process = started([torch_python(), TORCH_PROGRAM], self.environment | variables)
        return GpuLoad(process, answer_s=TORCH_ANSWER_S)

    def run(self, *command: str | Path, timeout_s: float = 60.0) -> str:
        """Run a program on the node, and return what it printed."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-500:]} {done.stderr[-500:]}"
        return done.stdout

    @property
    def loops(self) -> int:
        """Loops of a kernel per millisecond, measured while nothing else computes."""
        return _measured_loops(self) if self.real else 1

    def sample(self) -> DeviceSample:
        """Return what NVML says of the GPU and its processes now."""
        samples = asyncio.run(NvmlProcesses().sample())
        return next(one for one in samples if one.device == self.gpu.uuid)

    def used_by(self, pids: set[int]) -> int:
        """Return the bytes that NVML says these processes use."""
        return sum(p.memory_bytes or 0 for p in self.sample().processes if p.pid in pids)

    def pod(self, name: str, *, mib: int, cores: int = 0) -> "Pod":
        """Prepare a pod as the node agent does."""
        gpu = self.gpu
        own = build.share(
            gpu.uuid,
            gpu.index,
            device_mib=gpu.usable_mib,
            memory_mib=mib,
            cores_percent=cores,
            slot=0,
            fence=1,
        )
        lease = build.lease(name, "node", own, dialect="nvidia")
        return asyncio.run(self._prepared(lease))

    async def _prepared(self, lease: Lease) -> "Pod":
        library = NodeLibrary(self.root / "library", self.library)
        files = ContainerFiles(PurePosixPath(self.root / "agent"), library)
        if library.simulated:
            await files.create_shared_files()
        assert await library.update(), library.unusable_reason
        setup = DIALECTS["nvidia"].container_setup(lease, "main", {}, files.paths)
        await files.prepare(setup, starting=True)
        root = self.root / f"root-{lease.pod}"
        root.mkdir(exist_ok=True)
        return Pod(machine=self, setup=setup, root=root)


@dataclass(kw_only=True)
class Pod:
    """A pod with one container, whose processes run on this machine as the agent prepared it."""

    machine: Machine
    setup: ContainerSetup
    root: Path
    overrides: str = ""
    """Content of the image's own file of overrides."""
    loads: list[GpuLoad] = field(default_factory=list)

    def start(
        self, *command: str | Path, own: bool = True, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a process of the container: in its mounts and PIDs, if this is root."""
        launch = Launch(
            command=list(map(str, command)),
            environment=self.environment(own=own) | variables,
            directory=Path("/"),
        )
        if can_unshare():
            launch = replace(
                launch,
                command=[*PIDS, *launch.command],
                root=self.root,
                mounts=self._mounts(),
                hidden=hidden_files(ContainerState(env=dict(self.setup.environment))),
            )
        return start_process(launch)

    def _mounts(self) -> list[MountPoint]:
        image = self.root.with_suffix(".overrides")
        image.write_text(self.overrides)
        return [
            MountPoint("/node-proc", "/proc", read_only=False),
            MountPoint(OVERRIDES, str(image), read_only=False),
            *(
                MountPoint(one.container_path, one.host_path, one.read_only)
                for one in self.setup.mounts
            ),
        ]

    def environment(self, *, own: bool = True) -> dict[str, str]:
        """Return its variables; `own`: with those that the device plugin gave."""
        machine = self.machine
        given = dict(self.setup.environment) if own else {}
        region = region_path_of(self.setup)
        if not can_unshare():
            given["CUDA_DEVICE_MEMORY_SHARED_CACHE"] = str(region)
            if machine.library:
                given |= {name: str(machine.library) for name in ("LD_PRELOAD", "CUDA_REDIRECT")}
        if machine.library is None:
            given["GPU_DRIVER_LIMITS"] = str(region)
        if can_unshare():
            given["GPU_DRIVER_PROC"] = "/node-proc"
        return machine.environment | given

    def load(
        self,
        *command: str | Path,
        own: bool = True,
        answer_s: float = ANSWER_S,
        **variables: str,
    ) -> GpuLoad:
        """Start a process that carries out commands; `gpu-load` if nothing else is named."""
        line = command or [self.machine.folder / "gpu-load"]
        load = GpuLoad(self.start(*line, own=own, **variables), answer_s=answer_s)
        self.loads.append(load)
        return load

    def torch(self) -> GpuLoad:
        """Start PyTorch in the pod."""
        return self.load(torch_python(), TORCH_PROGRAM, answer_s=TORCH_ANSWER_S)

    def run(self, *command: str | Path, timeout_s: float = 60.0) -> str:
        """Run a program in the pod, and return what it printed."""
        process = self.start(*command)
        out, err = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, f"{command}: {out[-500:]!r} {err[-500:]!r}"
        return out.decode()

    def resize(self, mib: int, cores: int = 0) -> None:
        """Change its limits while it runs."""
        limits = RegionSeed(
            memory_bytes=(mib * MIB,), cores_percent=(cores,), other_cores_percent=cores
        )
        write_limits(self.place, limits)

    def close(self) -> None:
        """Kill its processes."""
        for load in self.loads:
            if load.process.returncode is None:
                load.kill()

    @property
    def pids(self) -> set[int]:
        """PIDs on the node of its processes."""
        return {pid for one in self.loads for pid in _with_children(one.process.pid)}

    @property
    def place(self) -> PurePosixPath:
        """Where its region is."""
        found = region_path_of(self.setup)
        assert found is not None
        return found

    @property
    def limit_mib(self) -> int:
        """Its limit of memory."""
        return seed_of(self.setup.environment).memory_bytes[0] // MIB

    @property
    def region(self) -> Region:
        """Its region now."""
        found = read_region(self.place)
        assert isinstance(found, Region), found
        return found

    def counted(self) -> DeviceSums:
        """Return what its processes use, as they count it."""
        return sums(self.region, 0)


_loops: list[int] = []


def _measured_loops(machine: Machine) -> int:
    if not _loops:
        load = machine.load()
        _loops.append(load.value("calibrate", "loops"))
        load.kill()
    return _loops[0]


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _with_children(int(child))


@functools.cache
def torch_python() -> str:
    """Return the interpreter that has PyTorch, or nothing."""
    if "TORCH_PYTHON" in os.environ:
        return os.environ["TORCH_PYTHON"]
    given = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    probe = "import importlib.util as u; raise SystemExit(u.find_spec('torch') is None)"
    for python in (sys.executable, shutil.which("python3")):
        if python and not subprocess.run([python, "-c", probe], env=given, check=False).returncode:
            return python
    return ""


def first_gpu() -> Gpu:
    """Return the GPU that NVML lists first."""
    return min(asyncio.run(NvmlGpus().discover()), key=lambda gpu: gpu.index)
