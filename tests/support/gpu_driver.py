"""The simulated GPUs' driver in C, for tests: GPUs, their faults, and programs that use them."""

import fcntl
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.node_agent.mig.instances import InstanceProfile

MIB = 1 << 20
GIB = 1 << 30
CONTEXT = 256 * MIB
"""What a process takes of a GPU beside its allocations."""
ANSWER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class DriverGpu:
    """A GPU of the driver."""

    uuid: str
    memory_mib: int = 16384
    reserved_mib: int = 0
    """What the driver keeps of it."""
    name: str = "NVIDIA A100-SXM4-80GB"
    sms: int = 80
    mig: bool = False
    profiles: tuple[InstanceProfile, ...] = ()


def gpu(number: int, **changes: object) -> DriverGpu:
    """Return the GPU with this number."""
    return DriverGpu(uuid=f"GPU-{number:08x}-0000-4000-8000-000000000000", **changes)  # type: ignore[arg-type]


def _lines(gpu: DriverGpu) -> list[str]:
    own = f"gpu|{gpu.uuid}|{gpu.name}|{gpu.memory_mib}|{gpu.reserved_mib}|{gpu.sms}|{int(gpu.mig)}"
    profiles = (
        f"profile|{p.id}|{p.name}|{p.memory_mib}|{p.compute_slices}|{p.memory_slices}|{p.count}|"
        + ",".join(map(str, p.starts))
        for p in gpu.profiles
    )
    return [own, *profiles]


@dataclass(frozen=True, kw_only=True)
class RanTime:
    """GPU time that a process has had until a moment of the steady clock."""

    ran_us: int
    at_us: int

    def percent_since(self, earlier: "RanTime") -> float:
        return 100 * (self.ran_us - earlier.ran_us) / (self.at_us - earlier.at_us)


