"""What pods cost while they wait: `python -m tests.benchmarks.waiting --help`.

Every service is a process of its own on a real nats-server and valkey-server; the API server is
this process and does nothing. A cluster of `--nodes` nodes with 8 devices each is filled with pods
that hold whole devices; then `--waiting` pods in 20 different sizes come, none of which fits.
Measured: scripts that the ledger runs and CPU time of every process, per second, over `--seconds`
of rest, with nobody waiting and with everybody waiting; then pods end, one at a time, and the time
is taken from the watch event that says so to the binding of a pod that waited; then rest again.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.process_counters import process_counters
from tests.benchmarks.service_processes import KUBECONFIG, services
from tests.benchmarks.trivial_apiserver import DEVICES, Connection, TrivialApi, pod_event
from tests.support.servers.nats import nats_server
from tests.support.servers.valkey import ValkeyServer, valkey_server
from tests.support.waiting import until

SIZES = 20
WHOLE = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-cores": "100"}


def pod_line(
    api: TrivialApi, number: int, run: str, limits: dict[str, str], **status: Any
) -> bytes:
    """Return the watch line of a pod whose condition has the reason why it waits."""
    api.version += 1
    event = json.loads(pod_event(number, run, api.version))
    event["object"]["spec"]["containers"][0]["resources"] = {"limits": limits, "requests": limits}
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    event["object"]["status"] |= {"conditions": [condition]} | status
    line = json.dumps(event).encode() + b"\n"
    api.pods[event["object"]["metadata"]["name"]] = line
    return line


def ended(api: TrivialApi, line: bytes) -> bytes:
    """Return the watch line of a bound pod that has succeeded."""
    api.version += 1
    event = json.loads(line)
    event["type"] = "MODIFIED"
    event["object"]["metadata"]["resourceVersion"] = str(api.version)
    event["object"]["spec"]["nodeName"] = "node-0"
    event["object"]["status"] = {"phase": "Succeeded"}
    return json.dumps(event).encode() + b"\n"


async def scripts_run(valkey: ValkeyServer) -> dict[str, int]:
    """Return how often each kind of command was run, and the microseconds it took."""
    reader, writer = await asyncio.open_unix_connection(str(valkey.socket))
    writer.write(b"*2\r\n$4\r\nINFO\r\n$12\r\ncommandstats\r\n")
    length = int((await reader.readline())[1:])
    text = (await reader.readexactly(length)).decode()
    writer.close()
    await writer.wait_closed()
    counts = {}
    for line in text.splitlines():
        name, _, values = line.partition(":")
        if name == "cmdstat_evalsha":
            fields = dict(pair.split("=") for pair in values.split(","))
            counts = {"calls": int(fields["calls"]), "us": int(fields["usec"])}
    return counts


async def at_rest(
    valkey: ValkeyServer, pids: dict[str, int], seconds: float
) -> dict[str, dict[str, float]]:
    """Measure a time in which nothing happens."""
    scripts = await scripts_run(valkey)
    before = {name: process_counters(pid)["cpu_ms"] for name, pid in pids.items()}
    await asyncio.sleep(seconds)
    spent = {name: process_counters(pid)["cpu_ms"] - before[name] for name, pid in pids.items()}
    after = await scripts_run(valkey)
    return {
        "scripts_per_s": {key: round((after[key] - scripts[key]) / seconds, 1) for key in after},
        "cpu_ms_per_s": {name: round(ms / seconds, 1) for name, ms in spent.items()},
    }


async def until_waiting(valkey: ValkeyServer, count: int) -> float:
    """Return how long it took until so many pods waited in the ledger."""
    began = time.perf_counter()
    async with asyncio.timeout(300):
        while int((await valkey.command("HLEN", "lh:waiting"))[1:]) < count:
            await asyncio.sleep(0.1)
    return time.perf_counter() - began


async def free_one(api: TrivialApi, line: bytes) -> float:
    """End a pod; return the seconds until a waiting one is bound."""
    assert api.watcher is not None
    known = len(api.bound)
    began = time.perf_counter()
    api.watcher.feed(ended(api, line))
    async with asyncio.timeout(60):
        while len(api.bound) == known:
            await asyncio.sleep(0.001)
    return max(api.bound.values()) - began


async def measure(options: argparse.Namespace) -> None:
    api = TrivialApi(nodes=options.nodes)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(api), "127.0.0.1", 0)
    with tempfile.TemporaryDirectory(prefix="lh-bench-") as folder:
        directory = Path(folder)
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(KUBECONFIG.format(port=server.sockets[0].getsockname()[1]))
        stack = contextlib.AsyncExitStack()
        valkey = stack.enter_context(valkey_server(durable=True))
        await valkey.ready()
        async with (
            stack,
            nats_server() as nats,
            services(kubeconfig, nats.url, valkey.url, options.placers, directory) as pids,
        ):
            while api.watcher is None:
                await asyncio.sleep(0.05)
            everyone = dict(pids)
            for name, process in (("nats", nats.process), ("valkey", valkey.process)):
                if process is not None:
                    everyone[name] = process.pid
            holding = [pod_line(api, n, "hold", WHOLE) for n in range(options.nodes * DEVICES)]
            api.watcher.feed(b"".join(holding))
            names = {f"p-hold-{n}" for n in range(len(holding))}
            await until(lambda: names <= api.bound.keys(), limit_s=120)
            report: dict[str, Any] = {"cores": os.cpu_count(), "holding": len(holding)}
            await asyncio.sleep(6)
            report["nobody waits"] = await at_rest(valkey, everyone, options.seconds)

            lines = [
                pod_line(
                    api,
                    n,
                    "wait",
                    {
                        "volcano.sh/vgpu-number": "1",
                        "volcano.sh/vgpu-memory": str(40_000 + 2_000 * (n % SIZES)),
                    },
                )
                for n in range(options.waiting)
            ]
            api.watcher.feed(b"".join(lines))
            report["seconds_until_all_wait"] = round(await until_waiting(valkey, len(lines)), 1)
            await asyncio.sleep(options.settle)
            report[f"{len(lines)} wait"] = await at_rest(valkey, everyone, options.seconds)

            passed_on = [await free_one(api, line) for line in holding[: options.freed]]
            report["freed"] = {
                "median_ms": round(statistics.median(passed_on) * 1e3, 1),
                "max_ms": round(max(passed_on) * 1e3, 1),
            }
            report["just after the last was freed"] = await at_rest(valkey, everyone, 5)
            print(json.dumps(report, indent=1))
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--placers", type=int, default=2)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--freed", type=int, default=20, help="pods that end, one after another")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--settle", type=float, default=30.0, help="seconds for Events and conditions to be written"
    )
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
