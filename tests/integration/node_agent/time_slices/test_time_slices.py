"""Time slices of GPUs: set by nvidia-smi as leases ask for, and set back after them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.node import Node
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.time_slices.slice_setter import SliceSetter
from services.node_agent.time_slices.time_slices import TimeSlices
from shared.model.devices.device import Device
from shared.model.devices.time_slices import INTERVALS
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid, PodUid
from simcluster.gpu_driver.control import VARIABLE
from simcluster.node_agent.driver import STATE
from tests.support.gpu_driver import GpuDriver, gpu
from tests.support.node_agent.agent import OneNodeCluster, lease_of, share
from tests.support.node_agent.claims import (
    claim_lease,
    cluster_with_claims,
    pod_and_claim,
    registered,
    serving_claims,
)
from tests.support.node_agent.node import entry_of, node_of, snapshot_of
from tests.support.waiting import until

GPU, OTHER = (gpu(number) for number in (1, 2))
DEVICE = DeviceUuid(GPU.uuid)
OTHER_DEVICE = DeviceUuid(OTHER.uuid)
Make = Callable[..., TimeSlices]


@pytest.fixture
def driver(nvml: GpuDriver) -> GpuDriver:
    nvml.create(GPU, OTHER)
    return nvml


@pytest.fixture
def make(driver: GpuDriver, tmp_path: Path) -> Make:
    """Return the slices of an agent that starts, with the records of the one before."""
    nvidia_smi = SliceSetter((str(driver.folder / "nvidia-smi"),)).set
    devices = [
        Device(uuid=uuid, index=index, model="A100", memory_mib=16_384, slots=10)
        for index, uuid in enumerate((DEVICE, OTHER_DEVICE))
    ]
    checkpoint = Checkpoint(tmp_path / "checkpoint.json", "node-0")

    def made(set_slices: Any = nvidia_smi) -> TimeSlices:
        node = node_of(checkpoint=checkpoint, snapshot=snapshot_of(*devices))
        return TimeSlices(node, set_slices, tmp_path / "agent" / "time-slices.json")

    return made


async def record(node: Node, uid: str, interval: str | None, device: DeviceUuid = DEVICE) -> None:
    intervals = {"gpu": interval} if interval else {}
    part = share(device=device, container="gpu", slot=None)
    await node.checkpoint.save(entry_of(lease_of(uid, part, intervals=intervals), container="gpu"))


async def test_a_gpu_has_the_slices_that_its_leases_ask_for_until_the_last_has_ended(
    make: Make, driver: GpuDriver
) -> None:
    slices = make()
    for uid, interval in (("a", "Short"), ("b", "Short"), ("c", None)):
        await record(slices.node, uid, interval)
        await slices.ensure([DEVICE])
    lengths = [driver.timeslice(DEVICE)]

    for ended in ("a", "b"):
        await slices.node.checkpoint.forget([PodUid(ended)])
        await slices.settle()
        lengths.append(driver.timeslice(DEVICE))

    assert lengths == [1, 1, 0]
    assert driver.timeslice(OTHER_DEVICE) == 0


@pytest.mark.parametrize("interval", INTERVALS)
async def test_each_interval_has_its_number(make: Make, driver: GpuDriver, interval: str) -> None:
    slices = make()
    await record(slices.node, "a", "Long")
    await slices.ensure([DEVICE])
    await record(slices.node, "a", interval)

    await slices.ensure([DEVICE])

    assert driver.timeslice(DEVICE) == ("Default", "Short", "Medium", "Long").index(interval)


async def test_a_new_agent_sets_them_again_and_sets_back_what_the_one_before_left(
    make: Make, driver: GpuDriver
) -> None:
    before = make()
    await record(before.node, "a", "Medium")
    await record(before.node, "b", "Long", OTHER_DEVICE)
    await before.ensure([DEVICE, OTHER_DEVICE])
    driver.set_timeslice(DEVICE, 0)  # as a reboot does
    await before.node.checkpoint.forget([PodUid("b")])

    await make().settle()

    assert (driver.timeslice(DEVICE), driver.timeslice(OTHER_DEVICE)) == (2, 0)


async def test_what_somebody_else_has_set_stays_where_no_lease_asks(
    make: Make, driver: GpuDriver
) -> None:
    slices = make()
    driver.set_timeslice(DEVICE, 3)
    await record(slices.node, "a", None)
    await record(slices.node, "b", "Default", OTHER_DEVICE)

    await slices.ensure([DEVICE, OTHER_DEVICE])
    await slices.settle()

    assert driver.timeslice(DEVICE) == 3
    assert not slices.file.exists()


async def test_without_a_partitioner_the_claim_waits_with_what_to_do(make: Make) -> None:
    slices = make(None)
    await record(slices.node, "a", "Short")

    with pytest.raises(UnavailableError, match=r"no partitioner.*: add the component mig, mps or"):
        await slices.ensure([DEVICE])


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        (("sh", "-c", "echo Insufficient Permissions; exit 4"), "code 4: Insufficient Permissions"),
        (("/no/nvidia-smi",), "/no/nvidia-smi cannot be started: No such file or directory"),
        (("sh", "-c", "sleep 60"), "did not end within 0.2 s"),
    ],
)
async def test_an_nvidia_smi_that_fails_or_hangs_is_reported_once_and_tried_again(
    make: Make, program: tuple[str, ...], fault: str
) -> None:
    slices = make(SliceSetter(program, limit_s=0.2).set)
    await record(slices.node, "a", "Short")
    said = f"`nvidia-smi compute-policy -i {DEVICE} --set-timeslice 1` failed"

    with pytest.raises(UnavailableError) as refused:
        await slices.ensure([DEVICE])
    for _ in range(2):
        await slices.settle()

    assert said in str(refused.value)
    assert fault in str(refused.value)
    assert "or leave the interval out of the claim" in str(refused.value)
    [reported] = slices.node.config_errors
    assert str(refused.value) in reported


async def test_a_gpu_whose_nvidia_smi_hangs_keeps_no_other_one_waiting(make: Make) -> None:
    hanging = asyncio.Event()
    done: list[DeviceUuid] = []

    async def set_slices(device: DeviceUuid, interval: str) -> None:
        if device == DEVICE:
            hanging.set()
            await asyncio.Event().wait()
        done.append(device)

    slices = make(set_slices)
    await record(slices.node, "a", "Short")
    await record(slices.node, "b", "Short", OTHER_DEVICE)
    waiting = asyncio.create_task(slices.ensure([DEVICE]))
    await hanging.wait()

    async with asyncio.timeout(5):
        await slices.ensure([OTHER_DEVICE])

    assert done == [OTHER_DEVICE]
    waiting.cancel()


async def test_a_claim_is_prepared_once_its_slices_are_set_and_set_back_after_it(
    driver_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the agent and its kubelet: the container runs, so its claim was prepared before."""
    monkeypatch.setenv(VARIABLE, "")  # the agent sets it
    async with cluster_with_claims("1xT4") as cluster:
        gpus = cluster.root / "gpus"
        cluster.changes["gpu_driver_dir"] = gpus
        driver = GpuDriver(folder=driver_folder, state=gpus / STATE)
        async with cluster.running():
            await registered(cluster)
            _, claim = pod_and_claim(cluster)
            lease = cluster.ledger.grant(claim_lease(claim, intervals={"gpu": "Short"}))
            [device] = {share.device for share in lease.shares}
            await cluster.node.phase("one", "Running")
            running = driver.timeslice(device)
            await cluster.delete_pod("one")
            await until(lambda: driver.timeslice(device) == 0)

    assert running == 1


async def test_a_claim_whose_slices_cannot_be_set_waits_with_the_reason() -> None:
    async with serving_claims("1xT4") as (cluster, _):  # its GPUs have no nvidia-smi
        _, claim = pod_and_claim(cluster)
        cluster.ledger.grant(claim_lease(claim, intervals={"gpu": "Short"}))

        await until(lambda: event_messages(cluster))

        [message, *_] = event_messages(cluster)
        assert "has no partitioner, which sets them by nvidia-smi" in message
        assert "or leave the interval out of the claim" in message
        assert cluster.node.pod("one")["status"].get("phase") != "Running"


def event_messages(cluster: OneNodeCluster) -> list[str]:
    events = cluster.api.store.list("events")
    return [e["message"] for e in events if e["reason"] == "FailedPrepareDynamicResources"]
