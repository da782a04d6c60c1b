"""The simulated cluster as a process of its own."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.waiting import until


@asynccontextmanager
async def cluster_process(
    state: Path, *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start it; its kubeconfig is in the state directory, whose path must be short."""
    kubeconfig = state / "kubeconfig"
    kubeconfig.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "simcluster", "--state", str(state), *arguments,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await until(lambda: kubeconfig.exists() or process.returncode is not None)
        assert process.returncode is None
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
