"""Cost and latency of one pod at several rates: `python -m tests.benchmarks.pace --help`.

Watcher, placers, binder, nats-server and valkey-server are processes, as in production. Per rate
the benchmark prints, per pod: CPU, wake-ups and read and write calls of each process, above those
at rest, NATS messages, Redis script calls and API calls; and p50, p99 and maximum of the latency.
Latency runs from the watch event of a pod (on a real API server: from its creation) to its binding
(on a real one: to the watch event with its node).

With --together, watcher, placer and binder are one process (services.scheduler).
With --bare, three processes exchange only what a pod needs: what the libraries cost.

The API server is a trivial one in this process, which replies at once, or the one of --kubeconfig,
on which nodes and pods are created and deleted again. There --scheduler measures another scheduler,
whose process is named by --process.
"""

import argparse
import asyncio
import contextlib
import json
import re
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.request import urlopen

import redis.asyncio

from services.binder.ledger_sync.rebuild import RebuildTiming
from tests.benchmarks.bare_services import bare_services
from tests.benchmarks.process_counters import (
    Counters,
    difference,
    nats_counters,
    process_counters,
    redis_counters,
)
from tests.benchmarks.real_apiserver import RealApi
from tests.benchmarks.service_processes import KUBECONFIG, services
from tests.benchmarks.trivial_apiserver import Connection, TrivialApi
from tests.support.servers.nats import NatsServer, free_port
from tests.support.servers.valkey import valkey_server
from tests.support.waiting import until

BATCH_S = 0.001
SCRIPTS_AT_REST = 50
"""Per second; more run while nodes are being saved."""
Readings = dict[str, Counters]


class PodSource(Protocol):
    """An API server on which pods appear and are bound; times are of `time.perf_counter`."""

    bound: dict[str, float]

    async def create_pods(self, run: str, numbers: range) -> None:
        """Create the pods `p-RUN-NUMBER`."""
        ...

    def calls(self) -> int:
        """Return how many requests the services sent."""
        ...


class TrivialSource:
    """The trivial API server: pods are lines of its watch."""

    def __init__(self, api: TrivialApi) -> None:
        self.api = api
        self.bound = api.bound

    async def create_pods(self, run: str, numbers: range) -> None:
        """Write the pods' watch events at once."""
        assert self.api.watcher is not None
        self.api.watcher.feed(b"".join(self.api.create(n, run) for n in numbers))

    def calls(self) -> int:
        """Bindings, Events, conditions."""
        return self.api.posts + len(self.api.bound)


async def at_rate(source: PodSource, per_s: float, seconds: float) -> tuple[list[float], int]:
    """Create pods at a steady rate; return latencies in ms, and how many were never bound."""
    run = uuid.uuid4().hex[:6]
    sent: dict[str, float] = {}
    total, began_at = max(1, int(per_s * seconds)), time.perf_counter()
    while len(sent) < total:
        due = min(total, int((time.perf_counter() - began_at) * per_s) + 1)
        if numbers := range(len(sent), due):
            now = time.perf_counter()
            sent |= {f"p-{run}-{number}": now for number in numbers}
            await source.create_pods(run, numbers)
        await asyncio.sleep(BATCH_S)
    with contextlib.suppress(AssertionError):
        await until(lambda: sent.keys() <= source.bound.keys(), limit_s=30)
    found = [(source.bound[name] - t) * 1e3 for name, t in sent.items() if name in source.bound]
    return found, total - len(found)


