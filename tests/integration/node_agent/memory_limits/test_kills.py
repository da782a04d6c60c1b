"""Agents and partitioners that are killed between lease, limit, reading back and start."""

import asyncio
import itertools
import os
import random
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.node_agent import files
from services.node_agent.gpus.memory_limits import (
    Accounting,
    LimitError,
    LimitFault,
    LimitTarget,
)
from services.node_agent.gpus.nvml.memory_limits import NvmlMemoryLimits
from services.node_agent.memory_limits.container_limits import ContainerLimits
from services.node_agent.memory_limits.remote_limits import RemoteLimits
from services.node_agent.records import checkpoint as checkpoint_module
from services.node_agent.records.checkpoint import Checkpoint
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.leases.lease import Lease
from tests.integration.node_agent.memory_limits.conftest import (
    DEVICE,
    ID,
    POD,
    POD_TARGET,
    TARGET,
    LimitedNode,
)
from tests.integration.node_agent.memory_limits.test_container_limits import (
    BOTH,
    OTHER_ID,
    Containers,
    audit,
    call_of,
    driver_lease,
    driver_share,
)
from tests.support.cgroups import CgroupTree as Tree
from tests.support.gpu_driver import MIB
from tests.support.node_agent.node import entry_of
from tests.support.waiting import until

FENCE = 7
PIDS = itertools.count(1000, 1000)
"""An agent of a test begins at each."""


class KilledError(BaseException):
    """The process ends here: no handler of its own sees it."""


@dataclass
class Steps:
    """Kills at one step: before or after a call of the driver, or a write of a file."""

    at: int
    count: int = 0
    killed: str = ""

    def take(self, name: str) -> None:
        self.count += 1
        if self.count == self.at:
            self.killed = name
            raise KilledError(name)


def watch(monkeypatch: pytest.MonkeyPatch, steps: Steps) -> None:
    """Make each change on disk and each call of the driver a step, before and after it."""

    def write(path: Path, content: bytes) -> None:
        steps.take(f"before {path.name}")
        files.replace_file(path, content)
        steps.take(f"after {path.name}")

    def around(name: str) -> Callable[..., Any]:
        call = getattr(NvmlMemoryLimits, name)

        async def watched(*arguments: Any) -> Any:
            steps.take(f"before {name}")
            result = await call(*arguments)
            steps.take(f"after {name}")
            return result

        return watched

    for module in ("limit_setter", "hook_program"):
        monkeypatch.setattr(f"services.node_agent.memory_limits.{module}.replace_file", write)
    monkeypatch.setattr(checkpoint_module, "replace_file", write)
    for name in ("set", "get"):
        monkeypatch.setattr(NvmlMemoryLimits, name, around(name))


async def loaded(node: LimitedNode) -> Containers:
    """Return the node's containers as after a start of the agent."""
    checkpoint = Checkpoint(node.root / "checkpoint.json", "node-0")
    await checkpoint.load()
    return Containers(node=node, checkpoint=checkpoint, pid=next(PIDS))


def fresh(node: LimitedNode, number: int) -> LimitedNode:
    """Return another node, with the same driver, which has forgotten its limits."""
    node.driver.forget_limits()
    root = node.root / str(number)
    tree = Tree(root=root / "cgroup")
    tree.make("kubepods.slice")
    return LimitedNode(root=root, driver=node.driver, tree=tree)


def present(node: LimitedNode) -> dict[Path, int]:
    return {path: bytes_ for path, bytes_ in node.limits().items() if path.exists()}


async def start(containers: Containers, limits: ContainerLimits, lease: Lease, of: str) -> None:
    """Do what a kubelet and a runtime cause, until the container's program would run."""
    (entry,) = [entry_of(lease, container=name) for name in lease.containers]
    if containers.checkpoint.find(*entry.key) is None:
        await containers.checkpoint.save(entry)
    await limits.program.write(POD, "main", FENCE)
    await limits.limit_pods(entry)
    await limits.start_container(call_of(entry, containers.create(POD, of)))


