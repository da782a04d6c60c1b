"""The driver's limits of containers: before they start, while they run, and after they end."""

import asyncio
import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
from msgspec import structs

from services.node_agent.allocate.device_list_strategies import DeviceListStrategy
from services.node_agent.enforcers.driver import DriverLimits
from services.node_agent.enforcers.enforcer import Difference
from services.node_agent.gpus.memory_limits import Accounting, LimitError, LimitTarget
from services.node_agent.kubelet.pods import KubeletPod
from services.node_agent.memory_limits import limit_setter
from services.node_agent.memory_limits.container_limits import (
    ContainerLimits,
    LimitShortageError,
    fence_of,
)
from services.node_agent.memory_limits.hook_program import HookProgram
from services.node_agent.memory_limits.hook_server import ContainerState, HookCall
from services.node_agent.records import checkpoint as checkpoint_module
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.leases.lease import ClaimAllocation, Lease, Share
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from tests.integration.node_agent.memory_limits.conftest import (
    DEVICE,
    GPU,
    ID,
    OTHER_POD,
    POD,
    LimitedNode,
)
from tests.support.effort import tries
from tests.support.gpu_driver import GIB, MIB, gpu
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.node import entry_of

SECOND = gpu(2)
OTHER_ID = "f" * 64
BOTH = pytest.mark.parametrize("accounting", list(Accounting))


def driver_share(memory_mib: int, container: str = "main", **changes: Any) -> Share:
    facts: dict[str, Any] = {
        "index": 0,
        "device": DEVICE,
        "memory": "driver",
        "mode": "driver",
        "fence": 7,
    }
    return share(memory_mib=memory_mib, container=container, **(facts | changes))


def driver_lease(*shares: Share, pod: PodUid = POD) -> Lease:
    return lease_of(pod, *shares)


@dataclass(kw_only=True)
class Containers:
    """The node's limits as an agent has them, and what a runtime and a kubelet do."""

    node: LimitedNode
    checkpoint: Checkpoint
    pods: list[KubeletPod] = field(default_factory=list)
    list_error: LeaseholdError | None = None
    pid: int = 1000

    def limits(self) -> ContainerLimits:
        """Return the limits as after a start of the agent and of the partitioner."""
        built = self.node.root / "hook"
        built.write_bytes(b"program")
        root = self.node.root
        return ContainerLimits(
            NodeName("node-0"),
            self.node.setter(),
            self.checkpoint,
            HookProgram(root / "agent", root / "cdi", built),
            strategies=lambda: (DeviceListStrategy.CDI_CRI,),
            list_pods=self.list_pods,
            proc=root / "proc",
            bundles=[root / "bundles"],
        )

    async def list_pods(self) -> list[KubeletPod]:
        if self.list_error is not None:
            raise self.list_error
        return self.pods

    async def give(self, lease: Lease) -> list[CheckpointEntry]:
        """Record the containers of a lease, as Allocate does."""
        entries = [entry_of(lease, container=name) for name in lease.containers]
        for entry in entries:
            await self.checkpoint.save(entry)
        return entries

    def create(
        self, pod: PodUid = POD, container_id: str = ID, env: Iterable[str] = ("PATH=/bin",)
    ) -> ContainerState:
        """Create a container as a runtime does, up to the call of its hook."""
        cgroup = self.node.make_container(pod, container_id)
        self.pid += 1
        self.node.add_process(self.pid, f"/{cgroup.relative_to(self.node.tree.root)}")
        bundle = self.node.root / "bundles" / container_id
        bundle.mkdir(parents=True, exist_ok=True)
        (bundle / "config.json").write_text(json.dumps({"process": {"env": list(env)}}))
        return ContainerState(container_id, self.pid, str(bundle))

    async def run(
        self, limits: ContainerLimits, lease: Lease, container_id: str = ID
    ) -> CheckpointEntry:
        """Run the first container of a lease: PreStart, the runtime's hook, the kubelet's list."""
        (entry, *_) = await self.give(lease)
        self.node.tree.make_pod(lease.pod)
        await limits.limit_pods(entry)
        await limits.start_container(call_of(entry, self.create(lease.pod, container_id)))
        self.show(lease.pod, {container_id: entry.allocation.container})
        return entry

    async def restart(self, limits: ContainerLimits) -> None:
        """Restart the first container that was recorded, under another ID."""
        entry = self.checkpoint.entries[0]
        await limits.start_container(call_of(entry, self.create(POD, OTHER_ID)))
        self.show(POD, {OTHER_ID: entry.allocation.container})

    def show(self, pod: PodUid, ids: dict[str, str]) -> None:
        self.pods = [other for other in self.pods if other.uid != pod]
        self.pods.append(
            KubeletPod(uid=pod, namespace=Namespace("default"), name="pod", container_ids=ids)
        )

    def path(self, pod: PodUid = POD, container_id: str = "") -> Path:
        directory = self.node.tree.make_pod(pod)
        return directory / f"cri-containerd-{container_id}.scope" if container_id else directory


