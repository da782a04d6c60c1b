"""Reservations per second: 1, 16, 64 and 256 at a time, one and four callers, a real server.

    python -m tests.benchmarks.reservations [--nodes 1000] [--reservations 20000]

Measured from the call of `RedisLeases.reserve` to its answer, packing and unpacking in Python
included, one process, server and client on the same machine, over a unix socket, nothing written
to disk. Every reservation carries three candidates on random nodes with free devices and four
ordinary resources. Callers are concurrent, each awaits its answer; of 256 reservations the ledger
makes four groups, and packs one while the server works on another. Where others use the machine
too, look at the CPU time of server and Python, not at the rate.
"""

import argparse
import asyncio
import random
import time

from shared.ledger.leases import RedisLeases
from shared.model.events.node_events import DeviceReported
from shared.model.leases.ledger import Reservation, ReservedLease
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.placement import Placement
from tests.benchmarks.processes import process_counters
from tests.support import build
from tests.support.servers.valkey import valkey_server

GPUS = 8
ROOM = {"cpu": 10**6, "memory": 2**44, "ephemeral-storage": 2**44, "pods": 1000}
RESOURCES = {"cpu": 500, "memory": 2**30, "ephemeral-storage": 2**20, "pods": 1}


async def fill(leases, nodes):
    token = await leases.begin_rebuild(now=time.time())
    for number in range(nodes):
        name = node_name(number)
        await leases.save_nodes([build.facts(name, allocatable=ROOM)])
        devices = build.devices(GPUS, name, memory_mib=81920, slots=20)
        await leases.save_devices([DeviceReported(node=name, devices=devices, served=())])
    await leases.finish_rebuild(token)


def node_name(number):
    return NodeName(f"node-{number:05d}")


def candidate(number, gpu):
    name = node_name(number)
    asked = {"device_mib": 81_920, "memory_mib": 4096, "cores_percent": 4}
    model = "NVIDIA A100-SXM4-80GB"
    share = build.share(f"GPU-{name}-{gpu}", gpu, device_model=model, **asked)
    return Placement(node=name, shares=(share,))


def reservations(nodes, count, seed):
    chance = random.Random(seed)  # noqa: S311
    return [
        Reservation(
            pod=PodUid(f"{seed}-{number:012d}-4b1f-9c54-0123456789ab"),
            namespace=Namespace("default"),
            name=f"pod-{number}",
            dialect="volcano-vgpu",
            resources=RESOURCES,
            trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            candidates=tuple(
                candidate(chance.randrange(nodes), chance.randrange(GPUS)) for _ in range(3)
            ),
        )
        for number in range(count)
    ]


async def call(leases, wanted, group):
    granted = 0
    for start in range(0, len(wanted), group):
        outcomes = await leases.reserve(wanted[start : start + group], now=1e9, ttl_s=30)
        granted += sum(isinstance(outcome, ReservedLease) for outcome in outcomes)
    return granted


async def measure(pid, leases, nodes, *, group, callers, count):
    names = [f"{group}-{n}-{callers}" for n in range(callers)]
    parts = [reservations(nodes, count // callers, name) for name in names]
    total = sum(map(len, parts))
    serving = process_counters(pid)["cpu_ms"]
    began = time.perf_counter()
    cpu = time.process_time()
    granted = sum(await asyncio.gather(*(call(leases, part, group) for part in parts)))
    took = time.perf_counter() - began
    busy = time.process_time() - cpu
    serving = process_counters(pid)["cpu_ms"] - serving
    print(
        f"{group:3d} at a time, {callers} caller(s): {total / took:9,.0f} reservations/s, "
        f"{busy / total * 1e6:5.1f} µs of Python and {serving / total * 1e3:5.1f} µs of the server "
        f"each, {granted / total:.1%} granted"
    )
    for part in parts:
        await leases.release([reservation.pod for reservation in part], reason="benchmark")


async def run(nodes, count):
    with valkey_server() as server:
        await server.ready()
        async with RedisLeases.connect(server.url) as leases:
            await fill(leases, nodes)
            print(f"{nodes} nodes x {GPUS} devices")
            for group in (1, 16, 64, 256):
                for callers in (1, 4):
                    how = {"group": group, "callers": callers}
                    share = count if group > 1 else count // 4
                    await measure(server.process.pid, leases, nodes, **how, count=share)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--reservations", type=int, default=20_000)
    options = parser.parse_args()
    asyncio.run(run(options.nodes, options.reservations))


if __name__ == "__main__":
    main()