KILLS = range(1, 60)


@BOTH
async def test_a_kill_at_each_step_of_a_start_leaves_no_container_without_its_limit(
    node: LimitedNode, accounting: Accounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next agent starts it, with the limits of its lease; an older agent changes nothing."""
    first = node
    node.driver.limit_cgroups(accounting)
    lease = driver_lease(driver_share(2000, fence=FENCE))
    killed = []
    for at in KILLS:
        node = fresh(first, at)
        pod = node.tree.make_pod(POD)
        steps = Steps(at)
        has_started = False
        with monkeypatch.context() as patch:
            watch(patch, steps)
            try:
                containers = await loaded(node)
                await start(containers, containers.limits(), lease, ID)
                has_started = True
            except KilledError as error:
                killed.append(str(error))
        if not steps.killed:
            break
        assert not has_started
        shutil.rmtree(containers.path(container_id=ID), ignore_errors=True)

        if node.limits():
            with pytest.raises(LimitError, match=f"fence {FENCE}"):
                await node.setter().set(POD_TARGET, fence=FENCE - 1, memory_bytes=9000 * MIB)
        again = await loaded(node)
        limits = again.limits()
        await start(again, limits, lease, OTHER_ID)

        own = again.path(container_id=OTHER_ID)
        assert present(node) == {pod: 2000 * MIB, own: 2000 * MIB}, steps.killed
        fences = msgspec.json.decode((node.root / "fences.json").read_bytes())
        assert fences == {f"{DEVICE}/{POD}": FENCE}, steps.killed
        older = entry_of(driver_lease(driver_share(9000, fence=FENCE - 1)))
        with pytest.raises(LimitError, match=f"fence {FENCE}"):
            await again.limits().resize(older)
        assert await audit(limits) == []
        await limits.end(set())
        assert present(node) == {}, steps.killed
    else:
        pytest.fail(f"{len(KILLS)} steps do not reach the start")
    for place in ("fences.json", "checkpoint.json", "set", "get"):
        assert {f"before {place}", f"after {place}"} <= set(killed)


@BOTH
@pytest.mark.parametrize("to_mib", [500, 4000])
async def test_a_kill_at_each_step_of_a_resize_ends_with_the_limits_of_the_recorded_lease(
    node: LimitedNode, accounting: Accounting, to_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.driver.limit_cgroups(accounting)
    containers = await loaded(node)
    await containers.run(containers.limits(), driver_lease(driver_share(2000)))
    pod = containers.path()
    own = containers.path(container_id=ID)
    for at in KILLS:
        agent = await loaded(node)
        agent.pods = containers.pods
        steps = Steps(at)
        resized = entry_of(driver_lease(driver_share(to_mib)))
        with monkeypatch.context() as patch:
            watch(patch, steps)
            try:
                limits = agent.limits()
                await agent.checkpoint.save(resized)
                await limits.resize(resized)
            except KilledError:
                pass

        again = await loaded(node)
        again.pods = containers.pods
        (entry,) = again.checkpoint.entries
        limits = again.limits()
        await limits.find_out([DEVICE])
        await audit(limits)

        wanted = entry.lease.shares[0].memory_mib * MIB
        assert node.limits() == {pod: wanted, own: wanted}, steps.killed
        assert await audit(limits) == []
        if not steps.killed:
            break
        await again.checkpoint.save(entry_of(driver_lease(driver_share(2000))))
        await limits.resize(again.checkpoint.entries[0])
    else:
        pytest.fail(f"{len(KILLS)} steps do not reach the end")
    assert wanted == to_mib * MIB


@BOTH
async def test_a_pod_that_ends_while_no_agent_runs_leaves_no_limit(
    node: LimitedNode, accounting: Accounting
) -> None:
    node.driver.limit_cgroups(accounting)
    before = await loaded(node)
    await before.run(before.limits(), driver_lease(driver_share(2000)))
    shutil.rmtree(before.path(container_id=ID))
    after = await loaded(node)
    limits = after.limits()

    await after.checkpoint.forget([POD])
    await limits.end(set())

    assert present(node) == {}


async def test_a_container_with_a_late_limit_is_reported_until_it_restarts_whoever_dies(
    node: LimitedNode,
) -> None:
    node.driver.limit_cgroups(Accounting.MISC)
    containers = await loaded(node)
    await containers.run(containers.limits(), driver_lease(driver_share(2000)))
    node.driver.forget_limits()
    killed = await loaded(node)
    killed.pods = containers.pods
    limits = killed.limits()
    await limits.find_out([DEVICE])
    assert await audit(limits) != []

    again = await loaded(node)
    again.pods = containers.pods
    limits = again.limits()
    await limits.find_out([DEVICE])

    assert await audit(limits) == []
    assert [finding.reason for finding in limits.findings] == ["GpuLimitTooLate"]
    await again.restart(limits)
    assert limits.findings == ()
    assert (await loaded(node)).limits().findings == ()


async def test_a_limit_that_could_not_be_cleared_is_cleared_later(node: LimitedNode) -> None:
    containers = await loaded(node)
    limits = containers.limits()
    await containers.run(limits, driver_lease(driver_share(2000)))
    node.driver.fail_limits(999)
    await limits.end(set())
    assert len(node.limits()) == 2
    node.driver.fail_limits(0)

    await limits.end(set())

    assert node.limits() == {}


# The partitioner's process


@asynccontextmanager
async def partitioner(node: LimitedNode) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run production's partitioner on the simulated driver; it is killed at the end."""
    socket = node.root / "p.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.node_agent.partitioner", "--socket", str(socket)),
        *("--cgroup-root", str(node.tree.root), "--proc-dir", str(node.root / "proc")),
        *("--fences-file", str(node.root / "fences.json"), "--log-level", "warning"),
        env=os.environ | node.driver.environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def is_served(remote: RemoteLimits) -> bool:
    try:
        await remote.accounting(DEVICE)
    except UnavailableError:
        return False
    return True


