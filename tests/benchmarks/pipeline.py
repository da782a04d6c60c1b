"""The whole pipeline against a trivial API server: `python -m tests.benchmarks.pipeline --help`.

Every service is a process of its own, as in production, on a real nats-server and valkey-server;
the API server is this process and does nothing. A pod's latency runs from the moment its watch
event is written to the socket to the moment its binding has arrived. Throughput is a burst of pods
written at once, divided by the time until the last binding.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from tests.benchmarks.trivial_apiserver import Connection, TrivialApi
from tests.support.servers.nats import nats_server
from tests.support.servers.tls import Made
from tests.support.servers.valkey import valkey_server

KUBECONFIG = """apiVersion: v1
kind: Config
current-context: bench
clusters: [{{name: bench, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: bench, user: {{token: bench}}}}]
contexts: [{{name: bench, context: {{cluster: bench, user: bench}}}}]
"""


@contextlib.asynccontextmanager
async def services(
    kubeconfig: Path,
    nats_url: str,
    redis_url: str,
    placers: int,
    directory: Path,
    *,
    authority: Path | None = None,
) -> AsyncIterator[dict[str, int]]:
    """Start watcher, placers and binder; yield their pids once all are ready."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    names = ["watcher", "binder", *(f"placer-{n}" for n in range(placers))]
    for name in names:
        command = [sys.executable, "-m", f"services.{name.partition('-')[0]}"]
        command += ["--nats-url", nats_url, "--run-file", str(directory / f"{name}.json")]
        command += ["--log-level", "warning"]
        if authority:
            command += ["--nats-ca-file", str(authority)]
        if name != "watcher":
            command += ["--redis-url", redis_url]
        if not name.startswith("placer"):
            command += ["--kubeconfig", str(kubeconfig)]
        log = (directory / f"{name}.log").open("wb")
        processes[name] = subprocess.Popen(command, stderr=log)
    try:
        async with asyncio.timeout(120):
            while not all((directory / f"{name}.json").exists() for name in names):
                await asyncio.sleep(0.1)
        yield {name: process.pid for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(20)


async def wait_bound(api: TrivialApi, names: list[str], limit_s: float) -> int:
    deadline = time.perf_counter() + limit_s
    while (left := sum(name not in api.bound for name in names)) and time.perf_counter() < deadline:
        await asyncio.sleep(0.02)
    return left


async def at_rate(api: TrivialApi, per_s: int, seconds: float) -> tuple[list[float], int]:
    """Feed pods at a steady rate; return latencies in ms, and how many never came."""
    run = uuid.uuid4().hex[:6]
    sent: dict[str, float] = {}
    total, began = int(per_s * seconds), time.perf_counter()
    while len(sent) < total:
        due = min(total, int((time.perf_counter() - began) * per_s) + 1)
        lines = b""
        for number in range(len(sent), due):
            lines += api.create(number, run)
        now = time.perf_counter()
        sent |= {f"p-{run}-{number}": now for number in range(len(sent), due)}
        if lines and api.watcher is not None:
            api.watcher.feed(lines)
        await asyncio.sleep(0.001)
    missing = await wait_bound(api, list(sent), 30)
    return [(api.bound[n] - t) * 1e3 for n, t in sent.items() if n in api.bound], missing


async def burst(api: TrivialApi, count: int) -> tuple[float, int]:
    """Feed `count` pods at once; return pods per second, and how many never came."""
    run = uuid.uuid4().hex[:6]
    lines = [api.create(n, run) for n in range(count)]
    assert api.watcher is not None
    began = time.perf_counter()
    api.watcher.feed(b"".join(lines))
    names = [f"p-{run}-{n}" for n in range(count)]
    missing = await wait_bound(api, names, 120)
    last = max((api.bound[name] for name in names if name in api.bound), default=began)
    return (count - missing) / max(last - began, 1e-9), missing


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0


async def measure(options: argparse.Namespace, placers: int) -> None:
    api = TrivialApi(nodes=options.nodes)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(api), "127.0.0.1", 0)
    with tempfile.TemporaryDirectory(prefix="lh-bench-") as folder:
        directory = Path(folder)
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(KUBECONFIG.format(port=server.sockets[0].getsockname()[1]))
        stack = contextlib.AsyncExitStack()
        made = Made(directory) if options.tls else None
        shown, authority = (made.issue("nats"), made.ca) if made else (None, None)
        valkey = stack.enter_context(valkey_server(durable=options.durable))
        await valkey.ready()
        async with (
            stack,
            nats_server(shown) as nats,
            services(
                kubeconfig, nats.url, valkey.url, placers, directory, authority=authority
            ) as pids,
        ):
            while api.watcher is None:
                await asyncio.sleep(0.05)
            await warm_up(api)
            report: dict[str, object] = {"placers": placers, "nodes": options.nodes}
            for rate in options.rates:
                latencies, missing = await at_rate(api, rate, options.seconds)
                report[f"at {rate}/s"] = {
                    "p50_ms": round(statistics.median(latencies), 2),
                    "p99_ms": round(quantile(latencies, 0.99), 2),
                    "max_ms": round(max(latencies), 2),
                    "missing": missing,
                }
            servers = {"nats": nats.process, "valkey": valkey.process}
            everyone = {**pids, "api server and load": os.getpid()}
            everyone |= {n: server.pid for n, server in servers.items() if server is not None}
            before = {name: cpu_s(pid) for name, pid in everyone.items()}
            pods_per_s, missing = await burst(api, options.burst)
            spent = {name: cpu_s(pid) - before[name] for name, pid in everyone.items()}
            report[f"burst of {options.burst}"] = {
                "pods_per_s": round(pods_per_s),
                "missing": missing,
                "cpu_us_per_pod": {n: round(s / options.burst * 1e6) for n, s in spent.items()},
            }
            report["resident_mib"] = {n: round(resident_mib(p)) for n, p in pids.items()}
            print(json.dumps(report, indent=1))
            for log in directory.glob("*.log"):
                sys.stderr.write(
                    "".join(f"{log.stem}: {line}\n" for line in log.read_text().splitlines()[-5:])
                )
    server.close()


async def warm_up(api: TrivialApi) -> None:
    """Feed single pods until one is bound: every node and device is known by then."""
    for _ in range(120):
        _, missing = await at_rate(api, 20, 0.5)
        if not missing:
            await asyncio.sleep(3)
            return
    raise SystemExit("no pod was bound within the warm-up: see the services' logs above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--placers", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--rates", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--burst", type=int, default=20000)
    parser.add_argument(
        "--durable",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="valkey with appendfsync always, as in `leasehold up` (default), or no file at all",
    )
    parser.add_argument("--tls", action="store_true", help="NATS under TLS, as in `leasehold up`")
    options = parser.parse_args()
    for placers in options.placers:
        asyncio.run(measure(options, placers))


if __name__ == "__main__":
    main()
