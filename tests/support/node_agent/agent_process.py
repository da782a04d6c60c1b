"""A node agent in a process of its own, beside the simulated kubelet of a test."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.node_agent.agent import OneNodeCluster
from tests.support.simcluster.kubelet import NODE


@asynccontextmanager
async def agent_process(
    cluster: OneNodeCluster, nats_url: str, environment: dict[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the agent; it is stopped at the end."""
    settings = cluster.settings
    (cluster.root / "run.json").unlink(missing_ok=True)
    flags = {
        "node": NODE,
        "nats-url": nats_url,
        "gpus": settings.gpus,
        "kubelet-dir": settings.kubelet_dir,
        "kubeconfig": settings.kubeconfig,
        "state-dir": settings.state_dir,
        "run-file": cluster.root / "run.json",
        "trace-dir": cluster.root / "traces",
    }
    log = (cluster.root / "agent.log").open("w")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "simcluster.node_agent"),
        *(word for flag, value in flags.items() for word in (f"--{flag}", str(value))),
        env=environment,
        stderr=log,
    )
    try:
        yield process
    finally:
        log.close()
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(30):
                await process.wait()
