"""What arriving pods notice of preemption: `python -m tests.benchmarks.reclaim --help`.

Every service is a process of its own on a real nats-server and valkey-server; the API server is
this process and replies at once. Nodes of the pool `train` are filled with pods that hold a whole
GPU each; as many pods of a higher priority wait for the same GPUs. Small pods for the pool `serve`
arrive at a steady rate. The planner is stopped (SIGSTOP) and continued in turns, so that windows
with and without preemptions alternate in one run on the same machine, whatever else runs there.
Each row is one window; at the end follow all windows with, and all without planning. Latency runs
from the watch event of a pod to its binding.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path

from tests.benchmarks.pace import at_rate, quantile, settle
from tests.benchmarks.processes import (
    cpu_ms,
    difference,
    process_counters,
    served,
    servers,
    services,
)
from tests.benchmarks.trivial_apiserver import DEVICES, TrivialApi, node_object, pod_event
from tests.support.waiting import until

SERVICES = ("watcher", "placer-0", "planner", "binder")
WHOLE = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-cores": "100"}
POOL = "pool"
URGENT_PRIORITY = 1_000
SPEC = b'"spec": {'
NO_LIMITS = {
    "LEASEHOLD_PREEMPTION_NOTICE_S": "0",
    "LEASEHOLD_PREEMPTION_MIN_RUNTIME_S": "0",
    "LEASEHOLD_PREEMPTION_COOLDOWN_S": "0",
    "LEASEHOLD_PREEMPTION_PER_MINUTE": "1000000",
    "LEASEHOLD_PREEMPTION_PER_NAMESPACE_HOUR": "1000000",
    "LEASEHOLD_PLAN_STARTS_AFTER_S": "0",
}
CREATED_PER_S = 400
"""Pods that fill the nodes, and those that wait, are created at this rate."""
CALM_S = 4.0
BUSY_SHARE = 0.1
"""Of a core, that a service uses which has work left."""


class ReclaimApi(TrivialApi):
    """Pods have a pool, and end as soon as they are evicted."""

    def __init__(self, trained, nodes):
        super().__init__(nodes)
        self.trained = trained
        self.evicted = set()

    def node(self, number):
        made = node_object(number)
        made["metadata"]["labels"][POOL] = "train" if number < self.trained else "serve"
        return made

    async def create_pods(self, run, numbers):
        """Create small pods for the pool `serve`."""
        lines = []
        for number in numbers:
            self.version += 1
            line = pod_event(number, run, self.version)
            line = line.replace(SPEC, SPEC + b'"nodeSelector": {"pool": "serve"}, ', 1)
            lines.append(line)
            self.pods[f"p-{run}-{number}"] = line
        self.send(*lines)

    def create_whole(self, run, number, priority):
        """Create a pod of a whole GPU for the pool `train`."""
        self.version += 1
        event = json.loads(pod_event(number, run, self.version))
        pod = event["object"]
        pod["spec"] |= {"nodeSelector": {POOL: "train"}, "priority": priority}
        pod["spec"]["containers"][0]["resources"] = {"limits": WHOLE, "requests": WHOLE}
        line = json.dumps(event).encode() + b"\n"
        self.pods[pod["metadata"]["name"]] = line
        self.send(line)
        return pod["metadata"]["name"]

    def evict(self, name, body):
        """End a pod, unless it is a dry run."""
        if b"dryRun" in body or name in self.evicted or name not in self.pods:
            return
        self.evicted.add(name)
        self.version += 1
        event = json.loads(self.pods[name])
        event["type"] = "MODIFIED"
        event["object"]["metadata"]["resourceVersion"] = str(self.version)
        event["object"]["status"] = {"phase": "Succeeded"}
        self.pods[name] = json.dumps(event).encode() + b"\n"
        self.send(self.pods[name])

    def write(self, path, body):
        if path.endswith("/eviction"):
            self.evict(path.split("/")[-2], body)


async def create_all(api, run, count, priority):
    names = []
    began = time.perf_counter()
    while len(names) < count:
        due = min(count, int((time.perf_counter() - began) * CREATED_PER_S) + 1)
        names += [api.create_whole(run, number, priority) for number in range(len(names), due)]
        await asyncio.sleep(0.005)
    return names


async def window(api, pids, options, *, planning):
    """Let pods arrive for some seconds, with the planner at work or stopped."""
    evicted = len(api.evicted)
    if planning:
        os.kill(pids["planner"], signal.SIGCONT)
        await until(lambda: len(api.evicted) > evicted, limit_s=300)
    before = cpu_ms(pids)
    latencies, missing = await at_rate(api, options.rate, options.seconds)
    row = {
        "planning": planning,
        "evicted": len(api.evicted) - evicted,
        "missing": missing,
        **{f"p{share * 100:g} ms": quantile(latencies, share) for share in (0.5, 0.99)},
        "max ms": round(max(latencies, default=0.0), 1),
        "CPU ms": {name: round(ms) for name, ms in difference(cpu_ms(pids), before).items()},
    }
    print(json.dumps(row), flush=True)
    if planning:
        os.kill(pids["planner"], signal.SIGSTOP)
        await calm(pids)
    return latencies


async def calm(pids):
    """Wait until plans are carried out, and all pods that wait are decided on again."""
    others = {name: pid for name, pid in pids.items() if name != "planner"}
    while True:
        before = cpu_ms(others)
        await asyncio.sleep(CALM_S)
        used = difference(cpu_ms(others), before)
        if max(used.values()) < BUSY_SHARE * CALM_S * 1e3:
            return


async def measure(options, directory):
    trained = options.pods // DEVICES
    api = ReclaimApi(trained, trained + options.serving)
    async with (
        served(api, directory) as kubeconfig,
        servers() as up,
        services(kubeconfig, up, directory, names=SERVICES) as pids,
    ):
        await until(lambda: api.watcher and api.node_watcher)
        await warm_up(api)

        async def read():
            readings = {name: process_counters(pid) for name, pid in (pids | up.pids).items()}
            readings["valkey-server"] |= {"functions": (await up.functions())["functions"]}
            return readings

        await settle(read)
        held = await create_all(api, "held", options.pods, 0)
        await until(lambda: set(held) <= api.bound.keys(), limit_s=300)
        os.kill(pids["planner"], signal.SIGSTOP)
        try:
            urgent = await create_all(api, "urgent", options.pods, URGENT_PRIORITY)
            await calm(pids)
            await windows(api, pids, options)
        finally:
            os.kill(pids["planner"], signal.SIGCONT)
        reclaimed = {
            "evicted": len(api.evicted),
            "bound in their place": len(api.bound.keys() & {*urgent}),
        }
        print(json.dumps(reclaimed), flush=True)


async def windows(api, pids, options):
    measured = {True: [], False: []}
    for _ in range(options.windows):
        if len(api.evicted) >= options.pods:
            break
        for planning in (False, True):
            measured[planning] += await window(api, pids, options, planning=planning)
    for planning, latencies in measured.items():
        row = {"all windows": "with planning" if planning else "without", "pods": len(latencies)}
        row |= {f"p{share * 100:g} ms": quantile(latencies, share) for share in (0.5, 0.9, 0.99)}
        row["max ms"] = round(max(latencies, default=0.0), 1)
        print(json.dumps(row), flush=True)


async def warm_up(api):
    """Create single pods until all of them are bound: every node and device is known by then."""
    for _ in range(120):
        with contextlib.suppress(AssertionError):
            _, missing = await at_rate(api, 20, 0.5)
            if not missing:
                return
    raise SystemExit("no pod was bound within the warm-up: do the nodes serve its resources?")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pods", type=int, default=4_000, help="pods that hold, and pods that want, a GPU")
    add("--serving", type=int, default=200, help="nodes for the pods that arrive")
    add("--rate", type=float, default=60.0, help="pods that arrive in a second")
    add("--seconds", type=float, default=15.0, help="of each window")
    add("--windows", type=int, default=6, help="of each kind")
    options = parser.parse_args()
    os.environ |= NO_LIMITS
    with tempfile.TemporaryDirectory(prefix="lh-reclaim-") as folder:
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
