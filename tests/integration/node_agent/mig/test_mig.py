"""The agent and devices in MIG mode, beside a simulated kubelet and simulated NVML."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import REGISTRY

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.gpus.simulated.gpus import SimulatedGpus, uuid_of
from services.node_agent.kubelet.pod_list import KubeletPods
from services.node_agent.mig.instances import (
    MigInstance,
)
from shared.model.errors import RequestError
from shared.model.lease import Lease, LeaseState, MigPlacement, RequestedUnits, Share
from shared.model.names import NodeName, PodUid
from simcluster.kubelet.containers.container_spec import RUN_FOR
from tests.support.node_agent.agent import NUMBER, Site, handler_of, share, site
from tests.support.simcluster.kubelet import NODE, container, pod
from tests.support.waiting import until

GPU = uuid_of(NodeName(NODE), 0)
PROFILES = {
    "group1": ("1g.5gb", 5120, 7),
    "group2": ("2g.10gb", 10240, 3),
    "group3": ("3g.20gb", 20480, 2),
    "group4": ("7g.40gb", 40960, 1),
}
SWITCHES = {"NVIDIA_GDRCOPY": "enabled", "NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled"}
REGISTER = "volcano.sh/node-vgpu-register"
PHASE = "volcano.sh/bind-phase"


def part(group: str, position: int = 0, asked_mib: int = 3000, **changes: Any) -> Share:
    """Return a share that is an instance of the node's first device."""
    profile, memory_mib, count = PROFILES[group]
    if position >= count:
        profile, memory_mib = "1g.5gb", 5120
    facts: dict[str, Any] = {
        "slot": position,
        "fence": 1,
        "cores_percent": 0,
        "mig": MigPlacement(layout=group, position=position, profile=profile),
        "requested_units": RequestedUnits(memory_mib=asked_mib, device_mib=40960),
    }
    return share(changes.pop("index", 0), memory_mib, **(facts | changes))


def given_of(env: Mapping[str, str]) -> dict[str, str]:
    """Leave out what every container of a kubelet has."""
    usual = ("PATH", "HOSTNAME", "HOME", "KUBERNETES_")
    return {name: value for name, value in env.items() if not name.startswith(usual)}


def partitions(outcome: str) -> float:
    found = REGISTRY.get_sample_value("leasehold_mig_partitions_total", {"outcome": outcome})
    return found or 0.0


def hardware(at: Site) -> SimulatedGpus:
    settings = at.settings
    return SimulatedGpus(
        NodeName(NODE), at.gpus, settings.fault_file, settings.state_dir / "simulated-mig.json"
    )


async def there(at: Site) -> dict[int, MigInstance]:
    """Return the device's instances by where they lie."""
    return {one.start: one for one in await hardware(at).instances(GPU)}


def fault(at: Site, *names: str) -> None:
    (at.root / "faults.json").write_text(json.dumps(dict(enumerate(names))))


async def end(at: Site, lease: Lease) -> None:
    """Let a pod end, as its lease does."""
    at.node.store.delete("pods", "default", lease.name, grace_s=0)
    await until(lambda: not at.node.exists(lease.name))
    at.ledger.leases.pop(lease.pod, None)
    await at.tell(structs.replace(lease, state=LeaseState.RELEASED, version=9))


async def test_item_45_a_container_gets_its_instance_and_the_switches_and_nothing_else() -> None:
    async with site("1xA100-40GB:mig") as at, at.running():
        at.bind(pod("one", limits={NUMBER: 1}), part("group2", 3))
        await at.node.phase("one", "Running")
        state = at.node.container("one")
        await until(lambda: at.annotation("one", PHASE) == "success")
        held = await at.node.allocated_devices()
        instances = await there(at)

    assert {start: one.profile for start, one in instances.items()} == {
        0: "2g.10gb", 2: "2g.10gb", 4: "2g.10gb", 6: "1g.5gb"
    }  # fmt: skip
    assert given_of(state.env) == {"NVIDIA_VISIBLE_DEVICES": instances[6].uuid, **SWITCHES}
    assert state.mounts == []
    assert held["one", "main"] == {f"{GPU}-3"}


async def test_the_node_says_which_device_is_in_which_mode() -> None:
    async with site("1xT4+1xA100-40GB:mig", device_split_count=3) as at, at.running() as agent:
        await until(lambda: at.node.node()["metadata"]["annotations"].get(REGISTER))
        text = at.node.node()["metadata"]["annotations"][REGISTER]
        served = list(agent.state.shown.served[NUMBER])

    t4, a100, rest = text.split(":")
    assert t4.endswith("3,15360,NVIDIA-Tesla T4,true,hami-core")
    assert a100.endswith("7,40960,NVIDIA-NVIDIA A100-SXM4-40GB,true,mig")
    assert rest == ""
    assert len(served) == 3 + 7, "an ID for every position"


