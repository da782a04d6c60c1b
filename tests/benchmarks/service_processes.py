"""Watcher, placers and binder as processes on a real nats-server and valkey-server."""

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tests.support.waiting import until

KUBECONFIG = """apiVersion: v1
kind: Config
current-context: bench
clusters: [{{name: bench, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: bench, user: {{token: bench}}}}]
contexts: [{{name: bench, context: {{cluster: bench, user: bench}}}}]
"""


@contextlib.asynccontextmanager
async def services(
    kubeconfig: Path,
    nats_url: str,
    redis_url: str,
    placers: int,
    directory: Path,
    *,
    authority: Path | None = None,
    traces: Path | None = None,
    names: Sequence[str] = (),
    together: bool = False,
) -> AsyncIterator[dict[str, int]]:
    """Start watcher, placers and binder, or those named; yield their pids once all are ready.

    `together`: watcher, placer and binder are one process.
    """
    processes: dict[str, subprocess.Popen[bytes]] = {}
    apart = ["watcher", "binder", *(f"placer-{n}" for n in range(placers))]
    names = names or (["scheduler"] if together else apart)
    for name in names:
        command = [sys.executable, "-m", f"services.{name.partition('-')[0]}"]
        command += ["--nats-url", nats_url, "--run-file", str(directory / f"{name}.json")]
        command += ["--log-level", "warning"]
        if authority:
            command += ["--nats-ca-file", str(authority)]
        if traces:
            command += ["--trace-dir", str(traces)]
        if name != "watcher":
            command += ["--redis-url", redis_url]
        if not name.startswith("placer"):
            command += ["--kubeconfig", str(kubeconfig)]
        log = (directory / f"{name}.log").open("wb")
        processes[name] = subprocess.Popen(command, stderr=log)
    try:
        await until(lambda: all((directory / f"{n}.json").exists() for n in names), limit_s=120)
        yield {name: process.pid for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(20)
