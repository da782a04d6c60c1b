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
from pathlib import Path

from services.binder.bind.binding_sender import binding_annotations
from services.node_agent.service import REPORT_S
from shared.ledger.leases import RedisLeases
from shared.model.devices.node import NodeFacts
from shared.model.events.node_events import DeviceReported
from tests.benchmarks.processes import cpu_ms, served, servers, services
from tests.benchmarks.scale_agents import (
    TRIGGER,
    devices_of,
    lease_of,
    node_name,
    serve,
)
from tests.benchmarks.trivial_apiserver import DEVICES, TrivialApi, node_object

NODES_AT_ONCE = 256
ALLOCATABLE = {"cpu": 128_000, "memory": 1 << 40, "ephemeral-storage": 1 << 40, "pods": 250}
REQUESTED = {"cpu": "1", "memory": "1Gi", TRIGGER: "1"}
REQUESTED |= {"volcano.sh/vgpu-memory": "40000", "volcano.sh/vgpu-cores": "60"}


class ScaleApi(TrivialApi):
    """Lists the running pods of leases; its nodes have agents."""

    def add_pod(self, lease):
        self.version += 1
        resources = {"limits": REQUESTED, "requests": REQUESTED}
        pod = {
            "metadata": {
                "name": lease.pod,
                "namespace": "bench",
                "uid": lease.pod,
                "resourceVersion": str(self.version),
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "annotations": binding_annotations(lease, time.time()),
            },
            "spec": {
                "schedulerName": "leasehold",
                "nodeName": lease.node,
                "containers": [{"name": "c", "image": "x", "resources": resources}],
            },
            "status": {"phase": "Running"},
        }
        self.pods[lease.pod] = json.dumps({"type": "ADDED", "object": pod}).encode() + b"\n"

    def change_node(self, number):
        """Change the label of a node."""
        self.version += 1
        node = self.node(number)
        node["metadata"]["resourceVersion"] = str(self.version)
        node["metadata"]["labels"]["run"] = str(number)
        event = {"type": "MODIFIED", "object": node}
        self.node_watcher.feed(json.dumps(event).encode() + b"\n")

    def node(self, number):
        node = node_object(number)
        node["metadata"]["annotations"] = {"leasehold.dev/agent": "1"}
        return node


class Cluster:
    """All processes, and what is read of them."""

    def __init__(self, api, ledger, up, pids):
        self.api = api
        self.ledger = ledger
        self.up = up
        self.pids = pids

    async def step(self, name, act):
        """Do something and print what it took."""
        before = cpu_ms(self.pids)
        began = time.perf_counter()
        more = await act()
        row = {"step": name, "seconds": round(time.perf_counter() - began, 2)} | (more or {})
        row["MiB"] = {name: round(resident_mib(pid)) for name, pid in self.pids.items()}
        after = cpu_ms(self.pids)
        row["CPU ms"] = {n: round(after[n] - before.get(n, 0.0)) for n in after}
        print(json.dumps(row), flush=True)

    async def rest(self, seconds):
        """Do nothing once the start is over."""
        await asyncio.sleep(15)
        before = cpu_ms(self.pids)
        traffic = await self.up.traffic()
        await asyncio.sleep(seconds)
        after = cpu_ms(self.pids)
        later = await self.up.traffic()
        return {
            "CPU ms per s": {n: round((after[n] - before[n]) / seconds, 1) for n in after},
            "NATS per s": {key: round((later[key] - traffic[key]) / seconds) for key in later},
        }

    async def change_nodes(self, times=20):
        """Change single nodes, and time each until the ledger has the change."""
        took = []
        ledger = self.up.client
        for number in range(times):
            version = await ledger.hget("lh:ledger", "version")
            began = time.perf_counter()
            self.api.change_node(number)
            async with asyncio.timeout(30):
                while await ledger.hget("lh:ledger", "version") == version:
                    await asyncio.sleep(0.001)
            took.append((time.perf_counter() - began) * 1e3)
        return {"median ms": round(statistics.median(took), 1), "max ms": round(max(took), 1)}

    async def rebuild(self):
        """Lose the ledger, and wait until it is ready, with all leases."""
        await self.up.client.flushall()
        async with asyncio.timeout(900):
            while await self.ledger.generation() is None:
                await asyncio.sleep(0.05)
        leases = await self.up.client.hlen("lh:leases")
        assert leases == self.api.nodes * DEVICES, leases


def resident_mib(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def load(api, ledger):
    """Fill the ledger, and the API server with the leases' pods."""
    token = await ledger.begin_rebuild(now=time.time())
    for first in range(0, api.nodes, NODES_AT_ONCE):
        names = []
        reports = []
        leases = []
        for number in range(first, min(first + NODES_AT_ONCE, api.nodes)):
            name = node_name(number)
            devices = devices_of(number)
            names.append(NodeFacts(name=name, allocatable=ALLOCATABLE))
            reports.append(DeviceReported(node=name, devices=devices, served=(TRIGGER,)))
            leases += [lease_of(number, device) for device in devices]
        await ledger.save_nodes(names)
        await ledger.save_devices(reports)
        assert not await ledger.restore(leases, now=time.time(), token=token)
        for lease in leases:
            api.add_pod(lease)
    await ledger.finish_rebuild(token)


@contextlib.asynccontextmanager
async def agents(nats_url, nodes, report_s):
    """Run the agents' process; yield its pid."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    arguments = (nats_url, nodes, report_s, ready.set)
    process = context.Process(target=serve, args=arguments, daemon=True)
    process.start()
    try:
        while not ready.is_set():
            await asyncio.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.join()


async def measure(options):
    """Measure and print every step."""
    api = ScaleApi(options.nodes)
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-scale-")))
        kubeconfig = await stack.enter_async_context(served(api, directory))
        up = await stack.enter_async_context(servers())
        connecting = RedisLeases.connect(up.valkey.url, timeout_s=60)
        ledger = await stack.enter_async_context(connecting)
        await load(api, ledger)
        started = agents(up.nats_url, api.nodes, options.report_s)
        pids = up.pids | {"agents": await stack.enter_async_context(started)}
        cluster = Cluster(api, ledger, up, pids)

        async def start(*names):
            more = services(kubeconfig, up, directory, names=names)
            cluster.pids |= await stack.enter_async_context(more)

        await cluster.step("start", start)
        await cluster.step("rest", lambda: cluster.rest(options.rest))
        await cluster.step("one node changes", cluster.change_nodes)
        await cluster.step("a placer joins", lambda: start("placer-joining"))
        await cluster.step("rebuild", cluster.rebuild)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", type=int, default=10_000, help="of 8 devices (default 10000)")
    add("--rest", type=float, default=30.0, help="seconds measured at rest")
    text = "seconds between an agent's reports (default as agents: %(default)s); more for a "
    text += "cluster whose agents keep more cores busy than this machine has"
    add("--report-s", type=float, default=REPORT_S, help=text)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
