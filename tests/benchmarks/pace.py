"""Cost and latency of one pod at several rates: `python -m tests.benchmarks.pace --help`.

Watcher, placers, binder, nats-server and valkey-server are processes, as in production. Per rate
the benchmark prints, per pod: CPU, wake-ups and read and write calls of each process, above those
at rest, NATS messages, functions run in Redis and API calls; and p50, p99 and maximum of the
latency.
Latency runs from the watch event of a pod to its binding.

With --together, watcher, placer and binder are one process (services.scheduler).

The API server is a trivial one in this process, which replies at once; for a real one, and for
other schedulers, there is `scenarios`.
"""

import argparse
import asyncio
import contextlib
import json
import re
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from urllib.request import urlopen

from services.binder.ledger_sync.rebuild import RebuildTiming
from tests.benchmarks.processes import difference, process_counters, served, servers, services
from tests.benchmarks.trivial_apiserver import TrivialApi
from tests.support.waiting import until

BATCH_S = 0.001
CALLS_AT_REST = 50
"""Per second; more run while nodes are being saved."""


async def at_rate(source, per_s, seconds):
    """Create pods at a steady rate; return latencies in ms, and how many were never bound."""
    run = uuid.uuid4().hex[:6]
    sent = {}
    total = max(1, int(per_s * seconds))
    began_at = time.perf_counter()
    while len(sent) < total:
        due = min(total, int((time.perf_counter() - began_at) * per_s) + 1)
        if numbers := range(len(sent), due):
            now = time.perf_counter()
            sent |= {f"p-{run}-{number}": now for number in numbers}
            await source.create_pods(run, numbers)
        await asyncio.sleep(BATCH_S)
    with contextlib.suppress(AssertionError):
        await until(lambda: sent.keys() <= source.bound.keys(), limit_s=30)
    delays_ms = [(source.bound[name] - t) * 1e3 for name, t in sent.items() if name in source.bound]
    return delays_ms, total - len(delays_ms)


async def measure(source, options, read):
    """Measure and print every rate, above the use at rest."""
    before = await read()
    await asyncio.sleep(options.rest)
    rest = subtract(await read(), before)
    print(json.dumps({"at rest, per second": scaled(rest, 1 / options.rest)}, indent=1))
    for rate in options.rates:
        before = await read()
        began_at = time.perf_counter()
        calls = source.calls()
        latencies, missing = await at_rate(source, rate, options.seconds)
        factor = (time.perf_counter() - began_at) / options.rest
        above = subtract(subtract(await read(), before), scaled(rest, factor))
        pods = max(1, len(latencies))
        cpu_ms = sum(counters.get("cpu_ms", 0) for counters in above.values())
        row = {"pods per second": rate, "pods": pods, "missing": missing}
        row |= {f"p{share * 100:.0f} ms": quantile(latencies, share) for share in (0.5, 0.99)}
        row |= {
            "max ms": round(max(latencies, default=0.0), 1),
            "CPU ms per pod": round(cpu_ms / pods, 2),
            "API calls per pod": round((source.calls() - calls) / pods, 2),
            "per pod": scaled(above, 1 / pods),
        }
        print(json.dumps(row, indent=1), flush=True)


async def burst(source, count, read, directory):
    """Create `count` pods at once; print pods per second and microseconds of CPU per pod."""
    run = uuid.uuid4().hex[:6]
    before = await read()
    began_at = time.perf_counter()
    await source.create_pods(run, range(count))
    names = {f"p-{run}-{n}" for n in range(count)}
    with contextlib.suppress(AssertionError):
        await until(lambda: names <= source.bound.keys(), limit_s=120)
    used = subtract(await read(), before)
    bound = names & source.bound.keys()
    lasted_s = max((source.bound[name] for name in bound), default=began_at) - began_at
    row = {
        "burst": count,
        "missing": count - len(bound),
        "pods per second": round(len(bound) / max(lasted_s, 1e-9)),
        "CPU us per pod": {n: round(c.get("cpu_ms", 0) * 1e3 / count) for n, c in used.items()},
        "placements since the start": counted(
            directory, r'placements_total{outcome="(\w+)"} (\S+)'
        ),
        "resent since the start": counted(
            directory, r'resent_messages_total{.*subject="([\w.]+)"} (\S+)'
        ),
    }
    print(json.dumps(row, indent=1), flush=True)