async def measure(
    source: PodSource, options: argparse.Namespace, read: Callable[[], Awaitable[Readings]]
) -> None:
    """Measure and print every rate, above the use at rest."""
    before = await read()
    await asyncio.sleep(options.rest)
    rest = subtract(await read(), before)
    print(json.dumps({"at rest, per second": scaled(rest, 1 / options.rest)}, indent=1))
    for rate in options.rates:
        before, began_at, calls = await read(), time.perf_counter(), source.calls()
        latencies, missing = await at_rate(source, rate, options.seconds)
        factor = (time.perf_counter() - began_at) / options.rest
        used = subtract(await read(), before)
        above = {name: difference(used[name], scaled(rest, factor)[name]) for name in used}
        pods = max(1, len(latencies))
        cpu_ms = sum(counters.get("cpu_ms", 0) for counters in above.values())
        row = {
            "pods per second": rate,
            "pods": pods,
            "missing": missing,
            "p50 ms": round(quantile(latencies, 0.5), 1),
            "p99 ms": round(quantile(latencies, 0.99), 1),
            "max ms": round(max(latencies, default=0.0), 1),
            "CPU ms per pod": round(cpu_ms / pods, 2),
            "API calls per pod": round((source.calls() - calls) / pods, 2),
            "per pod": scaled(above, 1 / pods),
        }
        print(json.dumps(row, indent=1), flush=True)


async def burst(
    source: PodSource, count: int, read: Callable[[], Awaitable[Readings]], directory: Path
) -> None:
    """Create `count` pods at once; print pods per second and microseconds of CPU per pod."""
    run, before, began_at = uuid.uuid4().hex[:6], await read(), time.perf_counter()
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
        "placements since the start": outcomes(
            directory, r'placements_total{outcome="(\w+)"} (\S+)'
        ),
        "resent since the start": outcomes(
            directory, r'resent_messages_total{.*subject="([\w.]+)"} (\S+)'
        ),
    }
    print(json.dumps(row, indent=1), flush=True)


def outcomes(directory: Path, pattern: str) -> dict[str, int]:
    """Sum up a counter of all services: `pattern` has a group for its label and one for its value.

    Of the placements, `reserved` is the first candidate.
    """
    counts: Counter[str] = Counter()
    for file in directory.glob("*.json"):
        address = json.loads(file.read_text())["http"]
        with urlopen(f"http://{address}/metrics") as reply:
            text = reply.read().decode()
        for outcome, count in re.findall(pattern, text):
            counts[outcome] += int(float(count))
    return {outcome: count for outcome, count in counts.items() if count}


def subtract(after: Readings, before: Readings) -> Readings:
    return {name: difference(after[name], before[name]) for name in after}


def scaled(readings: Readings, factor: float) -> Readings:
    return {
        name: {key: round(value * factor, 3) for key, value in counters.items()}
        for name, counters in readings.items()
    }


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def steps(directory: Path) -> dict[str, dict[str, float]]:
    """Return for each kind of span when it begins after the pod's first, and how long it lasts."""
    by_trace = defaultdict(list)
    for file in directory.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            span = json.loads(line)
            by_trace[span["trace"]].append(span)
    begins, lasts = defaultdict(list), defaultdict(list)
    for spans in by_trace.values():
        first_ns = min(span["start_ns"] for span in spans)
        for span in spans:
            name = f"{span['service'].removeprefix('leasehold-')}: {span['name']}"
            begins[name].append((span["start_ns"] - first_ns) / 1e6)
            lasts[name].append((span["end_ns"] - span["start_ns"]) / 1e6)
    return {
        name: {
            "begins p50 ms": round(quantile(begins[name], 0.5), 2),
            "lasts p50 ms": round(quantile(lasts[name], 0.5), 2),
            "lasts p99 ms": round(quantile(lasts[name], 0.99), 2),
        }
        for name in sorted(begins, key=lambda name: quantile(begins[name], 0.5))
    }


@contextlib.asynccontextmanager
async def apiserver(options: argparse.Namespace, directory: Path) -> AsyncIterator[Any]:
    """Yield the source of pods and its kubeconfig."""
    if options.kubeconfig:
        async with RealApi.connect(options.kubeconfig, options.nodes, options.scheduler) as real:
            yield real, options.kubeconfig
        return
    api = TrivialApi(nodes=options.nodes)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(api), "127.0.0.1", 0)
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG.format(port=server.sockets[0].getsockname()[1]))
    try:
        yield TrivialSource(api), kubeconfig
    finally:
        server.close()


