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
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

from shared.ledger.leases import RedisLeases
from shared.model.device import Device
from shared.model.events.node_events import DeviceReported
from shared.model.lease import Share
from shared.model.ledger import Reservation, Reserved
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.placement import Placement
from tests.support.servers.valkey import ValkeyServer, valkey_server

GPUS = 8
SHARE_MIB = 4096
RESOURCES = {"cpu": 500, "memory": 2**30, "ephemeral-storage": 2**20, "pods": 1}


async def build(leases: RedisLeases, nodes: int) -> None:
    token = await leases.begin_rebuild(now=time.time())
    assert token is not None
    for number in range(nodes):
        name = NodeName(f"node-{number:05d}")
        room = {"cpu": 10**6, "memory": 2**44, "ephemeral-storage": 2**44, "pods": 1000}
        await leases.save_nodes([NodeFacts(name=name, allocatable=room)])
        devices = tuple(
            Device(uuid=uuid(number, gpu), index=gpu, model="A100", memory_mib=81920, slots=20)
            for gpu in range(GPUS)
        )
        await leases.save_devices([DeviceReported(node=name, devices=devices, served=())])
    await leases.finish_rebuild(token)


def uuid(node: int, gpu: int) -> DeviceUuid:
    return DeviceUuid(f"GPU-{node:08x}-0000-0000-0000-{gpu:012x}")


def candidate(node: int, gpu: int) -> Placement:
    share = Share(
        container="main",
        device=uuid(node, gpu),
        index=gpu,
        device_mib=81_920,
        device_model="NVIDIA A100-SXM4-80GB",
        memory_mib=SHARE_MIB,
        cores_percent=4,
    )
    return Placement(node=NodeName(f"node-{node:05d}"), shares=(share,))


def reservations(nodes: int, count: int, seed: str) -> list[Reservation]:
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


async def caller(leases: RedisLeases, wanted: Sequence[Reservation], group: int) -> int:
    granted = 0
    for start in range(0, len(wanted), group):
        outcomes = await leases.reserve(wanted[start : start + group], now=1e9, ttl_s=30)
        granted += sum(isinstance(outcome, Reserved) for outcome in outcomes)
    return granted


def server_cpu_s(server: ValkeyServer) -> float:
    assert server.process is not None
    stat = Path(f"/proc/{server.process.pid}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def measure(
    server: ValkeyServer, leases: RedisLeases, nodes: int, *, group: int, callers: int, count: int
) -> None:
    parts = [
        reservations(nodes, count // callers, f"{group}-{n}-{callers}") for n in range(callers)
    ]
    began, cpu, serving = time.perf_counter(), time.process_time(), server_cpu_s(server)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(caller(leases, part, group)) for part in parts]
    took, busy = time.perf_counter() - began, time.process_time() - cpu
    serving = server_cpu_s(server) - serving
    granted = sum(task.result() for task in running)
    total = sum(len(part) for part in parts)
    print(
        f"{group:3d} at a time, {callers} caller(s): {total / took:9,.0f} reservations/s, "
        f"{busy / total * 1e6:5.1f} µs of Python and {serving / total * 1e6:5.1f} µs of the server "
        f"each, {granted / total:.1%} granted"
    )
    for part in parts:
        await leases.release([reservation.pod for reservation in part], reason="benchmark")


async def run(nodes: int, count: int) -> None:
    with valkey_server() as server:
        await server.ready()
        async with RedisLeases.connect(server.url) as leases:
            await build(leases, nodes)
            print(f"{nodes} nodes x {GPUS} devices")
            for group in (1, 16, 64, 256):
                for callers in (1, 4):
                    share = count if group > 1 else count // 4
                    await measure(server, leases, nodes, group=group, callers=callers, count=share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--reservations", type=int, default=20_000)
    options = parser.parse_args()
    asyncio.run(run(options.nodes, options.reservations))


if __name__ == "__main__":
    main()