def counted(directory, pattern):
    """Sum up a counter of all services: `pattern` has a group for its label and one for its value.

    Of the placements, `reserved` is the first candidate.
    """
    counts = Counter()
    for file in directory.glob("*.json"):
        with urlopen(f"http://{json.loads(file.read_text())['http']}/metrics") as reply:
            for outcome, count in re.findall(pattern, reply.read().decode()):
                counts[outcome] += int(float(count))
    return {outcome: count for outcome, count in counts.items() if count}


def subtract(after, before):
    return {name: difference(after[name], before[name]) for name in after}


def scaled(readings, factor):
    return {
        name: {key: round(value * factor, 3) for key, value in counters.items()}
        for name, counters in readings.items()
    }


def quantile(values, share):
    index = min(len(values) - 1, int(len(values) * share))
    return round(sorted(values)[index], 1) if values else 0.0


@contextlib.asynccontextmanager
async def running(options, directory):
    """Start all processes; yield the source of pods and what reads their counters."""
    async with contextlib.AsyncExitStack() as stack:
        source = TrivialApi(nodes=options.nodes)
        kubeconfig = await stack.enter_async_context(served(source, directory))
        up = await stack.enter_async_context(servers())
        how = {"placers": options.placers, "together": options.together}
        started = services(kubeconfig, up, directory, **how)
        pids = up.pids | await stack.enter_async_context(started)

        async def read():
            readings = {name: process_counters(pid) for name, pid in pids.items()}
            traffic = await up.traffic()
            messages = {key: traffic[key] for key in ("messages in", "messages out")}
            readings["nats-server"] |= messages
            readings["valkey-server"] |= {"functions": (await up.functions())["functions"]}
            return readings

        yield source, read


async def benchmark(options):
    with tempfile.TemporaryDirectory(prefix="lh-pace-") as folder:
        async with running(options, Path(folder)) as (source, read):
            await warm_up(source)
            await settle(read)
            await measure(source, options, read)
            if options.burst:
                await burst(source, options.burst, read, Path(folder))


async def warm_up(source):
    """Create single pods until one is bound: every node and device is known by then."""
    for _ in range(60):
        _, missing = await at_rate(source, 20, 0.5)
        if not missing:
            return
    raise SystemExit("no pod was bound within the warm-up: do the nodes serve its resources?")


async def settle(read):
    """Wait until all nodes are saved: the functions run per second are down to those at rest.

    And until the new ledger has been compared with the API server once more.
    """
    await asyncio.sleep(RebuildTiming().compare_again_s)
    for _ in range(120):
        before = await read()
        await asyncio.sleep(1)
        used = subtract(await read(), before)
        if used.get("valkey-server", {}).get("functions", 0) < CALLS_AT_REST:
            return
    raise SystemExit("the ledger is not at rest after 120 s: is something else using it?")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", type=int, default=500, help="nodes of 8 devices (default 500)")
    add("--rates", type=float, nargs="+", default=[1, 10, 60, 300, 1000])
    add("--seconds", type=float, default=10.0, help="per rate (default 10)")
    add("--rest", type=float, default=10.0, help="seconds measured without pods")
    add("--placers", type=int, default=1)
    add("--burst", type=int, default=0, help="at the end, this many pods at once")
    add("--together", action="store_true", help="watcher, placer and binder in one process")
    asyncio.run(benchmark(parser.parse_args()))


if __name__ == "__main__":
    main()
