"""Microseconds per placement and per refusal, by size of the cluster and number of kinds of pods.

    python -m tests.benchmarks.placement [--quick] [--nodes 100 1000] [--kinds 1 32]

Method: nodes of eight devices of 80 GiB; three in four devices carry one to four shares. Each
placement is timed: `place`, `reserve`, and keeping the index up to date with everything that
changed. Between batches, not timed, the mirror gets totals as from the ledger, and the oldest pods
are removed once there are 1,024. Kinds of pods differ in memory, cores, one or two GPUs, and cpu.
Refused pods fit nowhere, a third each for lack of memory, of cores and of cpu; before each a
device's use changes, so that no refusal is the same as before.
CPU time of this process, which collects garbage as rarely as a service, median of batches of 64;
the time of `sum(range(1000))` on the same machine beside it shows how quick, or how busy, the
machine is.
"""

import argparse
import gc
import random
import statistics
import time
import timeit
from collections import Counter, defaultdict, deque
from itertools import product

from msgspec import structs

from services import GC_THRESHOLD
from shared.model.devices.device import DeviceUse
from shared.model.names import PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import NodeOrder
from shared.placing.explained import place_explained
from shared.placing.index.node_index import NodeIndex
from shared.placing.mirror.cluster_mirror import ClusterMirror
from tests.support import build

DEVICES = 8
DEVICE_MIB = 81_920
BATCH = 64
PODS = 1_024
"""So many of the placed pods stay; the oldest leave."""
MEMORIES = (5_000, 10_000, 20_000)
CORES = (0, 25)


def cluster(nodes, dice, *, full=False):
    """Nodes of eight devices, of which three in four, or with `full` all, have shares on them."""
    allocatable = {"cpu": 256_000, "memory": 1 << 40, "pods": 250}
    about = {"model": "NVIDIA A100-SXM4-80GB", "memory_mib": DEVICE_MIB, "slots": 16}
    return [
        build.ledger_node(
            f"node-{n}",
            *(
                (device, half_used(dice, full=full))
                for device in build.devices(DEVICES, f"{n}", **about)
            ),
            allocatable=allocatable,
        )
        for n in range(nodes)
    ]


def half_used(dice, *, full):
    """Nothing at all, or up to four shares; with `full` one share with cores."""
    if full:
        return build.use(dice.choice(MEMORIES), 25)
    if dice.random() < 0.25:
        return DeviceUse()
    held = [dice.choice(MEMORIES) for _ in range(dice.randrange(1, 5))]
    cores = sum(dice.choice(CORES) for _ in held)
    return build.use(sum(held), min(cores, 75), len(held))


