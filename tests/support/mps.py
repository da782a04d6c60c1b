"""A control daemon of MPS of the simulated GPUs, for tests."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from simcluster.gpu_driver.mps_control import PIPES, command, send_words
from simcluster.gpu_driver.mps_service import FAULTS, LOGS
from tests.support.waiting import until_blocking

COMMAND_S = 20.0


@dataclass(frozen=True, kw_only=True)
class ControlDaemon:
    """A daemon by its directories; a short path, since a socket's has 107 bytes at most."""

    pipes: Path
    logs: Path

    def start(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Start it, as `nvidia-cuda-mps-control -d` does."""
        return self.run("-d", *options, **environment)

    def run(
        self, *arguments: str, stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `nvidia-cuda-mps-control`."""
        return subprocess.run(
            [*command(), *arguments],
            env=self.environment | environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )

    def do(self, line: str) -> str:
        """Return the output of a command of version 2."""
        return self.run(stdin=f"{line}\n").stdout.strip()

    def ask(self, line: str, *, through: str = "") -> tuple[int, str]:
        """Return the exit code and output of a command of version 3, without a process for it.

        It is sent through the daemon's own socket, or through that of a server or namespace.
        """
        code, output = send_words(str(self.pipes / through), line.split())
        return code, output.decode()

    def fail(self, **faults: object) -> None:
        """Give it these faults, and no others."""
        self.logs.mkdir(parents=True, exist_ok=True)
        (self.logs / FAULTS).write_text(json.dumps(faults))

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which it is found."""
        return {PIPES: str(self.pipes), LOGS: str(self.logs)}

    @property
    def servers(self) -> list[int]:
        """The PIDs of its servers."""
        return [int(pid) for pid in self.do("get_server_list").split()]

    @property
    def clients(self) -> list[int]:
        """The PIDs of all clients."""
        listed = (self.do(f"get_client_list {pid}") for pid in self.servers)
        return [int(pid) for pids in listed for pid in pids.split()]

    def close(self) -> None:
        """End it, and wait until it has ended."""
        self.fail()
        self.run("-q")
        until_blocking(lambda: not (self.pipes / "control").exists())