class GpuLoad:
    """A program that uses a GPU as its commands say."""

    def __init__(self, process: subprocess.Popen[bytes], *, answer_s: float = ANSWER_S) -> None:
        self.process = process
        self.answer_s = answer_s
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 1 << 20)  # it is read at the end only
        self._read = b""
        try:
            self.pid = int(self._line().removeprefix("ready "))
        except (ValueError, TimeoutError):
            self.kill()
            raise
        """PID in its own namespace."""

    def do(self, command: str) -> str:
        """Carry out a command; return its result."""
        self.send(command)
        return self._line()

    def send(self, command: str) -> None:
        """Have it carry out a command, and do not wait for the result."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())

    def result(self) -> str:
        """Return the result of a command that was sent."""
        return self._line()

    def fits(self, size: str, how: str = "alloc") -> bool:
        """Return whether an allocation succeeds; any other failure is an error."""
        result = self.do(f"{how} {size}")
        assert result in {"ok", "out of memory"}, result
        return result == "ok"

    def value(self, command: str, name: str) -> int:
        """Return a number from a command's result."""
        result = self.do(command)
        words = dict(word.split("=", 1) for word in result.split() if "=" in word)
        assert name in words, f"{command}: {result}"
        return int(words[name])

    def end(self) -> None:
        """Have it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(ANSWER_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it, as `kill -9` does."""
        self.process.kill()
        self.process.wait(ANSWER_S)
        self._close()

    def errors(self) -> str:
        """Return what it has written to standard error so far."""
        assert self.process.stderr is not None
        received = b""
        while select.select([self.process.stderr], [], [], 0)[0]:
            read = os.read(self.process.stderr.fileno(), 65536)
            if not read:
                break
            received += read
        return received.decode(errors="replace")

    def _line(self) -> str:
        assert self.process.stdout is not None
        until = time.monotonic() + self.answer_s
        while b"\n" not in self._read:
            left = max(0.0, until - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError(f"no result within {self.answer_s:g} s: {self.errors()}")
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                raise ValueError(f"the program has ended: {self._read!r} {self.errors()}")
            self._read += read
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def started(
    command: Sequence[str | Path], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a program that a test talks to."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0
    )


@dataclass(kw_only=True)
class GpuDriver:
    """The driver of one simulated machine."""

    folder: Path
    """With the libraries and programs."""
    state: Path
    loads: list[GpuLoad] = field(default_factory=list)

    def create(self, *gpus: DriverGpu) -> None:
        """Make these GPUs, instead of those before."""
        text = "\n".join(line for gpu in gpus for line in _lines(gpu)) + "\n"
        self._control("create", stdin=text)

    def set(self, gpu: DriverGpu, what: str, value: int = 1) -> None:
        """Give a GPU a fault, or a number of ecc-errors."""
        self._control("set", gpu.uuid, what, str(value))

    def used(self, gpu: DriverGpu) -> int:
        """Return the bytes in use of a GPU."""
        words = next(line.split() for line in self._show() if gpu.uuid in line)
        return int(words[words.index("used") + 1])

    def pids(self) -> list[int]:
        """Return the PIDs on the node of all processes on GPUs."""
        return [int(line.split()[1]) for line in self._show() if line.startswith("process ")]

    def ran(self, gpu: DriverGpu) -> dict[int, RanTime]:
        """Return what each process has had of a GPU so far, by PID on the node."""
        rows = [
            line.replace(",", "").split() for line in self._show() if line.startswith("process ")
        ]
        return {
            int(row[1]): RanTime(ran_us=int(row[row.index("ran") + 1]), at_us=int(row[-1]))
            for row in rows
            if gpu.uuid in row
        }

    def report_xid(self, gpu: DriverGpu, number: int) -> None:
        """Report an XID event."""
        self._control("xid", gpu.uuid, str(number))

    def limit_cgroups(self, accounting: str) -> None:
        """Have the driver limit the memory of cgroups by `misc` or `dmem`, or by `none`."""
        self._control("accounting", accounting)

    def set_limit(self, gpu: DriverGpu, cgroup: Path, hard: int | str, soft: int = 0) -> None:
        """Set a limit in bytes, as another program of the node does."""
        self._control("limit", gpu.uuid, str(cgroup), str(soft), str(hard))

    def forget_limits(self) -> None:
        """Forget all limits of cgroups, as at a reboot."""
        self._control("forget-limits")

    def fail_limits(self, code: int) -> None:
        """Have NVML return an error for limits of cgroups; 0 ends that."""
        self._control("limits-error", str(code))

    def keep_limits(self, *, kept: bool) -> None:
        """Have the driver lower no limit of a cgroup, as if more were in use, or end that."""
        self._control("keep-limits", str(int(kept)))

    def limits(self, gpu: DriverGpu) -> dict[Path, int]:
        """Return the hard limits of a GPU's cgroups, in bytes."""
        return self._limits(gpu, "hard")

    def soft_limits(self, gpu: DriverGpu) -> dict[Path, int]:
        """Return what is guaranteed to a GPU's cgroups, in bytes."""
        return self._limits(gpu, "soft")

    def _limits(self, gpu: DriverGpu, which: str) -> dict[Path, int]:
        rows = (line.split() for line in self._control("limits").splitlines())
        return {
            Path(row[2]): int(row[row.index(which) + 1])
            for row in rows
            if row[0] == "limit" and row[1] == gpu.uuid
        }

    def limit_calls(self) -> int:
        """Return how often NVML was called for limits of cgroups."""
        return int(self._control("limits").splitlines()[-1].split()[1])

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a program that uses these GPUs."""
        return {
            "PATH": os.environ["PATH"],
            "LD_LIBRARY_PATH": str(self.folder),
            "GPU_DRIVER_STATE": str(self.state),
        }

    def load(self, *command: str | Path, **environment: str) -> GpuLoad:
        """Start a program that uses the GPUs; `command` starts it in another way."""
        line = command or [self.folder / "gpu-load"]
        load = GpuLoad(started(line, self.environment | environment))
        self.loads.append(load)
        return load

    def close(self) -> None:
        """End all programs."""
        for uuid in (line.split()[1] for line in self._show() if line.startswith("gpu ")):
            self._control("set", uuid, "hang", "0")
        for load in self.loads:
            if load.process.returncode is None:
                load.kill()

    def timeslice(self, uuid: str) -> int:
        """Return the number of the length of a GPU's time slices."""
        line = next(line for line in self._show() if line.startswith(f"gpu {uuid} "))
        return int(line.rpartition(" timeslice ")[2])

    def set_timeslice(self, uuid: str, number: int) -> None:
        command = ("compute-policy", "-i", uuid, "--set-timeslice", str(number))
        subprocess.run([self.folder / "nvidia-smi", *command], env=self.environment, check=True)

    def _show(self) -> list[str]:
        return self._control("show").splitlines() if self.state.exists() else []

    def _control(self, *arguments: str, stdin: str = "") -> str:
        done = subprocess.run(
            [self.folder / "gpu-control", *arguments],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