@pytest.fixture
async def containers(node: LimitedNode) -> Containers:
    checkpoint = Checkpoint(node.root / "checkpoint.json", "node-0")
    return Containers(node=node, checkpoint=checkpoint)


def call_of(entry: CheckpointEntry, state: ContainerState, **changes: Any) -> HookCall:
    allocation = entry.allocation
    call = HookCall(allocation.pod, allocation.container, fence_of(entry), state)
    return structs.replace(call, **changes)


async def audit(limits: ContainerLimits) -> list[Difference]:
    """Compare and put back, as the agent does every 30 s; return what differed."""
    limits.listed.read_at = -math.inf
    found: list[Difference] = []
    for entry in limits.checkpoint.entries:
        read = await limits.read_back(entry)
        if read is not None and read.differences:
            found += read.differences
            with contextlib.suppress(LeaseholdError):
                await limits.resize(entry)
    return found


async def reasons(limits: ContainerLimits) -> list[str]:
    return [difference.reason for difference in await audit(limits)]


# Before the first process


async def test_a_pod_is_limited_to_what_its_containers_can_have_at_once(
    containers: Containers,
) -> None:
    containers.node.driver.create(GPU, SECOND)
    second: dict[str, Any] = {"device": DeviceUuid(SECOND.uuid), "index": 1}
    lease = driver_lease(
        driver_share(2500, "init", init=True),
        driver_share(1000),
        driver_share(2000, "sidecar"),
        driver_share(300, **second),
    )
    (_, main, _) = await containers.give(lease)
    containers.node.tree.make_pod(POD)

    await containers.limits().limit_pods(main)

    assert containers.node.limits() == {containers.path(): 3000 * MIB}
    assert containers.node.limits(SECOND) == {containers.path(): 300 * MIB}
    calls = containers.node.driver.limit_calls()
    await containers.limits().limit_pods(main)
    assert containers.node.driver.limit_calls() == calls + 2  # they are read, and not set again


