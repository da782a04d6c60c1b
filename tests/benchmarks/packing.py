"""How much of a cluster's GPUs can be allocated, by policy: the procedure of a paper.

    python -m tests.benchmarks.packing --nodes NODES.csv --pods PODS.csv [--seeds 42,43,44]

Method, as in "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation
Gradient Descent" (USENIX ATC 2023): the pods of a trace, and more that are drawn from it at random,
arrive in random order until they request 130 % of the cluster's GPUs; none ends, and what fits
nowhere is dropped. The figure is the percentage of the GPUs that is allocated at the end. The
placer's own code decides. Pods without GPUs are placed by the policy as all others, or as
kube-scheduler's default scores would (LeastAllocated and BalancedAllocation). The nodes' columns:
sn, cpu_milli, memory_mib, gpu, model; those of the pods are described in `tests.benchmarks.replay`.
A trace without nodes, as that of 2025, needs some: of at least as many cpus and MiB as a pod can
request, some of them without GPUs (gpu 0) for pods without GPUs, and of a model of `GPU_WATTS`.

Power is the mean while pods that request 50 to 80 % of the GPUs have arrived, by the model of
"Power- and Fragmentation-aware Online Scheduling for GPU Datacenters" (2024): a GPU draws all of
its power with any pod, else its idle power; so does a CPU package of 32 threads.
"""

import argparse
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

from services.placer.rounds.decisions import DecisionContext
from shared.model.events.pod_events import PodQueued
from shared.model.names import Namespace, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import NodeOrder
from shared.placing.index.fragmentation import free_part
from shared.placing.index.node_index import NodeIndex
from shared.placing.mirror.cluster_mirror import ClusterMirror
from tests.benchmarks.trace import (
    PARTS,
    parts_of,
    read_nodes,
    read_pods,
    with_density,
    with_order,
)

ARRIVED = 1.3
LOADS = range(50, 81, 5)
"""Percentages of the GPUs that are requested when the power is read."""
GPU_WATTS = {
    "P100": (25, 250), "T4": (10, 70), "V100M16": (30, 300), "V100M32": (30, 300),
    "A10": (30, 150), "G2": (30, 150), "G3": (50, 400),
}  # fmt: skip
"""Idle and in use, by the paper; a model that it does not have counts nothing."""
PACKAGE_CPU = 32_000
PACKAGE_WATTS = (15, 120)
PAPER = "the paper, on its default pods: Random 87.5, Best fit 93.1, its own policy FGD 95.4"


def inflated(pods, requested, dice):
    """Return the pods, and more of the same in random order, until they request that much."""
    arriving = dice.sample(pods, len(pods))
    total = sum(map(parts_of, pods))
    while total < requested:
        arriving.append(dice.choice(pods))
        total += parts_of(arriving[-1])
    dice.shuffle(arriving)
    while total - parts_of(arriving[-1]) >= requested:
        total -= parts_of(arriving.pop())
    return arriving


def allocated_percent(nodes, pods, seed, *, kube):
    """Return how much is allocated in the end, the kW on the way, and microseconds per decision."""
    dice = random.Random(seed)  # noqa: S311
    mirror = ClusterMirror()
    mirror.reset(nodes)
    context = DecisionContext(NodeIndex(mirror), dice.random)
    capacity = PARTS * sum(len(node.devices) for node in nodes)
    allocated = 0
    number = 0
    spent = 0.0
    arrived = 0
    kilowatts = {}
    for number, request in enumerate(inflated(pods, ARRIVED * capacity, dice), 1):
        pod = PodUid(f"pod-{number}")
        arrived += parts_of(request)
        load = 100 * arrived // capacity
        if load in LOADS and load not in kilowatts:
            kilowatts[load] = sum(map(_watts, mirror.nodes.values())) / 1000
        if kube and not request.containers:
            _spread(pod, request, mirror, dice)
            continue
        event = PodQueued(
            pod=pod, namespace=Namespace("ns"), name=pod, resource_version="1", request=request
        )
        began = time.process_time()
        result = context.choose(event)
        spent += time.process_time() - began
        if not isinstance(result, Refusal):
            allocated += parts_of(request)
    return 100 * allocated / capacity, statistics.fmean(kilowatts.values()), spent / number * 1e6


def _watts(node):
    cpu = node.facts.allocatable["cpu"]
    busy = -(-(cpu - node.free_resources["cpu"]) // PACKAGE_CPU)
    idle_w, busy_w = PACKAGE_WATTS
    watts = busy * busy_w + max(-(-cpu // PACKAGE_CPU) - busy, 0) * idle_w
    for device in node.devices:
        watts += GPU_WATTS.get(device.device.model, (0, 0))[free_part(device) < PARTS]
    return watts


def with_watts(node):
    """Return a node whose devices have the power limits of the paper."""
    devices = tuple(
        (replace(device, power_limit_w=GPU_WATTS.get(device.model, (0, 0))[1]), use)
        for device, use in node.devices
    )
    return replace(node, devices=devices)


def _spread(pod, request, mirror, dice):
    """Place a pod on the node with the best sum of kube-scheduler's scores, if it fits any."""
    scored = [
        (score, dice.random(), name)
        for name, node in mirror.nodes.items()
        if (score := _score(request, node)) >= 0
    ]
    if scored:
        placement = Placement(node=max(scored)[2], shares=())
        mirror.reserve(pod, placement, request.resources)


def _score(request, node):
    """Return LeastAllocated plus BalancedAllocation, or -1 if the pod does not fit."""
    left = {name: node.free_resources[name] - amount for name, amount in request.resources.items()}
    if min(left.values()) < 0:
        return -1
    free = [left[name] / node.facts.allocatable[name] for name in ("cpu", "memory")]
    least = sum(int(100 * part) for part in free) // 2
    return least + int(100 * (1 - abs(free[0] - free[1]) / 2))


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--pods", type=Path, required=True)
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument("--policies", nargs="+", default=[order.value for order in NodeOrder])
    flags = parser.parse_args()
    cluster_nodes = read_nodes(flags.nodes.read_text().splitlines(), str(flags.nodes))
    trace = read_pods(flags.pods.read_text().splitlines(), str(flags.pods))
    nodes = [with_watts(node) for node in with_density(cluster_nodes, trace)]
    seeds = [int(seed) for seed in flags.seeds.split(",")]
    print(
        f"{'policy':<14} {'pods without GPUs':<18} {'allocated %':>11} {'kW':>6}  "
        "by seed; us per decision"
    )
    for policy in flags.policies:
        pods = [with_order(pod.request, NodeOrder(policy)) for pod in trace]
        for kube in (False, True):
            runs = [allocated_percent(nodes, pods, seed, kube=kube) for seed in seeds]
            percents = [percent for percent, _, _ in runs]
            print(
                f"{policy:<14} {'kube-scheduler' if kube else 'the same':<18} "
                f"{statistics.fmean(percents):>11.2f} "
                f"{statistics.fmean(kilowatts for _, kilowatts, _ in runs):>6.0f}  "
                f"{' '.join(f'{percent:.2f}' for percent in percents)}; "
                f"{statistics.fmean(us for _, _, us in runs):.0f}",
                flush=True,
            )
    print(PAPER)


if __name__ == "__main__":
    main()