async def test_both_modes_serve_pods_side_by_side() -> None:
    async with site("1xA100-40GB:mig+1xT4") as at, at.running():
        at.bind(pod("instance", limits={NUMBER: 1}), part("group1", 6))
        at.bind(pod("share", limits={NUMBER: 1}), share(1, 2000))
        await at.node.phase("instance", "Running")
        await at.node.phase("share", "Running")

        assert at.env("share")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"
        assert at.env("instance")["NVIDIA_VISIBLE_DEVICES"].startswith("MIG-")


async def test_a_device_is_laid_out_before_anybody_asks_for_the_instance() -> None:
    async with site("1xA100-40GB:mig") as at, at.running():
        created = at.node.create(pod("one", limits={NUMBER: 1}, node=None))["metadata"]
        at.bind(pod("other", limits={NUMBER: 1}, node=None), part("group3"))
        await at.tell(next(iter(at.ledger.leases.values())))
        async with asyncio.timeout(30):
            while len(await there(at)) < 2:
                await asyncio.sleep(0.02)

        assert created["name"] == "one"
        assert {one.profile for one in (await there(at)).values()} == {"3g.20gb"}


async def test_item_44_two_containers_and_two_pods_get_different_instances() -> None:
    both = [container("a", limits={NUMBER: 1}), container("b", limits={NUMBER: 1})]
    async with site("1xA100-40GB:mig") as at, at.running():
        at.bind(
            pod("one", containers=both),
            part("group1", 0, container="a"),
            part("group1", 1, container="b"),
        )
        at.bind(pod("two", limits={NUMBER: 1}), part("group1", 2))
        for name in ("one", "two"):
            await at.node.phase(name, "Running")
        given = [at.env("one", "a"), at.env("one", "b"), at.env("two")]
        instances = await there(at)

    uuids = [env["NVIDIA_VISIBLE_DEVICES"] for env in given]
    assert uuids == [instances[start].uuid for start in range(3)]


async def test_item_44_seven_pods_at_once_each_get_an_instance_of_their_own() -> None:
    async with site("1xA100-40GB:mig") as at, at.running():
        for n in range(7):
            obj = pod(f"p{n}", limits={NUMBER: 1})
            at.bind(obj, part("group1", n, fence=n + 1), told=n % 2 == 0)
        for n in range(7):
            await at.node.phase(f"p{n}", "Running")
        instances = await there(at)

        given = [at.env(f"p{n}")["NVIDIA_VISIBLE_DEVICES"] for n in range(7)]
        assert given == [instances[n].uuid for n in range(7)]
        assert not at.refused


async def test_an_instance_that_a_living_pod_was_given_is_given_to_nobody_else() -> None:
    async with (
        site("1xA100-40GB:mig", timing=AgentTiming(instance_release_s=0.3)) as at,
        at.running(),
    ):
        at.bind(pod("one", limits={NUMBER: 1}), part("group1", 0))
        await at.node.phase("one", "Running")
        at.bind(pod("two", limits={NUMBER: 1}), part("group1", 0, fence=2))
        await at.node.phase("two", "Failed")

        assert "is in use by pod default/one" in at.message("two")


