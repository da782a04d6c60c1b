"""GPUs held in five ways on one node, while pods come and go: `... .mixed_node --help`.

A node agent runs beside a simulated kubelet and container runtime, whose GPUs are held by the
driver, by HAMi-core, by MIG, by one pod each and by nothing. Pods of 2 s are started at a steady
rate, whatever starts meanwhile. Four times a second the limits that the simulated driver has, the
region of HAMi-core and the MIG instance of each running container are compared with its lease; the
exit code is 1 if one differs. Leases are made here, without a placer.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from simcluster.gpu_driver.control import VARIABLE
from tests.benchmarks.pace import quantile
from tests.support.node_agent.mixed_node import MixedNode, mixed_node


def report(node: MixedNode, pods: int, took_s: float) -> None:
    kinds = Counter(node.judged.values())
    counts = ", ".join(f"{kind} {kinds[kind]}" for kind in sorted(kinds))
    starts_ms = [1000 * start_s for start_s in node.start_s]
    median_ms, p99_ms = (quantile(starts_ms, share) for share in (0.5, 0.99))
    print(f"{pods} pods in {took_s:.0f} s: {60 * pods / took_s:.0f} a minute")
    print(f"judged while they ran: {len(node.judged)} ({counts})")
    print(f"created to started: median {median_ms:.0f} ms, p99 {p99_ms:.0f} ms")
    print(f"limits that differ from their leases: {len(node.wrong)}")
    for text in node.wrong[:20]:
        print(f"  {text}")


async def measure(seconds: float, per_minute: float, accounting: str, seed: int) -> int:
    os.environ[VARIABLE] = ""  # the agent sets it
    pods = round(seconds * per_minute / 60)
    with tempfile.TemporaryDirectory() as directory:
        async with mixed_node(Path(directory) / "hook", accounting) as node:
            began = time.monotonic()
            await node.run(pods, per_minute=per_minute, seed=seed)
            report(node, pods, time.monotonic() - began)
    return int(bool(node.wrong) or len(node.judged) < pods)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--per-minute", type=float, default=300.0)
    parser.add_argument("--accounting", choices=("dmem", "misc"), default="dmem")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    return asyncio.run(measure(flags.seconds, flags.per_minute, flags.accounting, flags.seed))


if __name__ == "__main__":
    sys.exit(main())
