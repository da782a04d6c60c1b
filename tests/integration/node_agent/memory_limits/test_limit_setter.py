"""The setter beside the partitioner: what it finds out, sets, reads back, and refuses."""

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pynvml
import pytest

from services.node_agent.gpus.memory_limits import (
    UNLIMITED,
    Accounting,
    DriverAccounting,
    ForeignLimit,
    LimitError,
    LimitFault,
    LimitTarget,
)
from services.node_agent.gpus.nvml.memory_limits import NvmlMemoryLimits
from services.node_agent.memory_limits.remote_limits import RemoteLimits
from services.node_agent.mig.gpu_models import GPU_MODELS
from services.node_agent.partition.partition_server import PartitionServer
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import DeviceUuid, NodeName, PodUid
from simcluster.node_agent.gpus import SimulatedGpus
from tests.integration.node_agent.memory_limits.conftest import (
    DEVICE,
    GPU,
    ID,
    OTHER_POD,
    POD,
    POD_TARGET,
    TARGET,
    LimitedNode,
)
from tests.support.gpu_driver import GIB, MIB, gpu
from tests.support.simcluster.kubelet import NODE

BOTH = pytest.mark.parametrize("accounting", list(Accounting))


@BOTH
async def test_the_accounting_is_found_by_a_limit_on_an_own_cgroup(
    node: LimitedNode, accounting: Accounting
) -> None:
    node.driver.limit_cgroups(accounting)
    before = set(node.tree.root.iterdir())

    assert await node.setter().accounting(DEVICE) == DriverAccounting(accounting)

    assert node.limits() == {}
    assert set(node.tree.root.iterdir()) == before


async def test_a_driver_that_has_misc_although_the_kernel_has_dmem_is_found(
    node: LimitedNode,
) -> None:
    node.driver.limit_cgroups("misc")
    assert "dmem" in (node.tree.root / "cgroup.controllers").read_text()

    assert (await node.setter().accounting(DEVICE)).accounting is Accounting.MISC


async def test_trials_on_several_gpus_at_once_do_not_disturb_each_other(node: LimitedNode) -> None:
    gpus = [gpu(number) for number in range(1, 5)]
    node.driver.create(*gpus)
    setter = node.setter()

    drivers = await asyncio.gather(*(setter.accounting(DeviceUuid(made.uuid)) for made in gpus))

    assert {driver.accounting for driver in drivers} == {Accounting.DMEM}


@BOTH
async def test_limits_that_other_programs_have_set_are_found_and_stay(
    node: LimitedNode, accounting: Accounting
) -> None:
    node.driver.create(GPU, gpu(2))
    node.driver.limit_cgroups(accounting)
    own = node.make_container()
    pod = node.make_container(OTHER_POD).parent
    service = node.tree.make("system.slice/game.service/inner").parent
    setter = node.setter()
    await setter.set(POD_TARGET, fence=1, memory_bytes=4096 * MIB)
    await setter.set(TARGET, fence=1, memory_bytes=2048 * MIB)
    assert (await setter.accounting(DEVICE)).foreign == ()
    node.driver.set_limit(GPU, own, 8 * GIB)  # compared with its lease
    node.driver.set_limit(GPU, pod, 4 * GIB)
    node.driver.set_limit(GPU, service, "max", 3 * GIB)
    before = node.limits()

    foreign = (await node.setter().accounting(DEVICE)).foreign

    assert foreign == (
        ForeignLimit(cgroup=str(service), hard_bytes=UNLIMITED, soft_bytes=3 * GIB),
        ForeignLimit(cgroup=str(pod), hard_bytes=4 * GIB, pod=OTHER_POD),
    )
    assert node.limits() == before
    assert (await setter.accounting(DeviceUuid(gpu(2).uuid))).foreign == ()


async def test_a_cgroup_whose_name_is_no_text_is_named_in_what_can_be_sent(
    node: LimitedNode,
) -> None:
    node.driver.limit_cgroups(Accounting.DMEM)
    service = node.tree.make(os.fsdecode(b"system.slice/game\xff.service/inner")).parent
    node.driver.set_limit(GPU, service, 4 * GIB)

    (limit,) = (await node.setter().accounting(DEVICE)).foreign

    assert limit.cgroup == f"{node.tree.root}/system.slice/game\ufffd.service"


