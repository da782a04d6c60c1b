"""What pods cost while they wait: `python -m tests.benchmarks.waiting --help`.

Every service is a process of its own on a real nats-server and valkey-server; the API server is
this process and does nothing. A cluster of `--nodes` nodes with 8 devices each is filled with pods
that hold whole devices; then `--waiting` pods in 20 different sizes come, none of which fits.
Measured: functions that the ledger runs and CPU time of every process, per second, over `--seconds`
of rest, before a pod waits and with all of them waiting; then pods end, one at a time, and the time
is taken from the watch event that reports it to the binding of a pod that waited; then rest again.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from tests.benchmarks.processes import cpu_ms, difference, served, servers, services
from tests.benchmarks.trivial_apiserver import DEVICES, TrivialApi, pod_event
from tests.support.waiting import until

SIZES = 20
WHOLE = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-cores": "100"}


def pod_line(api, number, run, limits):
    """Return the watch line of a pod whose condition has the reason why it waits."""
    api.version += 1
    event = json.loads(pod_event(number, run, api.version))
    event["object"]["spec"]["containers"][0]["resources"] = {"limits": limits, "requests": limits}
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    event["object"]["status"] |= {"conditions": [condition]}
    line = json.dumps(event).encode() + b"\n"
    api.pods[event["object"]["metadata"]["name"]] = line
    return line


async def free_one(api, line):
    """End a bound pod; return the milliseconds until a waiting one is bound."""
    api.version += 1
    event = json.loads(line)
    event["type"] = "MODIFIED"
    event["object"]["metadata"]["resourceVersion"] = str(api.version)
    event["object"]["spec"]["nodeName"] = "node-0"
    event["object"]["status"] = {"phase": "Succeeded"}
    bound_before = len(api.bound)
    began = time.perf_counter()
    api.watcher.feed(json.dumps(event).encode() + b"\n")
    async with asyncio.timeout(60):
        while len(api.bound) == bound_before:
            await asyncio.sleep(0.001)
    return (max(api.bound.values()) - began) * 1e3


async def at_rest(up, pids, seconds):
    """Measure a time in which nothing happens."""
    calls = await up.functions()
    before = cpu_ms(pids)
    await asyncio.sleep(seconds)
    used = {
        "functions_per_s": difference(await up.functions(), calls),
        "cpu_ms_per_s": difference(cpu_ms(pids), before),
    }
    return {
        what: {name: round(value / seconds, 1) for name, value in counters.items()}
        for what, counters in used.items()
    }


async def measure(options, directory):
    api = TrivialApi(nodes=options.nodes)
    async with (
        served(api, directory) as kubeconfig,
        servers() as up,
        services(kubeconfig, up, directory, placers=options.placers) as started,
    ):
        pids = started | up.pids
        await until(lambda: api.watcher)
        holding = [pod_line(api, n, "hold", WHOLE) for n in range(options.nodes * DEVICES)]
        api.watcher.feed(b"".join(holding))
        names = {f"p-hold-{n}" for n in range(len(holding))}
        await until(lambda: names <= api.bound.keys(), limit_s=120)
        report = {"cores": os.cpu_count(), "holding": len(holding)}
        await asyncio.sleep(6)
        report["nobody waits"] = await at_rest(up, pids, options.seconds)

        sizes = [
            {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": str(40_000 + 2_000 * n)}
            for n in range(SIZES)
        ]
        lines = [pod_line(api, n, "wait", sizes[n % SIZES]) for n in range(options.waiting)]
        began = time.perf_counter()
        api.watcher.feed(b"".join(lines))
        await until(lambda: up.client.hlen("lh:waiting"), lambda n: n >= len(lines), limit_s=300)
        report["seconds_until_all_wait"] = round(time.perf_counter() - began, 1)
        await asyncio.sleep(options.settle)
        report[f"{len(lines)} wait"] = await at_rest(up, pids, options.seconds)

        freed = [await free_one(api, line) for line in holding[: options.freed]]
        median = statistics.median(freed)
        most = max(freed)
        report["freed"] = {"median_ms": round(median, 1), "max_ms": round(most, 1)}
        report["just after the last was freed"] = await at_rest(up, pids, 5)
        print(json.dumps(report, indent=1))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", type=int, default=100)
    add("--placers", type=int, default=2)
    add("--waiting", type=int, default=10_000)
    add("--freed", type=int, default=20, help="pods that end, one after another")
    add("--seconds", type=float, default=20.0)
    text = "seconds for Events and conditions to be written"
    add("--settle", type=float, default=30.0, help=text)
    with tempfile.TemporaryDirectory(prefix="lh-bench-") as folder:
        asyncio.run(measure(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