@pytest.mark.parametrize("seed", range(2))
async def test_a_partitioner_that_is_killed_while_it_sets_limits_goes_on_with_its_fences(
    node: LimitedNode, seed: int
) -> None:
    chance = random.Random(seed)  # noqa: S311 - the same moments each time
    container = node.make_container()
    remote = RemoteLimits(node.root / "p.sock", timeout_s=30)
    asked: dict[LimitTarget, list[int]] = {TARGET: [0], POD_TARGET: [0]}
    done = {TARGET: 0, POD_TARGET: 0}
    async with partitioner(node) as process:
        await until(lambda: is_served(remote))
        loop = asyncio.get_running_loop()
        for fence in range(1, 1_000_000):
            if fence == 2:  # it has set one, however busy the machine is
                loop.call_later(chance.uniform(0.01, 0.3), process.kill)
            target = (TARGET, POD_TARGET)[fence % 2]
            asked[target].append(fence)
            try:
                limit = await remote.set(target, fence=fence, memory_bytes=fence * MIB)
            except UnavailableError:
                break
            assert limit.hard_bytes == fence * MIB
            done[target] = fence
        await process.wait()

    highest = max(done.values())
    assert highest > 0
    limits = node.limits()
    places = {TARGET: container, POD_TARGET: container.parent}
    for target, place in places.items():
        assert limits.get(place, 0) // MIB in {done[target], asked[target][-1]}
    async with partitioner(node):
        await until(lambda: is_served(remote))
        assert not list(node.tree.root.glob("leasehold-trial-*"))
        for target in places:
            with pytest.raises(LimitError) as caught:
                await remote.set(target, fence=highest - 1, memory_bytes=MIB)
            assert caught.value.fault is LimitFault.OUTDATED
        assert node.limits() == limits
        newest = max(max(fences) for fences in asked.values())
        assert (await remote.set(TARGET, fence=newest, memory_bytes=5 * MIB)).hard_bytes == 5 * MIB
    with pytest.raises(LeaseholdError, match="no partitioner responds"):
        await remote.get(TARGET)
