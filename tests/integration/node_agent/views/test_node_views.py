"""What a node agent shows of its node, and says while there is no driver."""

import pytest

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.gpus.simulated.gpus import SimulatedGpus
from shared.model.clock import SystemClock
from shared.model.errors import RequestError
from shared.model.names import NodeName
from tests.support.node_agent.agent import MEMORY, NUMBER, share, site
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until


async def test_registers_its_resources_and_shows_the_node_its_figures() -> None:
    async with site("2xT4") as at, at.running():
        await at.node.allocatable(NUMBER, 20)
        await at.node.allocatable("volcano.sh/vgpu-memory", 30720)
        await at.node.allocatable("volcano.sh/vgpu-cores", 200)
        await at.node.allocatable("volcano.sh/gpu-memory", 30720)
        await at.node.allocatable("volcano.sh/gpu-number", 2)
        report = (await until(lambda: at.reported))[0]

    assert [device.index for device in report.devices] == [0, 1]
    assert set(report.served) >= {NUMBER, "volcano.sh/gpu-memory"}


async def test_an_unhealthy_gpu_leaves_the_node_and_comes_back() -> None:
    async with site() as at, at.running():
        (at.root / "faults.json").write_text('{"1": "unhealthy"}')
        await at.node.allocatable(NUMBER, 10)
        await at.node.allocatable("volcano.sh/vgpu-cores", 100)
        reports = await until(
            lambda: [r for r in at.reported if not all(d.healthy for d in r.devices)]
        )
        (at.root / "faults.json").write_text("{}")
        await at.node.allocatable(NUMBER, 20)

    assert [device.healthy for device in reports[0].devices] == [True, False]


async def test_the_register_annotation_and_patched_amounts_come_back_if_they_are_lost() -> None:
    async with site() as at, at.running() as agent:
        await at.node.allocatable("volcano.sh/vgpu-cores", 200)
        key = "volcano.sh/node-vgpu-register"
        await until(lambda: at.node.node()["metadata"]["annotations"].get(key))
        at.node.store.patch("nodes", None, NODE, {"metadata": {"annotations": {key: None}}})
        lost = {
            "status": {
                part: {"volcano.sh/vgpu-cores": None} for part in ("capacity", "allocatable")
            }
        }
        at.node.store.patch("nodes", None, NODE, lost, subresource="status")
        agent.watcher.advertise(agent.state.shown)
        await at.node.allocatable("volcano.sh/vgpu-cores", 200)
        await until(lambda: at.node.node()["metadata"]["annotations"].get(key))


async def test_item_14_a_handshake_is_reported_over_what_a_scheduler_made_of_it() -> None:
    key = "volcano.sh/node-vgpu-handshake"

    def said() -> str:
        return str(at.node.node()["metadata"].get("annotations", {}).get(key, ""))

    async with site(volcano_handshake=True) as at:
        async with at.running():
            await until(lambda: said().startswith("Reported "))
        deleted = {"metadata": {"annotations": {key: "Deleted_2026.08.20 10:00:00"}}}
        at.node.store.patch("nodes", None, NODE, deleted)
        async with at.running():
            await until(lambda: said().startswith("Reported "))


async def test_17_a_strategy_that_no_kubelet_takes_ends_the_start_with_the_factor_needed() -> None:
    async with site("8xA100-80GB", gpu_strategy="share") as at:
        with pytest.raises(RequestError, match=r"use a memory factor of \d or more"):
            async with at.running():
                pass


async def test_without_a_driver_it_waits_and_says_so() -> None:
    async with site("nvml") as at, at.running(registered=False) as agent:
        await until(lambda: "not been discovered yet" not in (agent.watcher.unready_reason() or ""))

        assert "Install the NVIDIA driver" in (agent.watcher.unready_reason() or "")
        assert at.reported == []


async def test_a_driver_that_comes_late_is_found_without_a_restart() -> None:
    async with (
        site("nvml", timing=AgentTiming(nvml_look_s=0.1)) as at,
        at.running(registered=False) as agent,
    ):
        await until(lambda: "Install the NVIDIA driver" in (agent.watcher.unready_reason() or ""))
        agent.watcher.discover = SimulatedGpus(NodeName(NODE), "2xT4").discover
        await until(lambda: at.reported)

        assert agent.watcher.unready_reason() is None
        assert len(at.reported[-1].devices) == 2


async def test_memory_too_long_for_a_list_is_asked_for_by_a_trigger() -> None:
    async with site("8xA100-80GB") as at, at.running():
        lease = share(3, 40960, slotted=False, slot=None, cores_percent=0)
        limits = {MEMORY: 40960, "leasehold.dev/share": 1}
        await at.node.allocatable(MEMORY, 8 * 81920)
        at.bind(pod("one", limits=limits), lease, dialect="volcano-gpushare")
        await at.node.phase("one", "Running")

        assert at.env("one")["NVIDIA_VISIBLE_DEVICES"] == "3"
        assert at.env("one")["VOLCANO_GPU_ALLOCATED"] == "40960"


class SetBack(SystemClock):
    """A clock that somebody sets back by an hour."""

    def now(self) -> float:
        return super().now() - 3600


async def test_reports_stay_newer_than_those_before_when_the_clock_is_set_back() -> None:
    async with site() as at, at.running() as agent:
        await until(lambda: at.reported)
        agent.clock = SetBack()
        before = len(at.reported)
        await agent.resync([])
        await until(lambda: len(at.reported) > before)

        times = [report.reported_at for report in at.reported]

    assert times == sorted(set(times))