async def test_a_pod_whose_limit_cannot_be_set_does_not_start(containers: Containers) -> None:
    (entry,) = await containers.give(driver_lease(driver_share(1000)))
    limits = containers.limits()
    with pytest.raises(UnavailableError, match="has no cgroup"):
        await limits.limit_pods(entry)
    containers.node.tree.make_pod(POD)
    for code in (pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
        containers.node.driver.fail_limits(code)
        with pytest.raises(LimitError):
            await limits.limit_pods(entry)

    containers.node.driver.fail_limits(0)
    await limits.limit_pods(entry)


@BOTH
async def test_a_container_has_its_limit_on_each_gpu_before_it_starts(
    containers: Containers, accounting: Accounting
) -> None:
    containers.node.driver.create(GPU, SECOND)
    containers.node.driver.limit_cgroups(accounting)
    second: dict[str, Any] = {"device": DeviceUuid(SECOND.uuid), "index": 1}
    lease = driver_lease(
        driver_share(2000), driver_share(300, **second), driver_share(500, "other")
    )

    await containers.run(containers.limits(), lease)

    own = containers.path(container_id=ID)
    assert containers.node.limits() == {containers.path(): 2500 * MIB, own: 2000 * MIB}
    assert containers.node.limits(SECOND) == {containers.path(): 300 * MIB, own: 300 * MIB}
    load = containers.node.load(own)
    assert load.value("info", "total") == 2000 * MIB
    assert not load.fits("2g")
    assert load.fits("1g")


async def test_a_restarted_container_gets_its_limit_anew_and_its_earlier_one_is_cleared(
    containers: Containers,
) -> None:
    limits = containers.limits()
    await containers.run(limits, driver_lease(driver_share(2000)))

    await containers.restart(limits)

    assert containers.node.limits() == {
        containers.path(): 2000 * MIB,
        containers.path(container_id=OTHER_ID): 2000 * MIB,
    }


async def test_a_call_that_does_not_fit_sets_no_limit_and_is_reported_once(
    containers: Containers,
) -> None:
    limits = containers.limits()
    (entry,) = await containers.give(driver_lease(driver_share(2000)))
    state = containers.create()
    foreign = containers.create(OTHER_POD, OTHER_ID)
    gone = structs.replace(state, pid=999_999)
    for call, message in (
        (call_of(entry, state, fence=6), "fence 6"),
        (call_of(entry, state, fence=8), "fence 8"),
        (call_of(entry, structs.replace(state, id=OTHER_ID)), "the runtime starts"),
        (call_of(entry, foreign), "the runtime starts"),
        (call_of(entry, gone), "is not readable"),
    ):
        with pytest.raises(LeaseholdError, match=message):
            await limits.start_container(call)
    for name in ("other", "main"):
        holder = POD if name == "other" else OTHER_POD
        with pytest.raises(RequestError, match="has given container"):
            await limits.start_container(call_of(entry, state, holder=holder, container=name))

    assert containers.node.limits() == {}
    (finding,) = limits.findings
    assert finding.reason == "GpuLimitHookRefused"
    assert "did not start" in finding.message
    await limits.start_container(call_of(entry, state))
    assert limits.findings == ()


async def test_a_container_whose_pod_ends_while_its_hook_waits_does_not_start(
    containers: Containers,
) -> None:
    limits = containers.limits()
    (entry,) = await containers.give(driver_lease(driver_share(2000)))
    async with containers.checkpoint.changing.hold(POD):
        starting = asyncio.create_task(limits.start_container(call_of(entry, containers.create())))
        await asyncio.sleep(0)  # it has found the record
        await containers.checkpoint.forget((POD,))

    with pytest.raises(RequestError, match="has ended meanwhile"):
        await starting


async def test_a_container_does_not_start_if_one_of_its_gpus_has_another_limit(
    containers: Containers,
) -> None:
    """Each GPU is read back: the driver ignores a limit below what is in use."""
    containers.node.driver.create(GPU, SECOND)
    limits = containers.limits()
    second: dict[str, Any] = {"device": DeviceUuid(SECOND.uuid), "index": 1}
    lease = driver_lease(driver_share(2000), driver_share(1000, **second))
    (entry,) = await containers.give(lease)
    state = containers.create()
    own = containers.path(container_id=ID)
    load = containers.node.load(own)
    assert "ok" in load.do("device 1")
    assert load.fits("3g")

    with pytest.raises(LimitShortageError, match=SECOND.uuid):
        await limits.start_container(call_of(entry, state))

    load.kill()
    await limits.start_container(call_of(entry, state))
    assert containers.node.limits(SECOND) == {containers.path(): 1000 * MIB, own: 1000 * MIB}


async def test_a_prepared_claim_has_the_limit_of_its_pod_or_is_not_prepared(
    containers: Containers,
) -> None:
    """NodePrepareResources comes when the pod's cgroup exists, and before any container does."""
    enforcer = DriverLimits(containers.limits())
    claim = ClaimAllocation(generation="g", consumers=(OTHER_POD,))
    lease = structs.replace(driver_lease(driver_share(2000)), claim=claim)
    entry = entry_of(lease, container="main")

    with pytest.raises(UnavailableError, match="has no cgroup"):
        await enforcer.prepare(entry, starting=False, new=True)
    assert containers.node.limits() == {}
    containers.node.tree.make_pod(OTHER_POD)
    await enforcer.prepare(entry, starting=False, new=True)

    assert containers.node.limits() == {containers.path(OTHER_POD): 2000 * MIB}
    shared = replace(claim, consumers=(POD, OTHER_POD))
    with pytest.raises(RequestError, match="used by 2 pods"):
        await enforcer.prepare(
            entry_of(structs.replace(lease, claim=shared), container="main"),
            starting=False,
            new=True,
        )


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (["NVIDIA_GPU_MEMORY_LIMIT=8192", "NVIDIA_GPU_MEMORY_REQUEST=8192"], "another limit"),
        (["NVIDIA_GPU_MEMORY_LIMIT=2000"], "another limit"),
        (["NVIDIA_GPU_MEMORY_REQUEST=2000"], "another limit"),
        (["NVIDIA_GPU_MEMORY_LIMIT=2000", "NVIDIA_GPU_MEMORY_REQUEST=2000"], ""),
        (["CUDA_MPS_PIPE_DIRECTORY=/x"], "use MPS"),
    ],
)
async def test_variables_of_an_image_that_would_set_other_limits_are_refused(
    containers: Containers, env: list[str], message: str
) -> None:
    limits = containers.limits()
    (entry,) = await containers.give(driver_lease(driver_share(2000)))
    call = call_of(entry, containers.create(env=env))
    if not message:
        await limits.start_container(call)
        return

    with pytest.raises(RequestError, match=message):
        await limits.start_container(call)

    assert containers.node.limits() == {}