@contextlib.asynccontextmanager
async def running(options: argparse.Namespace, directory: Path) -> AsyncIterator[Any]:
    """Start all processes; yield the source of pods and what reads their counters."""
    async with contextlib.AsyncExitStack() as stack:
        source, kubeconfig = await stack.enter_async_context(apiserver(options, directory))
        pids = dict(options.process)
        if options.scheduler != "leasehold":
            yield source, reader(pids)
            return
        valkey = stack.enter_context(valkey_server(durable=options.durable))
        await valkey.ready()
        port = free_port()
        nats = NatsServer(more=f"\nhttp: 127.0.0.1:{port}\n")
        await nats.start()
        stack.callback(nats.close)
        client = redis.asyncio.Redis.from_url(valkey.url)
        stack.push_async_callback(client.aclose)
        traces = directory / "traces" if options.steps else None
        if options.bare:
            started = bare_services(kubeconfig, nats.url, valkey.url)
        else:
            started = services(
                kubeconfig,
                nats.url,
                valkey.url,
                options.placers,
                directory,
                traces=traces,
                together=options.together,
            )
        pids |= await stack.enter_async_context(started)
        assert nats.process is not None
        assert valkey.process is not None
        pids |= {"nats-server": nats.process.pid, "valkey-server": valkey.process.pid}
        yield source, reader(pids, port, client)


def reader(
    pids: dict[str, int], nats_port: int = 0, client: "redis.asyncio.Redis | None" = None
) -> Callable[[], Awaitable[Readings]]:
    async def read() -> Readings:
        readings = {name: process_counters(pid) for name, pid in pids.items()}
        if nats_port and client is not None:
            readings["nats-server"] |= await nats_counters(nats_port)
            readings["valkey-server"] |= await redis_counters(client)
        return readings

    return read


async def benchmark(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="lh-pace-") as folder:
        directory = Path(folder)
        async with running(options, directory) as (source, read):
            await warm_up(source)
            if not options.bare:
                await settle(read)
            await measure(source, options, read)
            if options.burst:
                await burst(source, options.burst, read, directory)
        if options.steps:
            print(json.dumps(steps(directory / "traces"), indent=1))


async def warm_up(source: PodSource) -> None:
    """Create single pods until one is bound: every node and device is known by then."""
    for _ in range(60):
        _, missing = await at_rate(source, 20, 0.5)
        if not missing:
            return
    raise SystemExit("no pod was bound within the warm-up: do the nodes serve its resources?")


async def settle(read: Callable[[], Awaitable[Readings]]) -> None:
    """Wait until all nodes are saved: the ledger's script calls are down to those at rest.

    And until the new ledger has been compared with the API server once more.
    """
    await asyncio.sleep(RebuildTiming().compare_again_s)
    for _ in range(120):
        before = await read()
        await asyncio.sleep(1)
        used = subtract(await read(), before)
        if used.get("valkey-server", {}).get("scripts", 0) < SCRIPTS_AT_REST:
            return
    raise SystemExit("the ledger is not at rest after 120 s: is something else using it?")


def named_pid(text: str) -> tuple[str, int]:
    name, _, pid = text.partition("=")
    return name, int(pid)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=500, help="nodes of 8 devices (default 500)")
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 10, 60, 300, 1000])
    parser.add_argument("--seconds", type=float, default=10.0, help="per rate (default 10)")
    parser.add_argument("--rest", type=float, default=10.0, help="seconds measured without pods")
    parser.add_argument("--placers", type=int, default=1)
    parser.add_argument("--durable", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--burst", type=int, default=0, help="at the end, this many pods at once")
    parser.add_argument(
        "--bare", action="store_true", help="what the libraries cost, without the services"
    )
    parser.add_argument(
        "--together", action="store_true", help="watcher, placer and binder in one process"
    )
    parser.add_argument("--steps", action="store_true", help="record spans; print latency by step")
    parser.add_argument("--kubeconfig", type=Path, help="a real API server")
    parser.add_argument("--scheduler", default="leasehold", help="schedulerName of the pods")
    parser.add_argument(
        "--process", type=named_pid, action="append", default=[], metavar="NAME=PID"
    )
    asyncio.run(benchmark(parser.parse_args()))


if __name__ == "__main__":
    main()
