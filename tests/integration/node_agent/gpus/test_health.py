"""Faulty GPUs: what kubelet, ledger and lease owners see, and recovery."""

import json
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.gpus.device_health import HealthState
from services.node_agent.gpus.health_monitor import HealthMonitor
from services.node_agent.gpus.simulated.gpus import uuid_of
from shared.model.device import Device, DeviceMode
from shared.model.events.node_events import HealthChanged, LeaseHolder
from shared.model.names import NodeName
from tests.support.node_agent.agent import NUMBER, Site, share, site
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until

QUICK = AgentTiming(simulated_look_s=0.1, simulated_backoff_s=0.5, simulated_hang_limit_s=0.2)


def state_shown(uuid: str, index: int) -> dict[str, float | None]:
    def of(state: HealthState) -> float | None:
        labels = {"device": uuid, "index": str(index), "state": str(state)}
        return REGISTRY.get_sample_value("leasehold_device_health", labels)

    return {str(state): of(state) for state in HealthState if of(state)}


def fault(at: Site, **faults: str) -> None:
    named = {name.removeprefix("gpu"): text for name, text in faults.items()}
    (at.root / "faults.json").write_text(json.dumps(named))


def device(at: Site, index: int) -> Device:
    found: Device = at.reported[-1].devices[index]
    return found


async def until_sick(at: Site, index: int, word: str = "") -> Device:
    await until(lambda: at.reported and word in device(at, index).fault.split(":")[0])
    await until(lambda: not device(at, index).healthy)
    return device(at, index)


async def test_hami_core_41_after_an_xid_a_gpu_leaves_and_its_leases_are_told_and_it_heals() -> (
    None
):
    async with site(timing=QUICK) as at, at.running():
        lease = at.bind(pod("one", limits={NUMBER: 1}), share(1))
        await at.node.phase("one", "Running")
        fault(at, gpu1="xid-79")
        await at.node.allocatable(NUMBER, 10)
        sick = await until_sick(at, 1, "cordoned")
        shown = state_shown(sick.uuid, 1)
        fault(at)
        await at.node.allocatable(NUMBER, 20)
        told = at.heard(HealthChanged)
        running = at.node.pod("one")["status"]["phase"]

    holders = (LeaseHolder(pod=lease.pod, namespace=lease.namespace, name="one"),)
    assert sick.fault == "cordoned: XidError: Xid 79, the GPU has fallen off the bus"
    assert [(one.index, one.healthy, one.holders) for one in told] == [
        (1, False, holders),
        (1, True, holders),
    ]
    assert told[0].fault == "XidError: Xid 79, the GPU has fallen off the bus"
    assert running == "Running"
    assert shown == {"cordoned": 1.0}
    assert state_shown(sick.uuid, 1) == {"healthy": 1.0}


def watched(checkup: HealthMonitor) -> list[int]:
    """Return a list that grows with each look, by the number of XIDs that it had."""
    looks: list[int] = []
    told = checkup.xids.xids

    def xids() -> Any:
        looks.append(len(told()))
        return told()

    checkup.xids.xids = xids  # type: ignore[method-assign]
    return looks


async def test_application_xids_take_no_device_from_the_kubelet() -> None:
    async with site(timing=QUICK) as at, at.running() as agent:
        fault(at, gpu0="xid-31", gpu1="xid-13")
        looks = watched(agent.health_monitor)
        await until(lambda: len(looks) > 5)
        allocatable = at.node.amount(NUMBER)

    assert allocatable == "20"
    assert sum(looks) > 5
    assert all(one.healthy for report in at.reported for one in report.devices)


async def test_the_operators_variables_decide_which_xids_are_critical(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DP_ENABLE_HEALTHCHECKS", "31")
    monkeypatch.setenv("DP_DISABLE_HEALTHCHECKS", "79")
    async with site(timing=QUICK) as at, at.running():
        fault(at, gpu0="xid-79", gpu1="xid-31")
        await until_sick(at, 1, "cordoned")

    assert all(report.devices[0].healthy for report in at.reported)


async def test_a_hanging_gpu_stalls_neither_allocate_nor_the_others_and_recovers() -> None:
    async with site(timing=QUICK) as at, at.running():
        fault(at, gpu1="hang")
        at.bind(pod("meanwhile", limits={NUMBER: 1}), share(0))
        await at.node.phase("meanwhile", "Running")
        sick = await until_sick(at, 1, "cordoned")
        healthy = device(at, 0).healthy
        fault(at)
        await at.node.allocatable(NUMBER, 20)

    assert "NoResponse" in sick.fault
    assert healthy


async def test_a_hanging_driver_does_not_stall_allocate() -> None:
    async with site(timing=QUICK) as at, at.running():
        fault(at, gpu0="hang", gpu1="hang")
        at.bind(pod("meanwhile", limits={NUMBER: 1}), share(0))
        await at.node.phase("meanwhile", "Running")
        await at.node.allocatable(NUMBER, 0)
        fault(at)
        await at.node.allocatable(NUMBER, 20)


@pytest.mark.parametrize(
    ("gpus", "text", "word", "after"),
    [
        ("2xT4", "vanish", "NotListed", {}),
        ("2xT4", "memory-8192", "MemoryChanged", {"memory_mib": 8192}),
        ("2xA100-40GB", "mode-flip", "ModeChanged", {"mode": DeviceMode.MIG}),
    ],
)
async def test_a_gpu_that_is_not_what_it_was_is_cordoned_and_returns(
    gpus: str, text: str, word: str, after: dict[str, Any]
) -> None:
    async with site(gpus, timing=QUICK) as at, at.running():
        before = device(at, 1)
        fault(at, gpu1=text)
        sick = await until_sick(at, 1, "cordoned")
        if not after:
            fault(at)
        await until(lambda: device(at, 1).healthy)
        healed = device(at, 1)

    assert word in sick.fault
    assert before.uuid == healed.uuid == uuid_of(NodeName(NODE), 1)
    assert {name: getattr(healed, name) for name in after} == after
