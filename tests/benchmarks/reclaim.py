"""What arriving pods notice of preemption: `python -m tests.benchmarks.reclaim --help`.

Every service is a process of its own on a real nats-server and valkey-server; the API server is
this process and replies at once. Nodes of the pool `train` are filled with pods that hold a whole
GPU each; as many pods of a higher priority wait for the same GPUs. Small pods for the pool `serve`
arrive at a steady rate. Windows of three kinds alternate in one run on the same machine, whatever
else runs there:

- calm: nothing is evicted;
- planned: the planner and the binder reclaim GPUs;
- by hand: as many pods a second as in the planned window before are evicted by a plain client,
  while the planner is stopped (SIGSTOP). The ends of these pods, and the starts of those that get
  their GPUs, cost about the same as when they are planned.

With `--single`, GPUs are reclaimed one after the other instead, and nothing else arrives: each time
a pod of higher priority is created, without notice. Printed is the time from its watch event to its
Binding, and until when each step was done: the placer refuses the pod and the planner makes a plan
(`planned`, which ends with the binder's dry run), the binder evicts a pod (`evicted`), this pod
ends, and its GPU is handed over (`bound`).

Each row is one window; at the end follow all windows of each kind. Latency runs from the watch
event of a pod to its binding. CPU is that of each process, and of this one, the API server.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from shared.ledger.leases import RedisLeases
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
BUSY_SHARE = 0.15
"""Of a core, that a process wants which has work left."""


class ReclaimApi(TrivialApi):
    """Pods have a pool, and end as soon as they are evicted."""

    def __init__(self, trained, nodes):
        super().__init__(nodes)
        self.trained = trained
        self.evicted = set()
        self.steps = {}
        """When the steps of the last reclaim were taken."""

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
        is_dry = b"dryRun" in body
        self.steps.setdefault("planned" if is_dry else "evicted", time.perf_counter())
        if is_dry or name in self.evicted or name not in self.pods:
            return
        self.evicted.add(name)
        self.write_status(name, {"phase": "Succeeded"})

    def explain(self, name, body):
        """Show why a pod waits: pods without a reason are published again and again."""
        if name in self.pods and name not in self.bound:
            self.write_status(name, json.loads(body)["status"])

    def write_status(self, name, fields):
        self.version += 1
        event = json.loads(self.pods[name])
        event["type"] = "MODIFIED"
        event["object"]["metadata"]["resourceVersion"] = str(self.version)
        event["object"]["status"] |= fields
        self.pods[name] = json.dumps(event).encode() + b"\n"
        self.send(self.pods[name])

    def write(self, path, body):
        *_, name, subresource = path.split("/")
        if subresource == "eviction":
            self.evict(name, body)
        elif subresource == "status":
            self.explain(name, body)


async def create_all(api, run, count, priority):
    names = []
    began = time.perf_counter()
    while len(names) < count:
        due = min(count, int((time.perf_counter() - began) * CREATED_PER_S) + 1)
        names += [api.create_whole(run, number, priority) for number in range(len(names), due)]
        await asyncio.sleep(0.005)
    return names


async def activate_all(redis_url):
    """Make all leases active, as node agents do once containers have started."""
    async with RedisLeases.connect(redis_url) as ledger:
        async for page in ledger.load_all():
            await ledger.activate([(lease.pod, lease.node) for lease in page])


@contextlib.asynccontextmanager
async def planned(api, pid, evicted_before):
    """Let the planner work; enter once the first pod has been evicted."""
    os.kill(pid, signal.SIGCONT)
    try:
        await until(lambda: len(api.evicted) > evicted_before, limit_s=300)
        yield
    finally:
        os.kill(pid, signal.SIGSTOP)


@contextlib.asynccontextmanager
async def by_hand(api, held, port, per_s):
    """Evict the pods of `held` that are left, one after the other, over one connection."""
    evicting = asyncio.create_task(evict_at_rate(api, held, port, per_s))
    try:
        yield
    finally:
        evicting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await evicting


async def evict_at_rate(api, held, port, per_s):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    done = 0
    for name in held:
        if name in api.evicted:
            continue
        await asyncio.sleep(max(0.0, began + done / per_s - time.perf_counter()))
        path = f"/api/v1/namespaces/bench/pods/{name}/eviction"
        writer.write(f"POST {path} HTTP/1.1\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        await reader.readuntil(b"\r\n\r\n{}")
        done += 1
    writer.close()


async def window(kind, api, pids, options, *, during):
    """Let pods arrive for some seconds; return their latencies, and the evictions a second."""
    evicted = len(api.evicted)
    async with during:
        before = cpu_ms(pids)
        began = time.perf_counter()
        latencies, missing = await at_rate(api, options.rate, options.seconds)
        lasted_s = time.perf_counter() - began
        used = difference(cpu_ms(pids), before)
        evicted = len(api.evicted) - evicted
    row = {
        "window": kind,
        "evicted": evicted,
        "missing": missing,
        **{f"p{share * 100:g} ms": quantile(latencies, share) for share in (0.5, 0.99)},
        "max ms": round(max(latencies, default=0.0), 1),
        "CPU ms": {name: round(ms) for name, ms in used.items()},
    }
    print(json.dumps(row), flush=True)
    await calm(pids)
    return latencies, evicted / lasted_s


async def calm(pids):
    """Wait until plans are carried out, and all pods that wait are decided on again."""
    while True:
        before = wanted_ms(pids)
        await asyncio.sleep(CALM_S)
        wanted = difference(wanted_ms(pids), before)
        if max(wanted.values()) < BUSY_SHARE * CALM_S * 1e3:
            return


def wanted_ms(pids):
    """Return the CPU of processes in ms, with the time for which they waited for a core."""
    return {
        name: sum(map(cpu_and_delay_ms, Path(f"/proc/{pid}/task").iterdir()))
        for name, pid in pids.items()
    }


def cpu_and_delay_ms(task):
    with contextlib.suppress(FileNotFoundError):  # the thread has ended
        running, waiting, _ = (task / "schedstat").read_text().split()
        return (int(running) + int(waiting)) / 1e6
    return 0.0


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
        await activate_all(up.valkey.url)
        if options.single:
            await single(api, options.single, pids)
            return
        os.kill(pids["planner"], signal.SIGSTOP)
        try:
            urgent = await create_all(api, "urgent", options.pods, URGENT_PRIORITY)
            watched = pids | up.pids | {"API server": os.getpid()}
            await calm(watched)
            port = int(kubeconfig.read_text().partition("127.0.0.1:")[2].partition('"')[0])
            await windows(api, watched, held, port, options)
        finally:
            os.kill(pids["planner"], signal.SIGCONT)
        reclaimed = {
            "evicted": len(api.evicted),
            "bound in their place": len(api.bound.keys() & {*urgent}),
        }
        print(json.dumps(reclaimed), flush=True)


async def single(api, count, pids):
    """Reclaim GPUs one after the other; print how long each took, and the CPU of a reclaim.

    CPU is with that of the seconds between two reclaims, in which nothing else is to do.
    """
    delays_ms = []
    before = cpu_ms(pids)
    for number in range(count):
        await asyncio.sleep(random.uniform(3, 4))  # noqa: S311 - whatever their periods are
        api.steps.clear()
        began = time.perf_counter()
        name = api.create_whole("single", number, URGENT_PRIORITY)
        await until(lambda name=name: name in api.bound, limit_s=60)
        steps = api.steps | {"bound": api.bound[name]}
        steps_ms = {step: round((at - began) * 1e3, 1) for step, at in steps.items()}
        print(json.dumps({"reclaimed": number, "after ms": steps_ms}), flush=True)
        delays_ms.append(steps_ms["bound"])
    row = {"reclaimed one by one": count}
    row |= {f"p{share * 100:g} ms": quantile(delays_ms, share) for share in (0.5, 0.9)}
    print(json.dumps(row | {"max ms": max(delays_ms), "all ms": delays_ms}), flush=True)
    used = {name: round(ms / count) for name, ms in difference(cpu_ms(pids), before).items()}
    print(json.dumps({"CPU ms of a reclaim": used}), flush=True)


async def windows(api, pids, held, port, options):
    measured = defaultdict(list)

    async def measure(kind, during):
        latencies, per_s = await window(kind, api, pids, options, during=during)
        measured[kind] += latencies
        return per_s

    for _ in range(options.windows):
        if len(api.evicted) >= options.pods:
            break
        await measure("calm", contextlib.nullcontext())
        per_s = await measure("planned", planned(api, pids["planner"], len(api.evicted)))
        await measure("by hand", by_hand(api, held, port, max(1.0, per_s)))
    for kind, latencies in measured.items():
        row = {"all windows": kind, "pods": len(latencies)}
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
    add("--single", type=int, default=0, help="GPUs that are reclaimed one by one, instead")
    options = parser.parse_args()
    os.environ |= NO_LIMITS
    with tempfile.TemporaryDirectory(prefix="lh-reclaim-") as folder:
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
