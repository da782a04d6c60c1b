"""Processes of a benchmark, and their counters: CPU, wake-ups, calls, messages and functions.

Counters only rise; a measurement is the difference of two readings. `schedstat` counts CPU in
nanoseconds, where `stat` counts ticks of 10 ms.
https://docs.kernel.org/scheduler/sched-stats.html
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import redis.asyncio

from tests.benchmarks.trivial_apiserver import Connection
from tests.support.servers.nats import NatsServer, free_port
from tests.support.servers.valkey import valkey_server
from tests.support.waiting import until

KUBECONFIG = """apiVersion: v1
kind: Config
current-context: bench
clusters: [{{name: bench, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: bench, user: {{token: bench}}}}]
contexts: [{{name: bench, context: {{cluster: bench, user: bench}}}}]
"""


def process_counters(pid):
    """Return CPU in ms, how often a thread woke up, and calls that read and write files."""
    io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    counters = {"cpu_ms": 0.0, "wakeups": 0.0}
    counters["read_write_calls"] = float(io["syscr"]) + float(io["syscw"])
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            counters["cpu_ms"] += int((task / "schedstat").read_text().split()[0]) / 1e6
            status = (task / "status").read_text()
            counters["wakeups"] += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return counters


def cpu_ms(pids):
    return {name: process_counters(pid)["cpu_ms"] for name, pid in pids.items()}


def difference(after, before):
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


class Servers:
    """A nats-server and a valkey-server, their addresses, pids and counters."""

    def __init__(self, nats, valkey, monitor):
        self.nats_url = nats.url
        self.valkey = valkey
        self.monitor = monitor
        self.client = redis.asyncio.Redis.from_url(valkey.url)
        self.pids = {"nats-server": nats.process.pid, "valkey-server": valkey.process.pid}

    async def traffic(self):
        """Return messages and bytes that clients of NATS have sent and received."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.monitor)
        writer.write(b"GET /varz HTTP/1.0\r\n\r\n")
        document = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()
        units = (("messages", "msgs"), ("bytes", "bytes"))
        return {
            f"{unit} {way}": document[f"{way}_{k}"] for unit, k in units for way in ("in", "out")
        }

    async def functions(self):
        """Return how many functions the ledger has run, and the microseconds they took."""
        commands = await self.client.info("commandstats")
        used = [commands.get(f"cmdstat_{name}", {}) for name in ("fcall", "fcall_ro")]
        return {
            "functions": sum(counters.get("calls", 0) for counters in used),
            "function_us": sum(counters.get("usec", 0) for counters in used),
        }


@contextlib.asynccontextmanager
async def servers():
    with valkey_server(durable=True) as valkey:
        await valkey.ready()
        monitor = free_port()
        nats = NatsServer(more=f"\nhttp: 127.0.0.1:{monitor}\n")
        await nats.start()
        servers = Servers(nats, valkey, monitor)
        try:
            yield servers
        finally:
            await servers.client.aclose()
            nats.close()


@contextlib.asynccontextmanager
async def served(api, directory):
    """Serve a trivial API server; yield its kubeconfig."""
    server = await asyncio.get_running_loop().create_server(lambda: Connection(api), "127.0.0.1", 0)
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG.format(port=server.sockets[0].getsockname()[1]))
    try:
        yield kubeconfig
    finally:
        server.close()


@contextlib.asynccontextmanager
async def services(kubeconfig, up, directory, *, placers=1, together=False, names=()):
    """Start watcher, placers and binder, or those named; yield their pids once all are ready."""
    apart = ["watcher", "binder", *(f"placer-{n}" for n in range(placers))]
    names, processes = names or (["scheduler"] if together else apart), {}
    for name in names:
        command = [sys.executable, "-m", f"services.{name.partition('-')[0]}"]
        command += ["--nats-url", up.nats_url, "--run-file", str(directory / f"{name}.json")]
        command += ["--log-level", "warning"]
        if name != "watcher":
            command += ["--redis-url", up.valkey.url]
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
