"""Microseconds per placement, with the index and with the naive scan, by size of the cluster.

    python -m tests.benchmarks.placement [--quick] [--json]

Method: nodes of eight devices of 80 GiB; three in four devices carry one to four shares. Each
placement is timed: `place` (up to three candidates with their shares), `hold` of the first one, and
keeping the index up to date with everything that changed. Between batches, not timed, the mirror
gets totals as from the ledger, and the oldest pods are removed once there are 1,024.
Pods come from twelve templates: three memory sizes, no or 25 % of the cores, one or two
GPUs, all with cpu, memory and pod count. The naive scan, written for clarity, looks at every
device of every node.
CPU time of this process, median of batches of 64; the time of `sum(range(1000))` on the same
machine beside it shows how quick, or how busy, the machine is.
"""

import argparse
import json
import random
import statistics
import time
import timeit
from collections import deque

from msgspec import structs

from services.placer.index.node_index import NodeIndex
from services.placer.mirror.cluster_mirror import ClusterMirror
from services.placer.placement import place
from shared.model.device import Device, DeviceUse
from shared.model.lease import Lease, Share
from shared.model.ledger import LedgerNode
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.placement import Refusal
from shared.model.request import GpuRequest, NodeOrder, PodRequest
from tests.support.placer.naive import place_naive

DEVICES = 8
DEVICE_MIB = 81_920
BATCH = 64
PODS = 1_024
"""So many of the placed pods stay; the oldest leave."""
MEMORIES = (5_000, 10_000, 20_000)
CORES = (0, 25)
TRIGGER = "volcano.sh/vgpu-number"
_IDLE = DeviceUse()


def cluster(nodes: int, dice: random.Random) -> list[LedgerNode]:
    """Nodes of eight devices, of which three in four have shares on them."""
    allocatable = {"cpu": 256_000, "memory": 1 << 40, "pods": 250}
    return [
        LedgerNode(
            facts=NodeFacts(name=NodeName(f"node-{number}"), allocatable=allocatable),
            version=1,
            devices=tuple(
                (
                    Device(
                        uuid=DeviceUuid(f"GPU-{number}-{index}"),
                        index=index,
                        model="NVIDIA A100-SXM4-80GB",
                        memory_mib=DEVICE_MIB,
                        slots=16,
                    ),
                    half_used(dice),
                )
                for index in range(DEVICES)
            ),
            served=(TRIGGER,),
        )
        for number in range(nodes)
    ]


def half_used(dice: random.Random) -> DeviceUse:
    """Nothing at all, or up to four shares."""
    if dice.random() < 0.25:
        return _IDLE
    held = [dice.choice(MEMORIES) for _ in range(dice.randrange(1, 5))]
    cores = sum(dice.choice(CORES) for _ in held)
    return DeviceUse(memory_mib=sum(held), cores_percent=min(cores, 75), shares=len(held), fence=1)


def templates(order: NodeOrder) -> list[PodRequest]:
    """What pods ask for."""
    return [
        PodRequest(
            dialect="volcano-vgpu",
            containers=(
                GpuRequest(container="main", gpus=gpus, memory_units=memory, cores_percent=cores),
            ),
            triggers=(TRIGGER,),
            resources={"cpu": 500, "memory": 1 << 30, "pods": 1},
            node_order=order,
        )
        for memory in MEMORIES
        for cores in CORES
        for gpus in (1, 2)
    ]


