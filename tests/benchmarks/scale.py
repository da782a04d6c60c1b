"""What the size of the cluster costs: `python -m tests.benchmarks.scale --help`.

Every service is a process of its own on a real nats-server and valkey-server; the API server is a
trivial one in this process, and the agents of all nodes are one process (on one connection to
NATS, where real ones have one each). Nodes have 8 devices, and each device a lease of a running
pod. Printed per step: seconds, MiB of memory (resident) and milliseconds of CPU per process.

Steps: the start of all services; rest; a change of one node, from the watch event to the ledger; a
further placer, until it is ready; a rebuild of the lost ledger, until it has all leases.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from services.binder.bind.binding import binding_annotations
from services.node_agent.agent_timing import DEFAULT_TIMING
from shared.ledger.leases import RedisLeases
from shared.model.events.node_events import DeviceReported
from shared.model.lease import Lease
from shared.model.node import NodeFacts
from tests.benchmarks.process_counters import nats_traffic, process_counters
from tests.benchmarks.scale_agents import TRIGGER, devices_of, lease_of, node_name, serve
from tests.benchmarks.service_processes import KUBECONFIG, services
from tests.benchmarks.trivial_apiserver import DEVICES, Connection, TrivialApi, node_object
from tests.support.servers.nats import NatsServer, free_port
from tests.support.servers.valkey import ValkeyServer, valkey_server

PAGE = 500
NODES_AT_ONCE = 256
ALLOCATABLE = {"cpu": 128_000, "memory": 1 << 40, "ephemeral-storage": 1 << 40, "pods": 250}
POD = """{"metadata":{"name":"%(name)s","namespace":"bench","uid":"%(name)s","resourceVersion":\
"%(version)s","creationTimestamp":"2026-01-01T00:00:00Z","annotations":%(annotations)s},"spec":{\
"schedulerName":"leasehold","nodeName":"%(node)s","containers":[{"name":"c","image":"x","resources"\
:{"limits":%(limits)s,"requests":%(limits)s}}]},"status":{"phase":"Running"}}"""
LIMITS = json.dumps(
    {
        "cpu": "1",
        "memory": "1Gi",
        "volcano.sh/vgpu-number": "1",
        "volcano.sh/vgpu-memory": "40000",
        "volcano.sh/vgpu-cores": "60",
    }
)


class ScaleApi(TrivialApi):
    """Keeps bound pods, so that they are listed again; its nodes have agents."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes=nodes)
        self.pods: dict[str, bytes] = {}

    def add_pod(self, lease: Lease) -> None:
        """Add the running pod of a lease."""
        self.version += 1
        annotations = json.dumps(binding_annotations(lease, time.time()))
        fields = {"name": lease.pod, "annotations": annotations, "node": lease.node}
        fields |= {"limits": LIMITS, "version": str(self.version)}
        self.pods[lease.pod] = (POD % fields).encode()

    def change_node(self, number: int, run: int) -> None:
        """Change the label of a node."""
        assert self.node_watcher is not None
        self.version += 1
        node = self._node(number)
        node["metadata"]["resourceVersion"] = str(self.version)
        node["metadata"]["labels"]["run"] = str(run)
        self.node_watcher.feed(_event("MODIFIED", json.dumps(node).encode()))

    def page(self, path: str, query: dict[str, list[str]]) -> bytes:
        """Return a page of nodes or pods."""
        if not path.endswith(("/nodes", "/pods")):
            return super().page(path, query)
        start = int(query.get("continue", ["0"])[0] or 0)
        end = start + int(query.get("limit", [str(PAGE)])[0])
        if path.endswith("/nodes"):
            total = self.nodes
            items = [json.dumps(self._node(n)).encode() for n in range(start, min(end, total))]
        else:
            total = len(self.pods)
            items = list(self.pods.values())[start:end]
        following = str(end) if end < total else ""
        metadata = json.dumps({"resourceVersion": str(self.version), "continue": following})
        return b'{"metadata":%s,"items":[%s]}' % (metadata.encode(), b",".join(items))

    def _node(self, number: int) -> dict[str, Any]:
        node = node_object(number)
        node["metadata"]["annotations"] = {"leasehold.dev/agent": "1"}
        return node


def _event(kind: str, item: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), item)


