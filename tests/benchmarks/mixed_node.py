"""GPUs held in five ways on one node, while pods come and go: `... .mixed_node --help`.

Watcher, placer, binder and node agent are processes, as in production; the API server, the kubelet
and its container runtime are simulated in this one. The GPUs are held by the driver, by HAMi-core,
by MIG, by one pod each and by nothing: pods demand it, each of the GPU of its kind. Pods of 2 s are
created at a steady rate, whatever starts meanwhile. Four times a second the limits that the
simulated driver has, the region of HAMi-core and the MIG instance of each running container are
compared with its lease in the ledger; the exit code is 1 if one differs.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from services.node_agent.memory_limits.build_hook import build_hook
from shared.dialects.nvidia import dialect as nvidia
from shared.dialects.volcano import vgpu
from shared.ledger.leases import RedisLeases
from shared.model.errors import LeaseholdError
from shared.model.names import ISOLATION, NodeName
from simcluster.apimachinery.objects import Json
from simcluster.gpu_driver.control import control
from simcluster.kubelet.containers.container_spec import RUN_FOR
from simcluster.node_agent.gpus import uuid_of
from tests.benchmarks.pace import quantile
from tests.benchmarks.processes import servers, services
from tests.support.node_agent.judged_node import (
    ENDED,
    KINDS,
    LAYOUT,
    RUN_S,
    JudgedNode,
)
from tests.support.simcluster.apiserver import api_server
from tests.support.simcluster.kubelet import FAST, NODE, Node, one_kubelet, pod
from tests.support.waiting import until

CORES = {"hami-core": 10}
"""Percent of the cores that pods request, by kind."""
START_S = 120.0


def placed_pod(name: str, kind: str, memory_mib: int) -> Json:
    """Return a pod whose memory has to be held in this way, on the GPU of this kind."""
    uuid = uuid_of(NodeName(NODE), KINDS.index(kind))
    names = vgpu.RESOURCES
    limits = {names.count: 1, names.memory: memory_mib}
    selected = vgpu.USE_UUIDS
    if kind in CORES:
        limits[names.cores] = CORES[kind]
    if kind == "exclusive":
        limits = {"nvidia.com/gpu": 1}
        selected = nvidia.USE_UUIDS
    return pod(
        name,
        limits=limits,
        node=None,
        annotations={ISOLATION: kind, selected: uuid, RUN_FOR: f"{RUN_S:g}s"},
        schedulerName="volcano",
        restartPolicy="Never",
    )


@dataclass(kw_only=True)
class PlacedNode(JudgedNode):
    """Its pods are placed and bound by Leasehold, and have the leases of the ledger."""

    ledger: RedisLeases

    async def create(self, name: str, kind: str, slot: int, memory_mib: int) -> None:
        del slot  # as many pods as the GPU has; which one, the ledger decides
        self.node.create(placed_pod(name, kind, memory_mib))

    async def remove(self, name: str) -> None:
        self.node.store.delete("pods", "default", name, grace_s=0)
        await until(lambda: not self.node.exists(name))

    async def judge(self) -> None:
        pages = [page async for page in self.ledger.load_all()]
        self.running = {lease.name: lease for page in pages for lease in page}
        await super().judge()


@contextlib.contextmanager
def agent_process(node: Node, kubeconfig: Path, nats_url: str, root: Path) -> Iterator[None]:
    files = node.kubelet.files
    flags = {
        "node": NODE,
        "gpus": LAYOUT,
        "kubelet-dir": files.root,
        "kubeconfig": kubeconfig,
        "nats-url": nats_url,
        "state-dir": root / "agent",
        "gpu-driver-dir": files.gpu_state.parent,
        "cgroup-root": files.cgroups,
        "proc-dir": files.proc,
        "limit-hook": root / "hook",
        "device-list-strategy": "cdi-cri",
        "cdi-dir": files.cdi,
        "monitor-http": "127.0.0.1:0",
        "log-level": "warning",
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    with (root / "agent.log").open("ab") as log:
        agent = subprocess.Popen(
            (sys.executable, "-m", "simcluster.node_agent", *words), stderr=log
        )
    try:
        yield
    finally:
        agent.terminate()
        agent.wait(20)


@contextlib.asynccontextmanager
async def placed_node(root: Path, accounting: str) -> AsyncIterator[PlacedNode]:
    """Start all processes; yield the node once its agent reports what the driver can hold."""
    build_hook(root / "hook")
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        api = await enter(api_server())
        settings = replace(FAST, cgroups=True)
        node = await enter(one_kubelet(settings, store=api.store, directory=root / "k"))
        up = await enter(servers())
        with agent_process(node, api.kubeconfig, up.nats_url, root):
            await until(lambda: sets_accounting(node, accounting), limit_s=START_S)
        await enter(services(api.kubeconfig, up, root))
        stack.enter_context(agent_process(node, api.kubeconfig, up.nats_url, root))
        ledger = await enter(RedisLeases.connect(up.valkey.url))
        yield PlacedNode(node=node, state_dir=root / "agent", ledger=ledger)


def sets_accounting(node: Node, accounting: str) -> bool:
    try:
        control(node.kubelet.files.gpu_state, "accounting", accounting)
    except LeaseholdError:  # the agent is making the GPUs
        return False
    return True


async def warm_up(node: PlacedNode) -> None:
    """Run a pod of each kind: every service knows the node and its GPUs by then."""
    for kind in KINDS:
        name = f"{kind}-first"
        await node.create(name, kind, 0, 1_000)
        await node.reached(name, *ENDED)
        await node.remove(name)


def report(node: PlacedNode, pods: int) -> None:
    kinds = Counter(node.judged.values())
    counts = ", ".join(f"{kind} {kinds[kind]}" for kind in sorted(kinds))
    starts_ms = [1000 * start_s for start_s in node.start_s.values()]
    slowest = sorted(node.start_s, key=node.start_s.__getitem__)[-5:]
    median_ms, p99_ms = (quantile(starts_ms, share) for share in (0.5, 0.99))
    print(f"{pods} pods ran within {node.lasted_s:.1f} s: {60 * pods / node.lasted_s:.0f} a minute")
    print(f"judged while they ran: {len(node.judged)} ({counts})")
    print(f"created to started: median {median_ms:.0f} ms, p99 {p99_ms:.0f} ms")
    print(f"slowest: {', '.join(f'{name} {node.start_s[name]:.1f} s' for name in slowest)}")
    print(f"limits that differ from their leases: {len(node.wrong)}")
    for text in node.wrong[:20]:
        print(f"  {text}")


async def measure(seconds: float, per_minute: float, accounting: str, seed: int) -> int:
    pods = round(seconds * per_minute / 60)
    with tempfile.TemporaryDirectory(prefix="lh-mixed-") as directory:
        async with placed_node(Path(directory), accounting) as node:
            await warm_up(node)
            await node.run(pods, per_minute=per_minute, seed=seed)
            report(node, pods)
    return int(bool(node.wrong) or len(node.judged) < pods)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--per-minute", type=float, default=300.0)
    parser.add_argument("--accounting", choices=("dmem", "misc"), default="dmem")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    return asyncio.run(measure(flags.seconds, flags.per_minute, flags.accounting, flags.seed))


if __name__ == "__main__":
    sys.exit(main())