def kinds_of_pods(count, order):
    """Return so many different requests that fit."""
    return [
        _pod(
            order,
            1 + number % 2,
            MEMORIES[number // 4 % 3] + 10 * (number // 12),
            CORES[number // 2 % 2],
            500 + 10 * (number // 12 % 40),
        )
        for number in range(count)
    ]


def kinds_of_refused_pods(count):
    """Return so many different requests that fit nowhere."""
    amounts = (
        lambda number: (1 + number % 8, DEVICE_MIB - number, 0, 500 + number % 100),
        lambda number: (1 + number % 4, 1_000 + number, 90 + number % 10, 500),
        lambda number: (1, 1_000 + number, 0, 257_000 + number),
    )
    return [_pod(NodeOrder.BINPACK, *amounts[number % 3](number)) for number in range(count)]


def _pod(order, gpus, memory, cores, cpu):
    resources = {"cpu": cpu, "memory": 1 << 30, "pods": 1}
    container = build.gpu(gpus=gpus, memory=memory, cores_percent=cores)
    return build.request(container, resources=resources, node_order=order)


class Load:
    """A mirror that pods come to and leave, and the totals that a ledger would publish."""

    def __init__(self, nodes, kinds, *, full=False):
        self.dice = random.Random(1)  # noqa: S311
        held = cluster(nodes, self.dice, full=full)
        self.mirror = ClusterMirror()
        self.mirror.reset(held)
        self.index = NodeIndex(self.mirror)
        self.kinds = kinds
        self.totals = {device.uuid: use for node in held for device, use in node.devices}
        self.resources = defaultdict(Counter)
        self.pods = deque()
        self.untold = []
        self.number = 0
        self.refused = 0

    def step(self, wanted):
        """Place one pod and count it."""
        if wanted.node_order.compares:
            self.index.fragmentation.workload.learn(wanted)
        answer = place_explained(wanted, self.index, self.dice.random, 1)
        if isinstance(answer, Refusal):
            self.refused += 1
            return
        self.number += 1
        pod = PodUid(f"pod-{self.number}")
        self.mirror.reserve(pod, answer[0], wanted.resources)
        self.untold.append((pod, answer[0], wanted.resources))

    def report(self):
        """Apply the totals with what was placed to the mirror, as from the ledger's feed."""
        for pod, placement, resources in self.untold:
            shares = placement.shares
            node = placement.node
            fences = {s.device: self.totals[s.device].fence + 1 for s in shares}
            fenced = tuple(structs.replace(s, fence=fences[s.device]) for s in shares)
            self.mirror.confirm(build.lease(pod, node, *fenced))
            self._add(shares, 1)
            self.resources[node].update(resources)
        for node in {placement.node for _, placement, _ in self.untold}:
            self._report_resources(node)
        self.mirror.drop_counted()
        self.pods.extend(self.untold)
        self.untold.clear()

    def drain(self):
        """Let the oldest pods leave."""
        while len(self.pods) > PODS:
            _, placement, resources = self.pods.popleft()
            self._add(placement.shares, -1)
            self.resources[placement.node].subtract(resources)
            self._report_resources(placement.node)

    def _report_resources(self, node):
        version = self.mirror.nodes[node].version + 1
        self.mirror.update_node_use(node, dict(self.resources[node]), version)

    def _add(self, shares, sign):
        for share in shares:
            before = self.totals[share.device]
            total = self.totals[share.device] = DeviceUse(
                memory_mib=before.memory_mib + sign * share.memory_mib,
                cores_percent=before.cores_percent + sign * share.cores_percent,
                shares=before.shares + sign,
                fence=before.fence + 1,
            )
            self.mirror.update_device_use(share.device, total)

    def batch(self):
        """A batch of pods to come."""
        return self.dice.choices(self.kinds, k=BATCH)


def placement_us(nodes, kinds, order, seconds):
    """Return the median time of a placement, and the number of pods refused meanwhile."""
    load = Load(nodes, kinds_of_pods(kinds, order))
    for kind in load.kinds:
        load.step(kind)
    load.report()
    load.drain()
    figures = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        wanted = load.batch()
        began = time.process_time()
        for kind in wanted:
            load.step(kind)
        figures.append((time.process_time() - began) / BATCH * 1e6)
        load.report()
        load.drain()
    return statistics.median(figures), load.refused


def refusal_us(nodes, kinds, seconds):
    """Return the median time of a refusal once every kind arrived, and that of the first."""
    load = Load(nodes, kinds_of_refused_pods(kinds), full=True)
    first = _refuse(load, load.kinds) / kinds * 1e6
    figures = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not figures:
        figures.append(_refuse(load, load.batch()) / BATCH * 1e6)
    return statistics.median(figures), first


def _refuse(load, wanted):
    """Return the seconds of refusing pods; before each of them, a device's use changes."""
    devices = list(load.totals)
    spent = 0.0
    for pod_request in wanted:
        uuid = load.dice.choice(devices)
        fence = load.totals[uuid].fence + 1
        used = DeviceUse(
            memory_mib=load.dice.choice(MEMORIES), cores_percent=25, shares=1, fence=fence
        )
        load.totals[uuid] = used
        load.mirror.update_device_use(uuid, used)
        began = time.process_time()
        refused = place_explained(pod_request, load.index, load.dice.random)
        spent += time.process_time() - began
        if not isinstance(refused, Refusal):
            raise SystemExit(f"placed: {pod_request}")
    return spent


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one second per figure")
    add("--nodes", type=int, nargs="+", default=[100, 1_000, 5_000, 50_000])
    add("--kinds", type=int, nargs="+", default=[1, 8, 32, 128, 1_000])
    add("--orders", nargs="*", default=[order.value for order in NodeOrder])
    flags = parser.parse_args()
    seconds = 1.0 if flags.quick else 5.0
    gc.set_threshold(*GC_THRESHOLD)
    yardstick = timeit.repeat("sum(range(1000))", timer=time.process_time, number=2_000)
    for order, nodes, kinds in product(flags.orders, flags.nodes, flags.kinds):
        us, refused = placement_us(nodes, kinds, NodeOrder(order), seconds)
        print(f"placement order {order} nodes {nodes} kinds {kinds} us {us:.1f} refused {refused}")
    for nodes, kinds in product(flags.nodes, flags.kinds):
        median, first = refusal_us(nodes, kinds, seconds)
        print(
            f"refusal nodes {nodes} kinds {kinds} us {median:.1f} first_us {first:.1f}", flush=True
        )
    print(f"sum(range(1000)) takes {min(yardstick) / 2_000 * 1e6:.1f} µs here")


if __name__ == "__main__":
    main()