class Cluster:
    """All processes, and what is read of them."""

    def __init__(
        self,
        api: ScaleApi,
        ledger: RedisLeases,
        valkey: ValkeyServer,
        nats_port: int,
        pids: dict[str, int],
    ) -> None:
        self.api = api
        self.ledger = ledger
        self.valkey = valkey
        self.nats_port = nats_port
        self.pids = pids

    async def until_rebuilt(self, *, limit_s: float = 900.0) -> None:
        """Wait until the ledger is ready, with all leases."""
        async with asyncio.timeout(limit_s):
            while await self.ledger.generation() is None:
                await asyncio.sleep(0.05)
        leases = int((await self.valkey.command("HLEN", "lh:leases"))[1:])
        assert leases == self.api.nodes * DEVICES, leases

    async def version(self) -> int:
        """Return the ledger's last version."""
        answer = await self.valkey.command("HINCRBY", "lh:ledger", "version", "0")
        return int(answer[1:])

    async def step(self, name: str, act: Callable[[], Awaitable[dict[str, Any] | None]]) -> None:
        """Do something and print what it took."""
        before = self.cpu_ms()
        began = time.perf_counter()
        more = await act()
        row: dict[str, Any] = {"step": name, "seconds": round(time.perf_counter() - began, 2)}
        row |= more or {}
        row["MiB"] = {name: round(_resident_mib(pid)) for name, pid in self.pids.items()}
        after = self.cpu_ms()
        row["CPU ms"] = {n: round(after[n] - before.get(n, 0.0)) for n in after}
        print(json.dumps(row), flush=True)

    def cpu_ms(self) -> dict[str, float]:
        """Return the CPU of each process so far."""
        return {name: process_counters(pid)["cpu_ms"] for name, pid in self.pids.items()}


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@contextlib.asynccontextmanager
async def servers(
    nodes: int, report_s: float, directory: Path
) -> AsyncIterator[tuple[Cluster, Path, str]]:
    """Start the API server, NATS, Valkey and the agents."""
    api = ScaleApi(nodes)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(api), "127.0.0.1", 0)
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG.format(port=server.sockets[0].getsockname()[1]))
    async with contextlib.AsyncExitStack() as stack:
        valkey = stack.enter_context(valkey_server(durable=True))
        await valkey.ready()
        port = free_port()
        nats = NatsServer(more=f"\nhttp: 127.0.0.1:{port}\n")
        await nats.start()
        stack.callback(nats.close)
        ledger = await stack.enter_async_context(RedisLeases.connect(valkey.url, timeout_s=60))
        await load(api, ledger)
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        arguments = (nats.url, nodes, report_s, ready.set)
        agents = context.Process(target=serve, args=arguments, daemon=True)
        agents.start()
        stack.callback(agents.join)
        stack.callback(agents.terminate)
        while not ready.is_set():
            await asyncio.sleep(0.05)
        assert nats.process is not None
        assert valkey.process is not None
        assert agents.pid is not None
        pids = {
            "nats-server": nats.process.pid,
            "valkey-server": valkey.process.pid,
            "agents": agents.pid,
        }
        yield Cluster(api, ledger, valkey, port, pids), kubeconfig, nats.url


async def measure(options: argparse.Namespace) -> None:
    """Measure and print every step."""
    with tempfile.TemporaryDirectory(prefix="lh-scale-") as folder:
        directory = Path(folder)
        async with (
            servers(options.nodes, options.report_s, directory) as (
                cluster,
                kubeconfig,
                nats_url,
            ),
            contextlib.AsyncExitStack() as stack,
        ):
            redis_url = cluster.valkey.url

            async def start() -> None:
                started = services(kubeconfig, nats_url, redis_url, 1, directory)
                cluster.pids |= await stack.enter_async_context(started)

            async def join() -> None:
                others = services(
                    kubeconfig, nats_url, redis_url, 1, directory, names=["placer-joining"]
                )
                cluster.pids |= await stack.enter_async_context(others)

            await cluster.step("start", start)
            await cluster.step("rest", lambda: rest(cluster, options.rest))
            await cluster.step("one node changes", lambda: change_nodes(cluster))
            await cluster.step("a placer joins", join)
            await cluster.step("rebuild", lambda: rebuild(cluster))


async def load(api: ScaleApi, ledger: RedisLeases) -> None:
    """Fill the ledger, and the API server with the leases' pods."""
    token = await ledger.begin_rebuild(now=time.time())
    assert token is not None
    for first in range(0, api.nodes, NODES_AT_ONCE):
        names, reports, leases = [], [], []
        for number in range(first, min(first + NODES_AT_ONCE, api.nodes)):
            name, devices = node_name(number), devices_of(number)
            names.append(NodeFacts(name=name, allocatable=ALLOCATABLE))
            reports.append(DeviceReported(node=name, devices=devices, served=(TRIGGER,)))
            leases += [lease_of(number, device) for device in devices]
        await ledger.save_nodes(names)
        await ledger.save_devices(reports)
        assert not await ledger.restore(leases, now=time.time(), token=token)
        for lease in leases:
            api.add_pod(lease)
    await ledger.finish_rebuild(token)


async def rest(cluster: Cluster, seconds: float) -> dict[str, Any]:
    """Do nothing once the start is over."""
    await asyncio.sleep(15)
    before, traffic = cluster.cpu_ms(), await nats_traffic(cluster.nats_port)
    await asyncio.sleep(seconds)
    after, later = cluster.cpu_ms(), await nats_traffic(cluster.nats_port)
    return {
        "CPU ms per s": {n: round((after[n] - before[n]) / seconds, 1) for n in after},
        "NATS per s": {key: round((later[key] - traffic[key]) / seconds) for key in later},
    }


async def change_nodes(cluster: Cluster, times: int = 20) -> dict[str, Any]:
    """Change single nodes, and time each until the ledger has the change."""
    took = []
    for number in range(times):
        version, began = await cluster.version(), time.perf_counter()
        cluster.api.change_node(number, number)
        async with asyncio.timeout(30):
            while await cluster.version() == version:
                await asyncio.sleep(0.001)
        took.append((time.perf_counter() - began) * 1e3)
    return {"median ms": round(statistics.median(took), 1), "max ms": round(max(took), 1)}


async def rebuild(cluster: Cluster) -> None:
    """Lose the ledger, and wait until it has all leases again."""
    await cluster.valkey.command("FLUSHALL")
    await cluster.until_rebuilt()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=10_000, help="of 8 devices (default 10000)")
    parser.add_argument("--rest", type=float, default=30.0, help="seconds measured at rest")
    parser.add_argument(
        "--report-s",
        type=float,
        default=DEFAULT_TIMING.report_s,
        help="seconds between an agent's reports (default as agents: %(default)s); more for a "
        "cluster whose agents keep more cores busy than this machine has",
    )
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