class Load:
    """A mirror that pods come to and leave, and the totals that a ledger would publish."""

    def __init__(self, nodes: int, order: NodeOrder) -> None:
        self.dice = random.Random(1)  # noqa: S311
        held = cluster(nodes, self.dice)
        self.mirror = ClusterMirror()
        self.mirror.reset(held)
        self.index = NodeIndex(self.mirror)
        self.templates = templates(order)
        self.totals = {device.uuid: use for node in held for device, use in node.devices}
        self.pods: deque[tuple[PodUid, tuple[Share, ...]]] = deque()
        self.untold: list[tuple[PodUid, tuple[Share, ...]]] = []
        self.number = 0
        self.refused = 0

    def step(self, wanted: PodRequest) -> None:
        """Place one pod and count it."""
        answer = place(wanted, self.index, self.dice.random)
        if isinstance(answer, Refusal):
            self.refused += 1
            return
        self.number += 1
        pod = PodUid(f"pod-{self.number}")
        self.mirror.reserve(pod, answer[0], wanted.resources)
        self.untold.append((pod, answer[0].shares))

    def report(self) -> None:
        """Apply the totals with what was placed to the mirror, as from the ledger's feed."""
        for pod, shares in self.untold:
            fences = {s.device: self.totals[s.device].fence + 1 for s in shares}
            node = NodeName("node-" + shares[0].device.split("-")[1])
            fenced = tuple(structs.replace(s, fence=fences[s.device]) for s in shares)
            self.mirror.confirm(
                Lease(pod=pod, namespace=Namespace(""), name=pod, node=node, shares=fenced)
            )
            self._add(shares, 1)
        self.mirror.drop_counted()
        self.pods.extend(self.untold)
        self.untold.clear()

    def drain(self) -> None:
        """Let the oldest pods leave."""
        while len(self.pods) > PODS:
            self._add(self.pods.popleft()[1], -1)

    def _add(self, shares: tuple[Share, ...], sign: int) -> None:
        for share in shares:
            before = self.totals[share.device]
            total = self.totals[share.device] = DeviceUse(
                memory_mib=before.memory_mib + sign * share.memory_mib,
                cores_percent=before.cores_percent + sign * share.cores_percent,
                shares=before.shares + sign,
                fence=before.fence + 1,
            )
            self.mirror.update_device_use(share.device, total)

    def batch(self) -> list[PodRequest]:
        """A batch of pods to come."""
        return self.dice.choices(self.templates, k=BATCH)


def index_us(nodes: int, order: NodeOrder, seconds: float) -> tuple[float, int]:
    """Return the median time of a placement, and the number of pods refused meanwhile."""
    load = Load(nodes, order)
    for one in load.templates:
        load.step(one)
    figures: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        wanted = load.batch()
        began = time.process_time()
        for one in wanted:
            load.step(one)
        figures.append((time.process_time() - began) / BATCH * 1e6)
        load.report()
        load.drain()
    return statistics.median(figures), load.refused


def naive_us(nodes: int, order: NodeOrder, seconds: float) -> float:
    """Return the median time of a scan over all nodes."""
    held, wanted = cluster(nodes, random.Random(1)), templates(order)  # noqa: S311
    figures: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not figures:
        one = wanted[len(figures) % len(wanted)]
        began = time.process_time()
        place_naive(one, held)
        figures.append((time.process_time() - began) * 1e6)
    return statistics.median(figures)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one second per figure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    seconds = 1.0 if flags.quick else 5.0
    rows = []
    for order in NodeOrder:
        for nodes in (100, 1_000, 5_000):
            fast, refused = index_us(nodes, order, seconds)
            slow = naive_us(nodes, order, seconds)
            rows.append(
                {
                    "order": order.value,
                    "nodes": nodes,
                    "devices": nodes * DEVICES,
                    "index_us": round(fast, 1),
                    "naive_us": round(slow, 1),
                    "ratio": round(slow / fast),
                    "refused": refused,
                }
            )
    yardstick_us = round(min(timeit.repeat("sum(range(1000))", number=2_000)) / 2_000 * 1e6, 1)
    if flags.json:
        print(json.dumps({"placement": rows, "sum_range_1000_us": yardstick_us}))
        return
    print(f"sum(range(1000)) takes {yardstick_us} µs here")
    print(f"{'order':<8} {'nodes':>6} {'devices':>8} {'index µs':>9} {'naive µs':>10} {'ratio':>7}")
    for row in rows:
        print(
            f"{row['order']:<8} {row['nodes']:>6} {row['devices']:>8} {row['index_us']:>9} "
            f"{row['naive_us']:>10} {row['ratio']:>7}"
        )


if __name__ == "__main__":
    main()
