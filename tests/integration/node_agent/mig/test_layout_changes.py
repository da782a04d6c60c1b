"""An agent changes the MIG layout of its devices, and its driver fails."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.allocate import cdi_files
from services.node_agent.allocate.cdi import build_specification
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.partition.layout_reconciler import NOT_LAID_OUT
from shared.model.devices.device import Device
from shared.model.leases.lease import LeaseState
from shared.model.names import PodUid
from simcluster.node_agent.agent import MIG_FILE
from tests.support.node_agent.agent import (
    NUMBER,
    OneNodeCluster,
    lease_of,
    one_node_cluster,
    share,
)
from tests.support.node_agent.mig import (
    GPU,
    PHASE,
    end_pod,
    hardware,
    instances_by_start,
    mig_share,
    plugin_variables,
)
from tests.support.simcluster.kubelet import pod
from tests.support.waiting import until


def partitions(outcome: str) -> float:
    found = REGISTRY.get_sample_value("leasehold_mig_partitions_total", {"outcome": outcome})
    return found or 0.0


def reported(cluster: OneNodeCluster) -> tuple[Device, ...]:
    return cluster.reported[-1].devices


async def test_item_46_instances_in_use_stay_although_a_newer_lease_needs_another_layout() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running() as agent:
        first = await cluster.run_pod("one", mig_share("group1", 4))
        before = await instances_by_start(cluster)
        agent.node.timing = AgentTiming(instances_ready_s=2.0)
        await cluster.fail_pod("two", mig_share("group4", fence=2))
        message = cluster.message("two")
        after = await instances_by_start(cluster)
        phase = cluster.node.pod("one")["status"]["phase"]
        agent.node.timing = AgentTiming()
        await end_pod(cluster, first)
        await cluster.run_pod("three", mig_share("group4", fence=3))

    assert "1g.5gb at slice 4 of the device is in use" in message
    assert after == before
    assert phase == "Running"


async def test_item_46_a_process_that_nvml_shows_protects_its_instance_until_it_ends() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running() as agent:
        first = await cluster.run_pod("one", mig_share("group1"))
        await end_pod(cluster, first)
        agent.node.timing = AgentTiming(instances_ready_s=2.0)
        cluster.inject(gpu0="busy")
        await cluster.fail_pod("two", mig_share("group4", fence=2))
        message = cluster.message("two")
        kept = len(await instances_by_start(cluster))
        agent.node.timing = AgentTiming()
        agent.mig._blocked_by.clear()
        cluster.bind(pod("three", limits={NUMBER: 1}), mig_share("group4", fence=3))
        await until(lambda: agent.mig._blocked_by)
        cluster.inject()
        await cluster.node.phase("three", "Running")

    assert "are in use" in message
    assert kept == 7


@pytest.mark.parametrize(
    ("fault_name", "reason"),
    [
        ("create-fails", "the driver did not create 3g.20gb at slice 0 of device"),
        ("compute-fails", "NVML: Insufficient Resources"),
        ("create-nothing", "has no instance instead of layout group3"),
    ],
)
async def test_item_47_a_failed_partition_fails_only_its_pod_with_the_reason(
    fault_name: str, reason: str
) -> None:
    before = partitions("failed"), partitions("done")
    async with one_node_cluster("2xA100-40GB:mig") as cluster, cluster.running() as agent:
        await cluster.run_pod("well", mig_share("group1", index=1))
        cluster.inject(gpu0=fault_name)
        await cluster.fail_pod("one", mig_share("group3"))
        message = cluster.message("one")
        await until(lambda: cluster.annotation("one", PHASE) == "failed")
        refused = await until(lambda: cluster.refused)
        cluster.inject()
        await cluster.run_pod("two", mig_share("group3", 1, fence=2))
        instances = await instances_by_start(cluster)

        assert partitions("failed") > before[0]
        assert partitions("done") == before[1] + 2
        assert reason in message
        assert reason in refused[0].reason
        assert cluster.node.pod("well")["status"]["phase"] == "Running"
        assert [one.profile for one in instances.values()] == ["3g.20gb", "3g.20gb"]
        assert cluster.env("two")["NVIDIA_VISIBLE_DEVICES"] == instances[4].uuid
        assert agent.watcher.unready_reason() is None


async def test_a_device_whose_layout_fails_gets_no_pod_until_it_succeeds_by_itself() -> None:
    async with one_node_cluster("2xA100-40GB:mig") as cluster, cluster.running() as agent:
        cluster.inject(gpu0="create-fails")
        await cluster.fail_pod("one", mig_share("group3"))
        closed = await until(lambda: [each for each in reported(cluster) if not each.healthy])
        agent.node.unproven = False  # two pods may be in flight
        waiting = [
            lease_of("two", mig_share("group3", 1, fence=2), state=LeaseState.RESERVED),
            lease_of("other", mig_share("group3", index=1), state=LeaseState.RESERVED),
        ]
        reply = await until(
            lambda: agent.window.admit_binds(waiting, None, unreadable_reason=""),
            lambda reply: reply.refusals,
        )
        cluster.inject()
        await until(lambda: all(each.healthy for each in reported(cluster)))
        await until(
            lambda: agent.window.admit_binds(waiting[:1], None, unreadable_reason=""),
            lambda reply: not reply.deferred_pods and not reply.refusals,
        )

    assert [each.uuid for each in closed] == [GPU]
    assert closed[0].fault.startswith(NOT_LAID_OUT)
    assert "MIG layout group3 since 2" in closed[0].fault
    assert "the driver did not create 3g.20gb at slice 0" in closed[0].fault
    assert list(reply.refusals) == ["two"]
    assert "the driver did not create 3g.20gb at slice 0" in reply.refusals[PodUid("two")]
    assert reply.deferred_pods == ()


async def test_a_closed_device_opens_when_a_newer_lease_needs_another_layout() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running() as agent:
        first = await cluster.run_pod("one", mig_share("group1", 4))
        agent.node.timing = AgentTiming(instances_ready_s=0.5)
        await cluster.fail_pod("two", mig_share("group4", fence=2))
        await until(lambda: not reported(cluster)[0].healthy)
        agent.node.timing = AgentTiming()
        await cluster.run_pod("three", mig_share("group1", 5, fence=3))
        await until(lambda: reported(cluster)[0].healthy)

        assert cluster.node.pod(first.name)["status"]["phase"] == "Running"


async def test_item_47_a_hanging_driver_call_times_out() -> None:
    async with (
        one_node_cluster(
            "1xA100-40GB:mig+1xT4", timing=AgentTiming(partition_step_s=0.3)
        ) as cluster,
        cluster.running(),
    ):
        cluster.inject(gpu0="create-hangs")
        cluster.bind(pod("one", limits={NUMBER: 1}), mig_share("group3"))
        cluster.bind(pod("share", limits={NUMBER: 1}), share(1, 2000))
        await cluster.node.phase("one", "Failed")
        await cluster.node.phase("share", "Running")

        assert "did not create 3g.20gb at slice 0" in cluster.message("one")
        assert "within 0.3 s" in cluster.message("one")


async def test_a_restarted_agent_keeps_instances_in_use_and_completes_the_layout() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster:
        async with cluster.running():
            await cluster.run_pod("one", mig_share("group2", 1))
            before = await instances_by_start(cluster)
        mig = hardware(cluster).mig
        for start in (0, 6):
            mig.destroy_compute(GPU, before[start].gi, 0)
        mig.destroy_instance(GPU, before[0].gi)
        async with cluster.running():
            await cluster.run_pod("two", mig_share("group2", 0, fence=2), lease_known=False)
            after = await instances_by_start(cluster)

            assert after == before
            assert cluster.env("two")["NVIDIA_VISIBLE_DEVICES"] == before[0].uuid
            assert cluster.env("one")["NVIDIA_VISIBLE_DEVICES"] == before[2].uuid


async def test_a_lost_checkpoint_is_rebuilt_with_the_instances() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster:
        async with cluster.running():
            await cluster.run_pod("one", mig_share("group2", 1))
        (cluster.root / "agent" / "checkpoint.json").unlink()
        async with cluster.running() as agent:
            await until(lambda: agent.checkpoint.allocations)
            (entry,) = agent.checkpoint.of_resource(NUMBER)

            assert entry.instances == ((await instances_by_start(cluster))[2].uuid,)
            assert entry.setup.environment == plugin_variables(cluster.env("one"))


async def test_instances_lost_in_a_reset_are_created_again_before_a_container_starts() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running() as agent:
        await cluster.run_pod("one", mig_share("group2", 1))
        before = await instances_by_start(cluster)
        (cluster.root / "agent" / "simulated-mig.json").unlink()
        await agent.plugins.handler.pre_start_container(NUMBER, [f"{GPU}::1"])

        assert await instances_by_start(cluster) == before


async def one_fails_and_the_other_runs_after(
    cluster: OneNodeCluster, heal: Callable[[], None]
) -> str:
    """Bind two pods at once, of which one fails; return why."""
    names = ("one", "two")
    for position, name in enumerate(names):
        bound = mig_share("group3", position, fence=2 + position)
        cluster.bind(pod(name, limits={NUMBER: 1}), bound)

    def in_phase(phase: str) -> list[str]:
        return [name for name in names if cluster.node.pod(name)["status"].get("phase") == phase]

    [failed] = await until(lambda: in_phase("Failed"))
    assert cluster.agent is not None
    assert GPU in await until(lambda: cluster.agent and cluster.agent.node.closed)
    await until(lambda: not reported(cluster)[0].healthy)
    heal()
    await until(lambda: in_phase("Running"))
    await until(lambda: reported(cluster)[0].healthy)
    assert in_phase("Failed") == [failed]
    return cluster.message(failed)


async def test_of_two_pods_in_flight_one_fails_for_instances_that_somebody_else_removed() -> None:
    async with one_node_cluster("1xA100-40GB:mig") as cluster, cluster.running():
        await end_pod(cluster, await cluster.run_pod("before", mig_share("group3")))
        cluster.inject(gpu0="create-fails")
        (cluster.settings.state_dir / MIG_FILE).write_text("{}")
        message = await one_fails_and_the_other_runs_after(cluster, cluster.inject)

    assert "the driver did not create 3g.20gb" in message


async def test_of_two_pods_in_flight_one_fails_for_an_instance_without_device_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with one_node_cluster("1xA100-40GB:mig", device_list_strategy=("cdi-cri",)) as cluster:
        cluster.changes["cdi_dir"] = cluster.node.kubelet.files.cdi
        with monkeypatch.context() as driver:
            driver.setattr(cdi_files, "build_specification", without_minors)
            async with cluster.running():
                message = await one_fails_and_the_other_runs_after(cluster, driver.undo)

    assert "has no leasehold.dev/gpu=MIG-" in message
    assert "/proc/driver/nvidia-caps/mig-minors" in message


def without_minors(gpus: Iterable[Gpu], *_: object) -> dict[str, Any]:
    """A specification by a driver that does not say which device nodes instances have."""
    return build_specification(gpus, {}, {})