async def test_an_instance_is_the_next_pods_as_soon_as_the_last_ones_phase_is_final(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale: set[PodUid] = set()

    async def running(_: KubeletPods) -> frozenset[PodUid]:
        return frozenset(stale)

    monkeypatch.setattr(KubeletPods, "list_running", running)
    async with site("1xA100-40GB:mig") as at, at.running():
        short = pod("one", limits={NUMBER: 1}, annotations={RUN_FOR: "50ms"}, restartPolicy="Never")
        first = at.bind(short, part("group1", 0))
        stale.add(first.pod)
        await at.node.phase("one", "Succeeded")
        at.bind(pod("two", limits={NUMBER: 1}), part("group1", 0, fence=2))
        await at.node.phase("two", "Running")

        assert not at.refused


async def test_an_instance_waits_for_containers_that_the_kubelet_counts_after_their_pod_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale: list[PodUid] = []

    async def running(_: KubeletPods) -> frozenset[PodUid]:
        return frozenset([stale.pop()] if stale else [])

    monkeypatch.setattr(KubeletPods, "list_running", running)
    async with site("1xA100-40GB:mig") as at, at.running():
        first = at.bind(pod("one", limits={NUMBER: 1}), part("group1", 0))
        await at.node.phase("one", "Running")
        await end(at, first)
        stale += [first.pod] * 3
        at.bind(pod("two", limits={NUMBER: 1}), part("group1", 0, fence=2))
        await at.node.phase("two", "Running")

        assert not at.refused
        assert not stale


async def test_item_46_an_idle_device_changes_its_layout_at_once() -> None:
    async with site("1xA100-40GB:mig") as at, at.running():
        first = at.bind(pod("one", limits={NUMBER: 1}), part("group1"))
        await at.node.phase("one", "Running")
        await end(at, first)
        at.bind(pod("two", limits={NUMBER: 1}), part("group4", fence=2))
        await at.node.phase("two", "Running")
        instances = await there(at)

        assert [one.profile for one in instances.values()] == ["7g.40gb"]
        assert at.env("two")["NVIDIA_VISIBLE_DEVICES"] == instances[0].uuid


async def test_item_46_what_a_pod_still_has_stays_although_a_newer_lease_wants_another_layout() -> (
    None
):
    async with (
        site("1xA100-40GB:mig", timing=AgentTiming(instances_ready_s=1.0)) as at,
        at.running(),
    ):
        first = at.bind(pod("one", limits={NUMBER: 1}), part("group1", 4))
        await at.node.phase("one", "Running")
        before = await there(at)
        at.bind(pod("two", limits={NUMBER: 1}), part("group4", fence=2))
        await at.node.phase("two", "Failed")
        message = at.message("two")
        after = await there(at)
        phase = at.node.pod("one")["status"]["phase"]
        await end(at, first)
        at.bind(pod("three", limits={NUMBER: 1}), part("group4", fence=3))
        await at.node.phase("three", "Running")

    assert "1g.5gb at slice 4 of the device is in use" in message
    assert after == before
    assert phase == "Running"


async def test_item_46_a_process_that_nvml_shows_protects_its_instance_until_it_ends() -> None:
    async with (
        site("1xA100-40GB:mig", timing=AgentTiming(instances_ready_s=2.0)) as at,
        at.running() as agent,
    ):
        first = at.bind(pod("one", limits={NUMBER: 1}), part("group1"))
        await at.node.phase("one", "Running")
        await end(at, first)
        fault(at, "busy")
        at.bind(pod("two", limits={NUMBER: 1}), part("group4", fence=2))
        await at.node.phase("two", "Failed")
        message, kept = at.message("two"), len(await there(at))
        agent.mig.timing = AgentTiming(instances_ready_s=10.0)  # type: ignore[attr-defined]
        at.bind(pod("three", limits={NUMBER: 1}), part("group4", fence=3))
        await asyncio.sleep(0.3)
        fault(at)
        await at.node.phase("three", "Running")

    assert "are in use" in message
    assert kept == 7


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("create-fails", "the driver did not create 3g.20gb at slice 0 of device"),
        ("compute-fails", "NVML: Insufficient Resources"),
        ("create-nothing", "has no instance instead of layout group3"),
    ],
)
async def test_item_47_a_failed_partition_fails_its_pod_alone_with_the_reason(
    named: str, said: str
) -> None:
    before = partitions("failed"), partitions("done")
    async with site("2xA100-40GB:mig") as at, at.running() as agent:
        at.bind(pod("well", limits={NUMBER: 1}), part("group1", index=1))
        await at.node.phase("well", "Running")
        fault(at, named)
        at.bind(pod("one", limits={NUMBER: 1}), part("group3"))
        await at.node.phase("one", "Failed")
        message = at.message("one")
        await until(lambda: at.annotation("one", PHASE) == "failed")
        refused = await until(lambda: at.refused)
        fault(at)
        at.bind(pod("two", limits={NUMBER: 1}), part("group3", 1, fence=2))
        await at.node.phase("two", "Running")
        instances = await there(at)

        assert partitions("failed") > before[0]
        assert partitions("done") == before[1] + 2
        assert said in message
        assert said in refused[0].reason
        assert at.node.pod("well")["status"]["phase"] == "Running"
        assert [one.profile for one in instances.values()] == ["3g.20gb", "3g.20gb"]
        assert at.env("two")["NVIDIA_VISIBLE_DEVICES"] == instances[4].uuid
        assert agent.watcher.unready_reason() is None


async def test_item_47_a_driver_that_does_not_come_back_is_given_up_on() -> None:
    async with (
        site("1xA100-40GB:mig+1xT4", timing=AgentTiming(partition_step_s=0.3)) as at,
        at.running(),
    ):
        fault(at, "create-hangs")
        at.bind(pod("one", limits={NUMBER: 1}), part("group3"))
        at.bind(pod("share", limits={NUMBER: 1}), share(1, 2000))
        await at.node.phase("one", "Failed")
        await at.node.phase("share", "Running")

        assert "did not create 3g.20gb at slice 0" in at.message("one")
        assert "within 0.3 s" in at.message("one")