async def test_a_cgroup_that_the_driver_refuses_to_read_hides_no_limit_of_others(
    node: LimitedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.driver.limit_cgroups(Accounting.DMEM)
    service = node.tree.make("system.slice/game.service/inner").parent
    node.driver.set_limit(GPU, service, 4 * GIB)
    node.tree.make(f"kubepods.slice/{'long' * 50}")
    read = pynvml.nvmlDeviceGetMemoryLimits_v1

    def read_short_names(handle: Any, limits: Any) -> None:
        if len(limits.nameSpace) > len(bytes(service)) + 50:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        read(handle, limits)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryLimits_v1", read_short_names)

    (limit,) = (await node.setter().accounting(DEVICE)).foreign

    assert limit.cgroup == str(service)


@BOTH
async def test_what_a_partitioner_that_was_killed_in_a_trial_left_is_removed(
    node: LimitedNode, accounting: Accounting
) -> None:
    node.driver.limit_cgroups(accounting)
    left = node.tree.root / "leasehold-trial-1"
    left.mkdir()
    node.driver.set_limit(GPU, left, GIB)

    assert (await node.setter().accounting(DEVICE)).foreign == ()

    assert node.limits() == {}
    assert not left.exists()


async def test_before_r615_the_reason_names_it(node: LimitedNode) -> None:
    node.driver.limit_cgroups("none")

    with pytest.raises(LimitError, match="older than R615") as caught:
        await node.setter().accounting(DEVICE)

    assert caught.value.fault is LimitFault.TOO_OLD


async def test_a_gpu_in_mig_mode_is_refused(node: LimitedNode) -> None:
    node.driver.create(gpu(1, mig=True, profiles=GPU_MODELS["A100-40GB"].mig))
    node.make_container()

    with pytest.raises(RequestError, match="is in MIG mode"):
        await node.setter().accounting(DEVICE)
    with pytest.raises(RequestError, match="is in MIG mode"):
        await node.setter().set(TARGET, fence=1, memory_bytes=10 * MIB)


async def test_without_rights_the_reason_says_which(node: LimitedNode) -> None:
    node.driver.fail_limits(pynvml.NVML_ERROR_NO_PERMISSION)

    with pytest.raises(LimitError, match="CAP_SYS_ADMIN") as caught:
        await node.setter().accounting(DEVICE)

    assert caught.value.fault is LimitFault.NOT_PERMITTED


@BOTH
async def test_an_agent_whose_own_pod_is_limited_is_found(
    node: LimitedNode, accounting: Accounting
) -> None:
    node.driver.limit_cgroups(accounting)
    container = node.make_container(OTHER_POD)
    node.add_process(70, f"/{container.relative_to(node.tree.root)}")
    node.add_process(71, "/system.slice/leasehold-agent.service")
    node.tree.make("system.slice/leasehold-agent.service")
    node.driver.set_limit(GPU, container.parent, 4 * GIB)
    setter = node.setter()

    assert (await setter.accounting(DEVICE, agent_pid=70)).agent_limit_mib == 4096
    assert (await setter.accounting(DEVICE, agent_pid=71)).agent_limit_mib is None


@BOTH
async def test_limits_of_a_pod_and_its_container_are_set_read_and_cleared(
    node: LimitedNode, accounting: Accounting
) -> None:
    node.driver.limit_cgroups(accounting)
    container = node.make_container()
    setter = node.setter()

    assert (await setter.set(POD_TARGET, fence=3, memory_bytes=4096 * MIB)).hard_bytes == 4 * GIB
    assert (await setter.set(TARGET, fence=3, memory_bytes=2048 * MIB)).hard_bytes == 2 * GIB
    assert node.limits() == {container.parent: 4 * GIB, container: 2 * GIB}
    assert (await setter.get(TARGET)).hard_bytes == 2 * GIB

    await setter.clear(POD_TARGET, fence=3)
    assert (await setter.clear(TARGET, fence=3)).hard_bytes == UNLIMITED
    assert node.limits() == {}


async def test_a_lowering_that_the_driver_ignores_is_read_back_and_one_that_it_refuses_fails(
    node: LimitedNode,
) -> None:
    container = node.make_container()
    setter = node.setter()
    await setter.set(TARGET, fence=1, memory_bytes=4096 * MIB)
    assert node.load(container).fits("3g")

    assert (await setter.set(TARGET, fence=1, memory_bytes=1024 * MIB)).hard_bytes == 4 * GIB
    node.driver.limit_cgroups("misc")
    with pytest.raises(LimitError, match="refuses the limit") as caught:
        await setter.set(TARGET, fence=1, memory_bytes=1024 * MIB)

    assert caught.value.fault is LimitFault.REFUSED
    assert (await setter.get(TARGET)).hard_bytes == 4 * GIB


async def test_an_older_fence_changes_nothing_also_after_a_restart(node: LimitedNode) -> None:
    container = node.make_container()
    await node.setter().set(TARGET, fence=7, memory_bytes=1024 * MIB)
    setter = node.setter()

    for target in (TARGET, POD_TARGET):
        with pytest.raises(LimitError, match="fence 7") as caught:
            await setter.set(target, fence=6, memory_bytes=8192 * MIB)
        assert caught.value.fault is LimitFault.OUTDATED
    with pytest.raises(LimitError, match="fence 7"):
        await setter.clear(TARGET, fence=6)

    assert setter.refused_fences == 3
    assert node.limits() == {container: GIB}
    assert (await setter.set(TARGET, fence=7, memory_bytes=2048 * MIB)).hard_bytes == 2 * GIB
    assert (await setter.set(TARGET, fence=8, memory_bytes=512 * MIB)).hard_bytes == GIB // 2


async def test_the_fence_of_another_pod_or_gpu_does_not_count(node: LimitedNode) -> None:
    node.driver.create(GPU, gpu(2))
    node.make_container()
    node.make_container(OTHER_POD)
    setter = node.setter()
    await setter.set(TARGET, fence=7, memory_bytes=1024 * MIB)

    await setter.set(LimitTarget(DEVICE, OTHER_POD, ID), fence=1, memory_bytes=10 * MIB)
    await setter.set(LimitTarget(DeviceUuid(gpu(2).uuid), POD, ID), fence=1, memory_bytes=10 * MIB)


async def test_fences_are_forgotten_with_their_pods(node: LimitedNode) -> None:
    container = node.make_container()
    setter = node.setter()
    await setter.set(TARGET, fence=7, memory_bytes=1024 * MIB)
    for path in (container, container.parent):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()

    assert (await setter.clear(TARGET, fence=7)).is_none

    assert json.loads((node.root / "fences.json").read_text()) == {}
    with pytest.raises(UnavailableError, match="has no cgroup"):
        await setter.set(TARGET, fence=7, memory_bytes=1024 * MIB)


async def test_fences_of_pods_that_are_limited_at_once_are_all_kept(node: LimitedNode) -> None:
    pods = [PodUid(f"{number:08x}-4e5f-6071-8293-a4b5c6d7e8f9") for number in range(20)]
    for pod in pods:
        node.tree.make_pod(pod)
    setter = node.setter()

    await asyncio.gather(
        *(setter.set(LimitTarget(DEVICE, pod), fence=3, memory_bytes=GIB) for pod in pods)
    )

    fences = json.loads((node.root / "fences.json").read_text())
    assert fences == {f"{DEVICE}/{pod}": 3 for pod in pods}


async def test_fences_that_are_unreadable_set_nothing(node: LimitedNode) -> None:
    node.make_container()
    (node.root / "fences.json").write_text("[")

    with pytest.raises(UnavailableError, match="are unreadable"):
        await node.setter().set(TARGET, fence=1, memory_bytes=1024 * MIB)

    assert node.limits() == {}


@pytest.mark.parametrize(
    ("target", "memory_bytes", "message"),
    [
        (LimitTarget(DEVICE, PodUid("../.."), ID), 10, "not the UID of a pod"),
        (LimitTarget(DEVICE, POD, "../x"), 10, "not the ID of a container"),
        (LimitTarget(DeviceUuid("GPU-other"), POD, ID), 10, "is not on this node"),
        (TARGET, 0, "cannot be 0 bytes"),
        (TARGET, -1, "cannot be -1 bytes"),
        (TARGET, 2**63, "cannot be"),
    ],
)
async def test_what_names_nothing_is_refused(
    node: LimitedNode, target: LimitTarget, memory_bytes: int, message: str
) -> None:
    node.make_container()

    with pytest.raises(RequestError, match=message):
        await node.setter().set(target, fence=1, memory_bytes=memory_bytes)

    assert node.limits() == {}


@asynccontextmanager
async def served(node: LimitedNode) -> AsyncIterator[RemoteLimits]:
    gpus = SimulatedGpus(NodeName(NODE), "1xT4")
    server = PartitionServer(gpus, agent_uid=os.geteuid(), limits=node.setter())
    async with server.serve(node.root / "p.sock"):
        yield RemoteLimits(node.root / "p.sock", timeout_s=30)


async def test_the_agent_reaches_it_on_the_partitioners_socket(node: LimitedNode) -> None:
    container = node.make_container()
    node.add_process(os.getpid(), f"/{container.relative_to(node.tree.root)}")
    async with served(node) as remote:
        assert (await remote.accounting(DEVICE)).agent_limit_mib is None
        assert (await remote.set(TARGET, fence=2, memory_bytes=1024 * MIB)).hard_bytes == GIB
        assert (await remote.get(TARGET)).hard_bytes == GIB
        assert (await remote.accounting(DEVICE)).agent_limit_mib == 1024
        with pytest.raises(LimitError, match="fence 2") as caught:
            await remote.clear(TARGET, fence=1)
        assert caught.value.fault is LimitFault.OUTDATED
        assert (await remote.clear(TARGET, fence=2)).is_none

    with pytest.raises(UnavailableError, match="no partitioner responds"):
        await remote.get(TARGET)


async def test_a_limit_is_set_while_limits_of_other_programs_are_looked_for(
    node: LimitedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long where there are many cgroups; the pod of the limit is none of another one."""
    node.make_container()
    node.make_container(OTHER_POD)
    listing = asyncio.Event()
    go_on = asyncio.Event()
    list_limits = NvmlMemoryLimits.list

    async def list_slowly(*arguments: Any) -> Any:
        listing.set()
        await go_on.wait()
        return await list_limits(*arguments)

    monkeypatch.setattr(NvmlMemoryLimits, "list", list_slowly)
    async with served(node) as remote, asyncio.timeout(10):
        looking = asyncio.create_task(remote.accounting(DEVICE))
        await listing.wait()
        try:
            assert (await remote.set(TARGET, fence=1, memory_bytes=GIB)).hard_bytes == GIB
        finally:
            go_on.set()
        assert (await looking).foreign == ()


def random_line(source: random.Random) -> bytes:
    """Return a message that sets nothing: noise, a valid one with a part replaced, or of old."""
    target = {"device": GPU.uuid, "pod": POD, "container_id": ID}
    kinds = ("SetLimitRequest", "GetLimitRequest", "ClearLimitRequest", "AccountingRequest")
    message: dict[str, Any] = {
        "type": source.choice((*kinds, "Reset", "InstancesRequest", "PartitionRequest")),
        "target": target,
        "device": source.choice((GPU.uuid, "", "GPU-x")),
        "fence": source.randint(-5, 6),
        "memory_bytes": source.choice((1, 512, 1 << 40, -1)),
    }
    form = source.randrange(4)
    if form == 0:
        return source.randbytes(source.randrange(200)).replace(b"\n", b" ") + b"\n"
    if form == 1:
        target[source.choice(("device", "pod", "container_id"))] = source.choice(
            ("", "/", "../../x", "0" * 64, "\u0000", OTHER_POD[:-1] + "0")
        )
        message["fence"] = source.randint(-5, 100)
        target["pod"] = target["pod"] if target["pod"] != POD else OTHER_POD
    elif form == 2:
        message[source.choice(("type", "target", "fence", "memory_bytes"))] = source.choice(
            (None, [], "max", 1.5, {}, True)
        )
        message["fence"] = min(message["fence"], 6) if message["fence"] in range(7) else "x"
    return json.dumps(message).encode() + b"\n"


async def test_ten_thousand_random_messages_change_nothing(node: LimitedNode) -> None:
    container = node.make_container()
    source = random.Random(56)  # noqa: S311 - the same messages each time
    async with served(node) as remote:
        await remote.set(TARGET, fence=7, memory_bytes=1024 * MIB)
        fences = (node.root / "fences.json").read_bytes()
        before = node.limits()
        reader, writer = await asyncio.open_unix_connection(node.root / "p.sock")
        sent = 0
        with contextlib.closing(writer):
            while sent < 10_000:
                batch = [random_line(source) for _ in range(100)]
                writer.write(b"".join(batch))
                for _ in batch:
                    assert json.loads(await reader.readline())["type"]
                sent += len(batch)

        assert node.limits() == before == {container: GIB}
        assert (node.root / "fences.json").read_bytes() == fences
        assert (await remote.get(TARGET)).hard_bytes == GIB