async def test_a_container_without_a_readable_specification_does_not_start(
    containers: Containers,
) -> None:
    limits = containers.limits()
    (entry,) = await containers.give(driver_lease(driver_share(2000)))
    state = containers.create()
    config = containers.node.root / "bundles" / ID / "config.json"
    config.write_text("[")
    with pytest.raises(RequestError, match="is not an OCI specification"):
        await limits.start_container(call_of(entry, state))
    config.unlink()
    with pytest.raises(UnavailableError, match="bundle-dir"):
        await limits.start_container(call_of(entry, state))


# While it runs


async def test_what_somebody_raised_or_removed_is_put_back_and_reported(
    containers: Containers,
) -> None:
    limits = containers.limits()
    await containers.run(limits, driver_lease(driver_share(2000)))
    own = containers.path(container_id=ID)
    assert await audit(limits) == []
    containers.node.driver.set_limit(GPU, own, 8 * GIB)
    containers.node.driver.set_limit(GPU, containers.path(), "max")

    differences = await audit(limits)

    assert sorted(difference.reason for difference in differences) == [
        "GpuLimitDiffers",
        "GpuLimitMissing",
    ]
    assert any(
        "has 8192 MiB" in found.text and "instead of 2000 MiB" in found.text
        for found in differences
    )
    assert containers.node.limits() == {containers.path(): 2000 * MIB, own: 2000 * MIB}
    assert await audit(limits) == []


@BOTH
async def test_limits_that_a_reboot_of_the_driver_lost_are_set_again_by_a_new_agent(
    containers: Containers, accounting: Accounting
) -> None:
    containers.node.driver.limit_cgroups(accounting)
    await containers.run(containers.limits(), driver_lease(driver_share(2000)))
    before = containers.node.limits()
    containers.node.driver.forget_limits()
    limits = containers.limits()
    await limits.find_out([DEVICE])

    assert set(await reasons(limits)) == {"GpuLimitMissing"}

    assert containers.node.limits() == before
    assert await audit(limits) == []
    # With `misc`, what the container allocated before is not counted: it stays listed.
    late = ["GpuLimitTooLate"] if accounting is Accounting.MISC else []
    assert [finding.reason for finding in limits.findings] == late
    await containers.restart(limits)
    assert limits.findings == ()


@pytest.mark.parametrize("of_pod", [False, True])
async def test_a_gap_on_the_way_to_a_container_is_reported_with_its_directory(
    containers: Containers, *, of_pod: bool
) -> None:
    limits = containers.limits()
    await limits.find_out([DEVICE])
    await containers.run(limits, driver_lease(driver_share(2000)))
    above = containers.path().parent if of_pod else containers.path()
    containers.node.tree.enable(above, "cpu")

    differences = await audit(limits)

    assert {difference.reason for difference in differences} == {"GpuLimitChainBroken"}
    gap = containers.path() if of_pod else containers.path(container_id=ID)
    assert all(f"cgroup {gap} has no files" in difference.text for difference in differences)


async def test_a_driver_that_sets_nothing_any_more_is_reported(containers: Containers) -> None:
    limits = containers.limits()
    await containers.run(limits, driver_lease(driver_share(2000)))
    containers.node.driver.limit_cgroups("none")

    assert set(await reasons(limits)) == {"GpuLimitMissing"}


@BOTH
async def test_a_resize_changes_pod_and_container_and_never_falls_below_the_use(
    containers: Containers, accounting: Accounting
) -> None:
    containers.node.driver.limit_cgroups(accounting)
    limits = containers.limits()
    await limits.find_out([DEVICE])
    await containers.run(limits, driver_lease(driver_share(2000)))
    own = containers.path(container_id=ID)

    (grown,) = await containers.give(driver_lease(driver_share(4000)))
    await limits.resize(grown)
    assert containers.node.limits() == {containers.path(): 4000 * MIB, own: 4000 * MIB}
    load = containers.node.load(own)
    assert load.fits("3g")
    (small,) = await containers.give(driver_lease(driver_share(1000)))
    with pytest.raises(LimitShortageError, match="MiB are in use") as caught:
        await limits.resize(small)
    assert caught.value.used_mib == 3 * 1024 + 256
    assert containers.node.limits() == {containers.path(): 4000 * MIB, own: 4000 * MIB}
    load.kill()

    await audit(limits)  # less is in use now

    assert containers.node.limits() == {containers.path(): 1000 * MIB, own: 1000 * MIB}
    assert await audit(limits) == []