async def test_a_restarted_agent_keeps_what_pods_have_and_finishes_what_was_begun() -> None:
    async with site("1xA100-40GB:mig") as at:
        async with at.running():
            at.bind(pod("one", limits={NUMBER: 1}), part("group2", 1))
            await at.node.phase("one", "Running")
            before = await there(at)
        mig = hardware(at).mig
        for start in (0, 6):
            mig.destroy_compute(GPU, before[start].gi, 0)
        mig.destroy_instance(GPU, before[0].gi)
        async with at.running():
            at.bind(pod("two", limits={NUMBER: 1}), part("group2", 0, fence=2), told=False)
            await at.node.phase("two", "Running")
            after = await there(at)

            assert after == before
            assert at.env("two")["NVIDIA_VISIBLE_DEVICES"] == before[0].uuid
            assert at.env("one")["NVIDIA_VISIBLE_DEVICES"] == before[2].uuid


async def test_a_checkpoint_that_was_lost_is_rebuilt_with_the_instances() -> None:
    async with site("1xA100-40GB:mig") as at:
        async with at.running():
            at.bind(pod("one", limits={NUMBER: 1}), part("group2", 1))
            await at.node.phase("one", "Running")
        (at.root / "agent" / "checkpoint.json").unlink()
        async with at.running() as agent:
            await until(lambda: agent.checkpoint.allocations)
            (entry,) = agent.checkpoint.of_resource(NUMBER)

            assert entry.instances == ((await there(at))[2].uuid,)
            assert entry.setup.environment == given_of(at.env("one"))


async def test_instances_that_a_reset_took_are_made_again_before_a_container_starts() -> None:
    async with site("1xA100-40GB:mig") as at, at.running() as agent:
        at.bind(pod("one", limits={NUMBER: 1}), part("group2", 1))
        await at.node.phase("one", "Running")
        before = await there(at)
        (at.root / "agent" / "simulated-mig.json").unlink()
        await handler_of(agent).pre_start_container(NUMBER, [f"{GPU}-1"])

        assert await there(at) == before


async def test_a_layout_that_is_no_more_offered_refuses_its_lease() -> None:
    async with site("1xA100-40GB:mig") as at, at.running() as agent:
        lease = part("group2", 1)
        gone = structs.replace(lease, mig=MigPlacement(layout="old", position=1, profile="2g.10gb"))
        at.bind(pod("one", limits={NUMBER: 1}), gone)
        await at.node.phase("one", "Failed")
        message = at.message("one")
        other = structs.replace(
            lease, mig=MigPlacement(layout="group2", position=3, profile="2g.10gb")
        )
        held = at.ledger.leases[next(iter(at.ledger.leases))]

        changed = structs.replace(held, shares=(other,))
        with pytest.raises(RequestError, match="were the layouts changed"):
            await handler_of(agent).mig_instances_of(changed, "main")

    assert "layout old" in message
    assert await there(at) == {}


async def test_an_older_lease_with_another_layout_is_refused() -> None:
    async with site("1xA100-40GB:mig") as at, at.running():
        at.bind(pod("new", limits={NUMBER: 1}), part("group1", fence=5))
        await at.node.phase("new", "Running")
        at.bind(pod("old", limits={NUMBER: 1}), part("group4", fence=4))
        await at.node.phase("old", "Failed")

        assert "laid out as group1" in at.message("old")


async def test_a_share_of_a_device_in_mig_mode_is_refused_and_the_other_way_round() -> None:
    async with site("1xA100-40GB:mig+1xT4") as at, at.running():
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 2000))
        await at.node.phase("one", "Failed")
        at.bind(pod("two", limits={NUMBER: 1}), part("group1", index=1))
        await at.node.phase("two", "Failed")

        assert "in mig mode, and the lease is for a part of it" in at.message("one")
        assert "which does not have it (its layouts: none)" in at.message("two")


async def test_an_agent_that_may_not_partition_serves_what_is_there() -> None:
    async with site("1xA100-40GB:mig", partition=False) as at:
        mig = hardware(at).mig
        for start in (0, 4):
            mig.create_compute(GPU, mig.create_instance(GPU, 9, start))
        async with at.running() as agent:
            names = [layout.name for layout in agent.state.devices[0].layouts]
            at.bind(pod("one", limits={NUMBER: 1}), part("group3", 1))
            await at.node.phase("one", "Running")
            at.bind(pod("two", limits={NUMBER: 1}), part("group1", fence=2))
            await at.node.phase("two", "Failed")

            assert names == ["group3"]
            assert len(await there(at)) == 2
            assert at.node.pod("one")["status"]["phase"] == "Running"
