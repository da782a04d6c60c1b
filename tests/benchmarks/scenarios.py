"""One scheduler on a real API server: `python -m tests.benchmarks.scenarios --help`.

Works on any cluster, with any scheduler of `systems`: it creates nodes without kubelets and pods
that request GPUs, measures from outside, and deletes them again. Latency runs from before the
request that creates a pod until a watch shows its node. CPU is that of the processes named with
--process. Each scenario prints its row at once; at the end follows a table of all runs that
--results has kept, with the versions, the load of the machine and a yardstick of its processor.

    rate       pods with a share of a GPU at a steady rate
    burst      the same, all at once, and until each has its Event
    whole      pods of one GPU, as many as there are GPUs, at once
    refused    on that full cluster: until a pod that fits nowhere has the condition with the reason
    freed      on it, if every GPU has a pod: a pod ends: until one that waits for its GPU is bound
    reclaim    a pod of higher priority comes, then as many as GPUs: until they are bound
    reclaim_gang  on a full cluster: 512 pods of higher priority that start together
    gang       512 pods of one GPU that start together
    returned   a node is deleted with its pods and comes back: until its GPUs are used again
    churn      a minute of pods that come and end, with --kill twice: what is wrong then
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import time
import timeit
from pathlib import Path

from shared.model.errors import LeaseholdError
from tests.benchmarks.measured import columns_table
from tests.benchmarks.pace import quantile
from tests.benchmarks.processes import cpu_ms
from tests.benchmarks.real_apiserver import RealApi
from tests.benchmarks.systems import GPU_MIB, SYSTEMS
from tests.support.waiting import until

GPUS = 8
SHARE = 0.1
FREED = "a pod ends, a waiting one is bound"
STUCK_S = 30
MOST_IN_CHURN = 100
ALLOCATED = re.compile(r"([^,:;\[\]]+),[^,:;]*,(\d+),(\d+)")


class Run:
    """What the scenarios share."""

    def __init__(self, api, options):
        self.api = api
        self.options = options
        self.pids = dict(options.process)
        self.gpus = options.nodes * GPUS
        self.number = 0
        self.rows = {}

    def names(self, count):
        """Return new names of pods."""
        first, self.number = self.number, self.number + count
        return [f"p-{number}" for number in range(first, self.number)]

    def row(self, name, text):
        self.rows[name] = text
        print(f"{name}: {text}", flush=True)

    async def bound(self, names, limit_s=None):
        """Wait until all pods are bound; return how many are."""
        return len(await self.api.wait_bound(names, limit_s or self.options.limit))

    async def measure(self, creating, count):
        """Create pods and wait for them; return their latencies, and text: missing, CPU per pod."""
        before = cpu_ms(self.pids)
        sent = await creating
        missing = count - await self.bound(sent)
        used = sum(cpu_ms(self.pids).values()) - sum(before.values())
        text = f", CPU {used / count:.1f} ms a pod" if self.pids else ""
        text += f", {missing} not bound" if missing else ""
        bound_at = {name: at for name, at in self.api.bound.items() if name in sent}
        return {name: at - sent[name] for name, at in bound_at.items()}, text

    async def at_once(self, name, count, gpus, more=None):
        """Measure pods that come at once; return their names.

        The time until the last is bound includes that for their creation, which is also shown.
        """
        names = self.names(count)
        began = time.perf_counter()
        created_s = 0.0

        async def create():
            nonlocal created_s
            sent = await self.api.create_pods(names, gpus, more)
            created_s = time.perf_counter() - began
            return sent

        delays, text = await self.measure(create(), count)
        lasted = max((self.api.bound[name] for name in delays), default=began) - began
        rate = len(delays) / max(lasted, 1e-9)
        self.row(name, f"{lasted:.2f} s (created: {created_s:.2f} s), {rate:.0f} pods/s{text}")
        return names


async def rate(run):
    for per_s in run.options.rates:
        count = int(per_s * run.options.seconds)
        names = run.names(count)

        async def create(names=names, per_s=per_s):
            began = time.perf_counter()
            sent = {}
            while len(sent) < len(names):
                due = min(len(names), int((time.perf_counter() - began) * per_s) + 1)
                sent |= await run.api.create_pods(names[len(sent) : due], SHARE)
                await asyncio.sleep(0.001)
            return sent

        delays, text = await run.measure(create(), count)
        ms = [1e3 * delay_s for delay_s in delays.values()]
        p50 = quantile(ms, 0.5)
        p99 = quantile(ms, 0.99)
        run.row(f"{per_s:g} pods/s: p50 / p99", f"{p50:g} / {p99:g} ms{text}")
        await run.api.delete(names)


async def burst(run):
    for count in run.options.bursts:
        names = await run.at_once(f"{count} shares at once", count, SHARE)
        bound = set(names) & run.api.bound.keys()
        last = max((run.api.bound[name] for name in bound), default=time.perf_counter())
        with contextlib.suppress(AssertionError):
            await until(lambda: run.api.events("Scheduled"), bound.issubset, limit_s=60)
        after_s = time.perf_counter() - last
        told = bound & await run.api.events("Scheduled")
        text = f"{len(told)} of {len(bound)}, {after_s:.1f} s after the last was bound"
        run.row(f"Events of {count} at once", text)
        await run.api.delete(names)


async def whole(run):
    """Fill the cluster; return the pods that have its GPUs."""
    if not run.api.live():
        await run.at_once(f"{run.gpus} whole GPUs at once", run.gpus, 1)
    return [name for name in run.api.live() if name in run.api.bound]


async def refused(run):
    await whole(run)
    ms = []
    for name in run.names(run.options.samples):
        sent = await run.api.create_pods([name], GPUS + 1)
        with contextlib.suppress(AssertionError):
            await until(lambda name=name: name in run.api.refused, limit_s=30)
            ms.append(1e3 * (run.api.refused[name] - sent[name]))
        await run.api.delete([name])
    run.row("a pod that fits nowhere says so", spread(ms, run.options.samples))


async def freed(run):
    ms = []
    holders = await whole(run)
    if len(holders) < run.gpus:
        run.row(FREED, f"not measured: {run.gpus - len(holders)} GPUs have no pod")
        return
    for name in run.names(min(run.options.samples, len(holders))):
        await run.api.create_pods([name], 1)
        with contextlib.suppress(AssertionError):
            await until(lambda name=name: name in run.api.refused, limit_s=30)
        await asyncio.sleep(random.uniform(1, 2))  # noqa: S311 - whatever its periods are
        began = await run.api.finish(holders.pop())
        if await run.bound([name], 30):
            ms.append(1e3 * (run.api.bound[name] - began))
    run.row(FREED, spread(ms, run.options.samples))


async def reclaim(run):
    if len(await whole(run)) < run.gpus:
        return
    for count in (1, run.gpus - 1):
        more = {"spec": {"priorityClassName": "scenarios"}}
        names = await run.at_once(f"reclaim of {count} GPUs", count, 1, more)
        if not run.api.bound.keys() & set(names):
            return


async def reclaim_gang(run):
    await run.api.delete(run.api.live())
    of_system = run.api.system.gang
    if of_system and len(await whole(run)) == run.gpus:
        size = min(512, run.gpus)
        objects, labels = of_system(run.api.namespace, "urgent", size, "scenarios")
        for path, made in objects:
            await run.api.kube.create(path, made)
        more = {"metadata": labels, "spec": {"priorityClassName": "scenarios"}}
        await run.at_once(f"reclaim of {size} GPUs for a gang of {size}", size, 1, more)


async def gang(run):
    await run.api.delete(run.api.live())
    size = min(512, run.gpus)
    of_system = run.api.system.gang
    if of_system:
        objects, more = of_system(run.api.namespace, "gang", size, "")
        for path, made in objects:
            await run.api.kube.create(path, made)
        await run.at_once(f"a gang of {size}", size, 1, {"metadata": more})
        await run.api.delete(run.api.live())


async def returned(run):
    [node] = await run.api.create_nodes(1, GPUS)
    here = {"spec": {"nodeSelector": {"kubernetes.io/hostname": node}}}
    names = run.names(GPUS)
    await run.api.create_pods(names, 1, here)
    await run.bound(names)
    await run.api.delete_nodes([node])
    await run.api.delete(names)
    if await run.api.create_nodes(1, GPUS) != [node]:
        raise AssertionError("the node has another name now")
    names = await run.at_once(f"a node comes back: {GPUS} GPUs of it", GPUS, 1, here)
    await run.api.delete(names)
    await run.api.delete_nodes([node])


async def churn(run):
    kills = 0
    began = time.perf_counter()
    wrong = set()
    bare = set()
    waiting = {}
    while (now := time.perf_counter() - began) < run.options.churn:
        if run.options.kill and 3 * now > (kills + 1) * run.options.churn:
            kills += 1
            await (await asyncio.create_subprocess_shell(run.options.kill)).wait()
        sent = await run.api.create_pods(run.names(4), random.choice([SHARE, 1, 2]))  # noqa: S311
        waiting |= sent
        bound = [name for name in run.api.live() if name in run.api.bound]
        for name in random.sample(bound, max(0, len(bound) - min(run.gpus // 3, MOST_IN_CHURN))):
            await run.api.finish(name)
        over, without = judge(run.api)
        wrong |= over
        bare |= without
        await asyncio.sleep(0.2)
    await run.bound(waiting, STUCK_S)
    over, without = judge(run.api)
    stuck = waiting.keys() - run.api.bound.keys()
    run.row(
        f"{run.options.churn:g} s of churn, {kills} kills",
        f"{len(waiting)} pods; beyond their size: {len(wrong | over)}; bound without a GPU: "
        f"{len(bare | without)}; stuck: {len(stuck)}",
    )


def judge(api):
    """Return GPUs, or nodes, that hold more than they have, and bound pods without a GPU."""
    used = collections.Counter()
    bare = set()
    key = api.system.allocated
    for name in api.live() & api.bound.keys():
        pod = api.pods[name]
        used[pod["spec"]["nodeName"], "GPUs"] += float(pod["metadata"]["labels"]["gpus"])
        given = ALLOCATED.findall(pod["metadata"].get("annotations", {}).get(key, ""))
        if key and not given:
            bare.add(name)
        for uuid, mib, percent in given:
            used[uuid, "MiB"] += int(mib)
            used[uuid, "%"] += int(percent)
    most = {"MiB": GPU_MIB, "%": 100, "GPUs": GPUS + 1e-6}
    return {place for (place, unit), amount in used.items() if amount > most[unit]}, bare


def spread(ms, count):
    text = f"p50 {quantile(ms, 0.5):g}, at most {max(ms, default=0):.0f} ms"
    return text if len(ms) == count else f"{text}, {count - len(ms)} of {count} never"


SCENARIOS = (rate, burst, whole, refused, freed, reclaim, reclaim_gang, gang, returned, churn)


async def benchmark(options):
    system = SYSTEMS[options.scheduler]
    took = min(timeit.repeat("sum(range(1000))", number=2000)) / 2000
    async with RealApi.connect(options.kubeconfig, system) as api:
        run = Run(api, options)
        version = json.loads(await api.kube.read("/version"))["gitVersion"]
        run.row("cluster", f"{version}, {options.nodes} nodes of {GPUS} GPUs")
        run.row("date, cores, load", f"{time.strftime('%F')}, {os.cpu_count()}, {load()}")
        run.row("sum(range(1000))", f"{took * 1e6:.0f} µs")
        await api.create_nodes(options.nodes, GPUS)
        [first] = run.names(1)
        await api.create_pods([first], SHARE)
        if not await run.bound([first]):
            raise SystemExit(f"{system.scheduler} bound no pod: does it run, and see the nodes?")
        await asyncio.sleep(options.settle)
        await api.delete([first])
        for scenario in SCENARIOS:
            if scenario.__name__ in options.only:
                try:
                    await scenario(run)
                except (AssertionError, LeaseholdError) as error:
                    run.row(scenario.__name__, f"given up: {error}")
        run.row("load at the end", load())
    keep(options, run.rows)


def named_pid(text):
    name, _, pid = text.partition("=")
    return name, int(pid)


def load():
    return f"{os.getloadavg()[0]:.1f}"


def keep(options, rows):
    """Add this run to the results, and print all of them as a table."""
    file = options.results
    results = json.loads(file.read_text()) if file and file.exists() else {}
    results[options.label or options.scheduler] = rows
    if file:
        file.write_text(json.dumps(results, indent=1))
    print(f"\n{columns_table(results)}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kubeconfig", type=Path, required=True)
    add("--scheduler", choices=SYSTEMS, required=True)
    text = "a process of the scheduler on this machine whose CPU counts; may be repeated"
    add("--process", type=named_pid, action="append", default=[], metavar="NAME=PID", help=text)
    names = [scenario.__name__ for scenario in SCENARIOS]
    add("--only", nargs="+", choices=names, default=names, help="default: all, in this order")
    add("--nodes", type=int, default=500, help="nodes of 8 GPUs (default 500)")
    add("--rates", type=float, nargs="+", default=[20, 60], help="pods per second (default 20 60)")
    add("--seconds", type=float, default=20, help="per rate (default 20)")
    add("--bursts", type=int, nargs="+", default=[600, 3000], help="pods (default 600 3000)")
    add("--samples", type=int, default=20, help="pods of `refused` and `freed` (default 20)")
    add("--churn", type=float, default=60, help="seconds (default 60)")
    add("--kill", help="a command that kills the scheduler, for `churn`; something restarts it")
    add("--settle", type=float, default=12, help="seconds after the first pod (default 12)")
    text = "seconds that pods have until they count as not bound (default 120)"
    add("--limit", type=float, default=120, help=text)
    add("--label", help="heading of the table's column (default: the scheduler)")
    add("--results", type=Path, help="a file that keeps the rows of all runs")
    try:
        asyncio.run(benchmark(parser.parse_args()))
    except* LeaseholdError as failed:
        raise SystemExit(f"given up: {failed.exceptions[0]}") from None


if __name__ == "__main__":
    main()
