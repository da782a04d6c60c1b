"""Counters of processes and servers: CPU, wake-ups, reads and writes, messages, script calls.

Counters only rise; a measurement is the difference of two readings. `schedstat` counts CPU in
nanoseconds, where `stat` counts ticks of 10 ms.
https://docs.kernel.org/scheduler/sched-stats.html
"""

import asyncio
import json
from pathlib import Path

import redis.asyncio

Counters = dict[str, float]


def process_counters(pid: int) -> Counters:
    """CPU in milliseconds, how often a thread went to sleep and woke up, and `read_write_calls`.

    These are system calls that read and write files, pipes and sockets; `proc_pid_io(5)`.
    """
    io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    counters: Counters = {
        "cpu_ms": 0.0,
        "wakeups": 0.0,
        "read_write_calls": float(io["syscr"]) + float(io["syscw"]),
    }
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            counters["cpu_ms"] += int((task / "schedstat").read_text().split()[0]) / 1e6
            status = (task / "status").read_text()
        except FileNotFoundError:  # the thread has ended
            continue
        counters["wakeups"] += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return counters


async def nats_counters(monitor_port: int) -> Counters:
    """Messages that clients sent and received."""
    traffic = await nats_traffic(monitor_port)
    return {key: traffic[key] for key in ("messages in", "messages out")}


async def nats_traffic(monitor_port: int) -> Counters:
    """Messages and bytes that clients sent and received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", monitor_port)
    writer.write(b"GET /varz HTTP/1.0\r\n\r\n")
    found = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
    writer.close()
    return {
        f"{unit} {way}": found[f"{way}_{key}"]
        for unit, key in (("messages", "msgs"), ("bytes", "bytes"))
        for way in ("in", "out")
    }


async def redis_counters(client: "redis.asyncio.Redis") -> Counters:
    """Script calls: all that the services send to the ledger."""
    found = await client.info("commandstats")
    return {"scripts": found.get("cmdstat_evalsha", {}).get("calls", 0)}


def difference(after: Counters, before: Counters) -> Counters:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