async def test_limits_of_a_container_that_is_forgotten_meanwhile_are_read_back(
    containers: Containers,
) -> None:
    """Its pod may end while its limit is lowered."""
    limits = containers.limits()
    entry = await containers.run(limits, driver_lease(driver_share(4000)))
    await containers.checkpoint.forget((POD,))

    read = await limits.read_back(entry)

    assert read is not None
    assert not read.differences
    assert [limit.memory_bytes for limit in read.limits] == [4000 * MIB]


async def test_an_older_agent_does_not_raise_what_a_newer_lease_limits(
    containers: Containers,
) -> None:
    limits = containers.limits()
    await containers.run(limits, driver_lease(driver_share(2000, fence=8)))
    late = containers.limits()

    with pytest.raises(LimitError, match="fence 8"):
        await late.resize(entry_of(driver_lease(driver_share(9000, fence=7))))

    assert set(containers.node.limits().values()) == {2000 * MIB}


async def test_two_hundred_containers_are_compared_within_two_calls_each(
    containers: Containers,
) -> None:
    limits = containers.limits()
    for number in range(200):
        pod = PodUid(f"{number:08x}-4e5f-6071-8293-a4b5c6d7e8f9")
        lease = driver_lease(driver_share(10, slot=number), pod=pod)
        await containers.run(limits, lease, f"{number:064x}")
    calls = containers.node.driver.limit_calls()
    began = time.process_time()

    assert await audit(limits) == []

    assert containers.node.driver.limit_calls() - calls <= 2 * 200
    assert time.process_time() - began <= 2


# After its end


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in this thread: of many thousand calls, another thread costs most."""
    return function(*arguments)


@BOTH
async def test_a_thousand_containers_that_came_and_went_leave_nothing(
    containers: Containers, accounting: Accounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on a cgroup above them: the driver raises its guarantee by a soft limit, for ever."""
    monkeypatch.setattr(limit_setter, "MOST_FENCES", 100)
    for module in (limit_setter, checkpoint_module):  # a loss of power is no part of this
        monkeypatch.setattr(module, "replace_file", Path.write_bytes)
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    containers.node.driver.limit_cgroups(accounting)
    limits = containers.limits()
    await limits.find_out([DEVICE])
    await containers.run(limits, driver_lease(driver_share(500), pod=OTHER_POD), OTHER_ID)
    before = containers.node.limits()
    is_dmem = accounting is Accounting.DMEM
    for number in range(tries(1000)):
        pod = PodUid(f"{number:08x}-4e5f-6071-8293-a4b5c6d7e8f9")
        await containers.run(limits, driver_lease(driver_share(10), pod=pod), f"{number:064x}")
        if number % 100 == 0:
            assert len(containers.node.limits()) == 4
        await containers.checkpoint.forget([pod])
        is_removed_first = is_dmem and number % 2 == 0  # the kernel drops its limits
        if is_removed_first:
            shutil.rmtree(containers.path(pod))
        await limits.end({OTHER_POD})
        if not is_removed_first:
            shutil.rmtree(containers.path(pod))

    assert containers.node.limits() == before
    assert set(containers.node.driver.soft_limits(GPU).values()) == {0}
    assert limits._targets.keys() == {
        LimitTarget(DEVICE, OTHER_POD),
        LimitTarget(DEVICE, OTHER_POD, OTHER_ID),
    }
    fences = json.loads((containers.node.root / "fences.json").read_text())
    assert len(fences) <= 100


@BOTH
async def test_a_pod_that_has_ended_leaves_no_limit(
    containers: Containers, accounting: Accounting
) -> None:
    containers.node.driver.limit_cgroups(accounting)
    limits = containers.limits()
    await containers.run(limits, driver_lease(driver_share(2000)))
    await containers.run(limits, driver_lease(driver_share(500), pod=OTHER_POD), OTHER_ID)
    await limits.end({POD, OTHER_POD})
    assert len(containers.node.limits()) == 4

    await limits.end({OTHER_POD})

    assert set(containers.node.limits()) == {
        containers.path(OTHER_POD),
        containers.path(OTHER_POD, OTHER_ID),
    }
