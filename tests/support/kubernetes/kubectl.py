"""Stock kubectl for tests.

`LEASEHOLD_KUBECTL` may name several binaries, separated by colons, to try old and new ones.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes.short_lived import NO_GARBAGE
from tests.support.simcluster.apiserver import ApiUnderTest

BINARIES = os.environ.get("LEASEHOLD_KUBECTL", "kubectl").split(":")


@dataclass(frozen=True, slots=True)
class Kubectl:
    """One binary, pointed at the server under test."""

    binary: str
    api: ApiUnderTest
    home: Path

    async def run(self, line: str, stdin: str = "", *, code: int = 0) -> str:
        """Run a command line and return its output; `code` is the exit code it must have."""
        process = await asyncio.create_subprocess_exec(
            self.binary,
            *line.split(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={
                "KUBECONFIG": str(self.api.kubeconfig),
                "HOME": str(self.home),
                "PATH": "/usr/bin:/bin",
                "KUBE_EDITOR": str(self.home / "edit.sh"),
                **NO_GARBAGE,
            },
        )
        async with asyncio.timeout(30):
            output, _ = await process.communicate(stdin.encode())
        assert process.returncode == code, output.decode()
        return output.decode()

    async def minor(self) -> int:
        """Return the minor version of the binary."""
        text = await self.run("version --client -o yaml")
        minor = next(line for line in text.splitlines() if line.strip().startswith("minor:"))
        return int(minor.split(":")[1].strip().strip("\"'+"))


def kubectl_on(
    server: Callable[[], AbstractAsyncContextManager[ApiUnderTest]], *, least_minor: int = 0
) -> Any:
    """Return a fixture: each binary that is new enough, pointed at a server of its own."""

    @pytest.fixture(params=BINARIES)
    async def kubectl(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kubectl]:
        binary = shutil.which(str(request.param))
        if binary is None:
            pytest.skip(f"no {request.param} in PATH: install kubectl to run this test")
        async with server() as api:
            kubectl = Kubectl(binary, api, tmp_path)
            if least_minor and await kubectl.minor() < least_minor:
                pytest.skip(f"{binary} is older than 1.{least_minor}")
            yield kubectl

    return kubectl
