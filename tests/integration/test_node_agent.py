"""A node agent beside a simulated kubelet: real unix sockets, real TLS, a real checkpoint file."""

import asyncio
import os
import shutil
from dataclasses import replace

import pytest

from services.node_agent.kubelet_plugin import encode_setup
from services.node_agent.simulated_gpus import SimulatedGpus, uuid_of
from shared.model.errors import RequestError
from shared.model.lease import LeaseState
from shared.model.names import NodeName, PodUid
from shared.model.questions import EndAsked
from shared.runtime.clock import SystemClock
from tests.support.kubelet import NODE, container, eventually, pod
from tests.support.node_agent import MEMORY, NUMBER, Site, share, site

REPEATS = int(os.environ.get("LEASEHOLD_TEST_REPEATS", "2"))


async def test_registers_its_resources_and_shows_the_node_its_figures() -> None:
    async with site("2xT4") as at, at.running():
        await at.node.allocatable(NUMBER, 20)
        await at.node.allocatable("volcano.sh/vgpu-memory", 30720)
        await at.node.allocatable("volcano.sh/vgpu-cores", 200)
        await at.node.allocatable("volcano.sh/gpu-memory", 30720)
        await at.node.allocatable("volcano.sh/gpu-number", 2)
        report = (await eventually(lambda: at.reported))[0]

    assert [device.index for device in report.devices] == [0, 1]
    assert set(report.served) >= {NUMBER, "volcano.sh/gpu-memory"}


async def test_a_pod_gets_the_limits_and_mounts_of_its_lease() -> None:
    async with site() as at, at.running():
        lease = at.bind(pod("one", limits={NUMBER: 1}), share(1, 3000, cores_percent=50, slot=4))
        await at.node.phase("one", "Running")
        env = at.env("one")
        held = await at.node.held()
        mounts = at.node.container("one").mounts
        told = await eventually(lambda: at.activated)

    assert env["NVIDIA_VISIBLE_DEVICES"] == uuid_of(NodeName(NODE), 1)
    assert env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert env["CUDA_DEVICE_SM_LIMIT"] == "50"
    assert held["one", "main"] == {f"{uuid_of(NodeName(NODE), 1)}-4"}
    assert "/usr/local/vgpu/libvgpu.so" in str(mounts)
    assert told[0].activation.pod == lease.pod


async def test_a_pod_without_a_lease_is_refused_at_once_and_told_why() -> None:
    async with site() as at, at.running():
        began = asyncio.get_running_loop().time()
        at.node.create(pod("stray", limits={NUMBER: 1}))
        await at.node.phase("stray", "Failed")
        took_s = asyncio.get_running_loop().time() - began
        text = at.message("stray")
        refused = await eventually(lambda: at.refused)

    assert NUMBER in text
    assert "node-0" in text
    assert "holds no lease" in text
    assert refused[0].name == "stray"
    assert took_s < 1.0


async def test_a_pod_is_refused_with_a_sentence_when_nobody_can_say_whether_it_has_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.node_agent.finding.ASKING_S", 0.5)
    async with site() as at, at.running():
        at.ledger.silent = True
        at.node.create(pod("stray", limits={NUMBER: 1}))
        await at.node.phase("stray", "Failed")
        text = at.message("stray")

    assert "nobody could say within 0.5 s whether pod default/stray" in text


async def test_a_lease_that_no_news_told_of_is_asked_for() -> None:
    async with site() as at, at.running():
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 2000), told=False)
        await at.node.phase("one", "Running")

        assert at.env("one")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_24_leases_already_told_are_honoured_while_nobody_answers() -> None:
    async with site() as at, at.running():
        at.ledger.silent = True
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 2000))
        await at.node.phase("one", "Running")


async def test_32_a_pod_that_sets_a_reserved_variable_is_refused_by_its_name() -> None:
    own = container("main", limits={NUMBER: 1}, env=[{"name": "LD_PRELOAD", "value": "/x.so"}])
    async with site() as at, at.running():
        at.bind(pod("one", containers=[own]), share(0, 2000))
        await at.node.phase("one", "Failed")
        text = at.message("one")
        refused = await eventually(lambda: at.refused)
        await eventually(lambda: at.annotation("one", "volcano.sh/bind-phase") == "failed")

    assert "container main of pod default/one sets LD_PRELOAD" in text
    assert "LD_PRELOAD" in refused[0].reason


async def test_37_annotations_follow_each_container_that_was_answered() -> None:
    both = [container("a", limits={NUMBER: 1}), container("b", limits={NUMBER: 1})]
    async with site() as at, at.running():
        at.bind(
            pod("one", containers=both),
            share(0, 1000, container="a", slot=0),
            share(1, 2000, container="b", slot=0),
        )
        await at.node.phase("one", "Running")
        await eventually(lambda: at.annotation("one", "volcano.sh/bind-phase") == "success")

        assert at.annotation("one", "volcano.sh/vgpu-time") == str(2**64 - 1)
        assert "GPU" not in at.annotation("one", "volcano.sh/devices-to-allocate")
        assert at.env("one", "a")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
        assert at.env("one", "b")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_03_a_gpushare_pod_gets_its_three_variables_and_its_mark() -> None:
    async with site() as at, at.running():
        lease = share(1, 1024, slotted=False, slot=None, cores_percent=0)
        at.bind(pod("one", limits={MEMORY: 1024}), lease, dialect="volcano-gpushare")
        await at.node.phase("one", "Running")
        env = at.env("one")
        await eventually(lambda: at.annotation("one", "volcano.sh/gpu-assigned") == "true")
        held = await at.node.held()
        told = await eventually(lambda: at.activated)

    assert env["NVIDIA_VISIBLE_DEVICES"] == "1"
    assert env["VOLCANO_GPU_ALLOCATED"] == "1024"
    assert env["VOLCANO_GPU_MEMORY_TOTAL"] == "15360"
    assert len(held["one", "main"]) == 1024
    assert {one[:2] for one in held["one", "main"]} == {"1-"}
    assert len(told[0].activation.device_ids) == 1, "a run of IDs is told as a run"


async def test_an_init_containers_devices_are_handed_on_to_the_pods_container() -> None:
    init = container("first", limits={MEMORY: 500})
    async with site() as at, at.running():
        lease = {"slotted": False, "slot": None, "cores_percent": 0}
        at.bind(
            pod("one", limits={MEMORY: 500}, initContainers=[init]),
            share(0, 500, container="first", init=True, **lease),
            share(0, 500, **lease),
            dialect="volcano-gpushare",
        )
        await at.node.phase("one", "Running")
        told = await eventually(lambda: len(at.activated) == 2 and at.activated)

    assert [event.activation.container for event in told] == ["first", "main"]
    assert told[0].activation.device_ids == told[1].activation.device_ids


async def test_39_thirty_pods_at_once_each_get_their_own_limits() -> None:
    for _ in range(REPEATS):
        async with site("4xA100-80GB") as at, at.running():
            for n in range(30):
                at.bind(
                    pod(f"p{n}", limits={NUMBER: 1}),
                    share(n % 4, 1000 + n, slot=n // 4, fence=n // 4 + 1),
                    told=n % 2 == 0,
                )
            for n in range(30):
                await at.node.phase(f"p{n}", "Running")
            held = await at.node.held()

            for n in range(30):
                assert at.env(f"p{n}")["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{1000 + n}m"
                assert held[f"p{n}", "main"] == {f"{uuid_of(NodeName(NODE), n % 4)}-{n // 4}"}
            assert not at.refused


async def test_40_a_restarted_agent_leaves_running_pods_alone_and_honours_pending_leases() -> None:
    async with site() as at:
        async with at.running():
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
            before = at.env("one")
        async with at.running() as agent:
            at.bind(pod("two", limits={NUMBER: 1}), share(0, 2000, slot=1, fence=2), told=False)
            await at.node.phase("two", "Running")
            told = {activation.container for activation in agent.record.activations}

            assert len(agent.record.activations) == 2
            assert told == {"main"}
            assert at.env("one") == before
            assert at.env("two")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_40_a_restarted_kubelet_is_registered_with_within_a_second() -> None:
    async with site() as at, at.running():
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
        await at.node.phase("one", "Running")
        await at.node.kubelet.restart()
        began = asyncio.get_running_loop().time()
        await eventually(lambda: at.node.amount(NUMBER) == "20", within_s=3)
        took_s = asyncio.get_running_loop().time() - began
        at.bind(pod("two", limits={NUMBER: 1}), share(0, 2000, slot=1, fence=2))
        await at.node.phase("two", "Running")

        assert took_s < 1.5
        assert at.node.pod("one")["status"]["phase"] == "Running"
        assert len(at.activated) == 2


async def test_a_damaged_checkpoint_is_rebuilt_from_the_kubelet_and_the_leases() -> None:
    async with site() as at:
        async with at.running():
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
        (at.root / "agent" / "checkpoint.json").write_text("{")
        async with at.running() as agent:
            await eventually(lambda: agent.record.activations)

            assert agent.record.activations[0].name == "one"
            assert (at.root / "agent" / "checkpoint.damaged").exists()


async def test_a_checkpoint_that_was_deleted_is_rebuilt_and_restarts_are_agreed_to() -> None:
    async with site() as at:
        async with at.running():
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
        ids = list((await at.node.held())["one", "main"])
        shutil.rmtree(at.root / "agent")
        async with at.running() as agent:
            await eventually(lambda: agent.record.activations)

            await agent.answering.pre_start(NUMBER, ids)


async def test_23_the_same_question_gets_the_same_answer_also_after_a_restart() -> None:
    async with site() as at:
        async with at.running() as agent:
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
            ids = list((await at.node.held())["one", "main"])
            first = agent.answering.record.find(*_key(at, "one"))
        assert at.node.kubelet._pods is not None
        at.node.kubelet._pods._devices.ledger.holdings.clear()  # the kubelet lost its record
        async with at.running() as agent:
            again = await agent.answering.allocate(NUMBER, ids)

    assert first is not None
    assert encode_setup(first.setup) == encode_setup(again)


async def test_22_a_refusal_takes_less_than_a_tenth_of_a_second() -> None:
    async with site() as at, at.running() as agent:
        loop = asyncio.get_running_loop()
        took: list[float] = []
        for _ in range(3):
            began = loop.time()
            with pytest.raises(RequestError, match="no pod of the kubelet's list waits for it"):
                await agent.answering.allocate(NUMBER, [f"{uuid_of(NodeName(NODE), 0)}-0"])
            took.append(loop.time() - began)

    assert min(took) < 0.1


async def test_a_start_is_refused_if_the_devices_are_with_somebody_else() -> None:
    async with site() as at, at.running() as agent:
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
        await at.node.phase("one", "Running")
        ids = list((await at.node.held())["one", "main"])
        await agent.answering.pre_start(NUMBER, ids)
        free = [f"{uuid_of(NodeName(NODE), 1)}-7"]

        with pytest.raises(RequestError, match="with nobody, and they were given to nobody"):
            await agent.answering.pre_start(NUMBER, free)


async def test_an_unhealthy_gpu_leaves_the_node_and_comes_back() -> None:
    async with site() as at, at.running():
        (at.root / "faults.json").write_text('{"1": "unhealthy"}')
        await at.node.allocatable(NUMBER, 10)
        await at.node.allocatable("volcano.sh/vgpu-cores", 100)
        reports = await eventually(
            lambda: [r for r in at.reported if not all(d.healthy for d in r.devices)]
        )
        (at.root / "faults.json").write_text("{}")
        await at.node.allocatable(NUMBER, 20)

    assert [device.healthy for device in reports[0].devices] == [True, False]


async def test_the_register_annotation_and_patched_amounts_come_back_if_they_are_lost() -> None:
    async with site() as at, at.running() as agent:
        await at.node.allocatable("volcano.sh/vgpu-cores", 200)
        key = "volcano.sh/node-vgpu-register"
        await eventually(lambda: at.node.node()["metadata"]["annotations"].get(key))
        at.node.store.patch("nodes", None, NODE, {"metadata": {"annotations": {key: None}}})
        lost = {
            "status": {
                part: {"volcano.sh/vgpu-cores": None} for part in ("capacity", "allocatable")
            }
        }
        at.node.store.patch("nodes", None, NODE, lost, subresource="status")
        agent.views.show(agent.shown)
        await at.node.allocatable("volcano.sh/vgpu-cores", 200)
        await eventually(lambda: at.node.node()["metadata"]["annotations"].get(key))


async def test_item_14_a_handshake_is_reported_over_what_a_scheduler_made_of_it() -> None:
    key = "volcano.sh/node-vgpu-handshake"

    def said() -> str:
        return str(at.node.node()["metadata"].get("annotations", {}).get(key, ""))

    async with site(volcano_handshake=True) as at:
        async with at.running():
            await eventually(lambda: said().startswith("Reported "))
        deleted = {"metadata": {"annotations": {key: "Deleted_2026.08.20 10:00:00"}}}
        at.node.store.patch("nodes", None, NODE, deleted)
        async with at.running():
            await eventually(lambda: said().startswith("Reported "))


async def test_a_pod_that_is_gone_is_forgotten_once_its_lease_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.node_agent.service.TIDY_S", 0.05)
    monkeypatch.setattr("services.node_agent.preparing.NEW_S", -1.0)
    async with site() as at, at.running() as agent:
        lease = at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
        await at.node.phase("one", "Running")
        never = PodUid("never-here")
        asked = EndAsked(node=NodeName(NODE), pod=lease.pod, more=(never, lease.pod))
        running = await agent.end(asked)
        assert running.more == (never,)
        at.node.store.delete("pods", "default", "one", grace_s=0)
        await eventually(lambda: not at.node.exists("one"))
        await asyncio.sleep(0.2)
        kept = len(agent.record.activations)
        directory = at.root / "agent" / "containers" / f"{lease.pod}_main"
        there = directory.exists()
        await at.tell(replace(lease, state=LeaseState.RELEASED, version=9))
        await eventually(lambda: not agent.record.activations and not directory.exists())
        gone = await agent.end(asked)

    assert (running.ended, gone.ended) == (False, True)
    assert kept == 1, "the lease had not ended yet"
    assert there


async def test_a_second_agent_waits_until_the_first_has_left() -> None:
    async with site() as at:
        async with at.running():
            second = asyncio.create_task(_settled(at))
            await asyncio.sleep(0.3)
            early = second.done()
        async with asyncio.timeout(10):
            await second

    assert not early


async def _settled(at: Site) -> None:
    async with at.running(registered=False):
        return


def _key(at: Site, name: str) -> tuple[PodUid, str, str]:
    return PodUid(at.node.pod(name)["metadata"]["uid"]), "main", NUMBER


async def test_refused_pods_that_the_kubelet_still_lists_do_not_confuse_it_about_others() -> None:
    async with site() as at, at.running():
        for n in range(6):
            at.node.create(pod(f"stray{n}", limits={NUMBER: 1}))
            at.bind(pod(f"p{n}", limits={NUMBER: 1}), share(0, 1000 + n, slot=n, fence=n + 1))
        for n in range(6):
            await at.node.phase(f"p{n}", "Running")
            await at.node.phase(f"stray{n}", "Failed")

            assert at.env(f"p{n}")["CUDA_DEVICE_MEMORY_LIMIT_0"] == f"{1000 + n}m"


async def test_17_a_strategy_that_no_kubelet_takes_ends_the_start_with_the_factor_needed() -> None:
    async with site("8xA100-80GB", gpu_strategy="share") as at:
        with pytest.raises(RequestError, match=r"use a memory factor of \d or more"):
            async with at.running():
                pass


async def test_without_a_driver_it_waits_and_says_so() -> None:
    async with site("nvml") as at, at.running(registered=False) as agent:
        await eventually(lambda: "not asked yet" not in (agent.trouble or ""))

        assert "Install the NVIDIA driver" in (agent.trouble or "")
        assert at.reported == []


async def test_a_driver_that_comes_late_is_found_without_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.node_agent.building.NVML_LOOK_S", 0.1)
    async with site("nvml") as at, at.running(registered=False) as agent:
        await eventually(lambda: "Install the NVIDIA driver" in (agent.trouble or ""))
        agent.gpus = SimulatedGpus(NodeName(NODE), "2xT4")
        await eventually(lambda: at.reported)

        assert agent.trouble is None
        assert len(at.reported[-1].devices) == 2


async def test_a_kubelet_that_restarts_inside_allocate_costs_that_pod_and_no_other() -> None:
    async with site() as at, at.running() as agent:
        at.ledger.silent = True
        at.bind(pod("unlucky", limits={NUMBER: 1}), share(0, 1000), told=False)
        await eventually(lambda: any(question.pods for question in at.ledger.questions))
        await at.node.kubelet.restart()
        at.ledger.silent = False
        await at.node.phase("unlucky", "Failed")
        await eventually(lambda: agent.plugins.trouble() is None)
        await at.node.allocatable(NUMBER, 20)
        at.bind(pod("two", limits={NUMBER: 1}), share(0, 2000, slot=1, fence=2))
        await at.node.phase("two", "Running")

        assert at.env("two")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_memory_too_long_for_a_list_is_asked_for_by_a_trigger() -> None:
    async with site("8xA100-80GB") as at, at.running():
        lease = share(3, 40960, slotted=False, slot=None, cores_percent=0)
        limits = {MEMORY: 40960, "leasehold.dev/share": 1}
        await at.node.allocatable(MEMORY, 8 * 81920)
        at.bind(pod("one", limits=limits), lease, dialect="volcano-gpushare")
        await at.node.phase("one", "Running")

        assert at.env("one")["NVIDIA_VISIBLE_DEVICES"] == "3"
        assert at.env("one")["VOLCANO_GPU_ALLOCATED"] == "40960"


async def test_a_fence_older_than_one_honoured_for_the_slot_is_refused() -> None:
    async with site() as at, at.running():
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000, slot=3, fence=5))
        await at.node.phase("one", "Running")
        at.bind(pod("old", limits={NUMBER: 1}), share(0, 1000, slot=3, fence=4))
        await at.node.phase("old", "Failed")

        assert "fence 4" in at.message("old")


async def test_nothing_is_forgotten_before_the_ledger_has_told_which_leases_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site() as at:
        async with at.running():
            lease = at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
        at.node.store.delete("pods", "default", "one", grace_s=0)
        at.ledger.silent = True
        monkeypatch.setattr("services.node_agent.service.TIDY_S", 0.02)
        async with at.running() as agent:
            await asyncio.sleep(0.3)
            kept = agent.record.pods
            del at.ledger.leases[lease.pod]
            at.ledger.silent = False
            await eventually(lambda: not agent.record.pods)

    assert kept == {lease.pod}


class SetBack(SystemClock):
    """A clock that somebody sets back by an hour."""

    def now(self) -> float:
        return super().now() - 3600


async def test_reports_stay_newer_than_those_before_when_the_clock_is_set_back() -> None:
    async with site() as at, at.running() as agent:
        await eventually(lambda: at.reported)
        agent.clock = SetBack()
        before = len(at.reported)
        await agent.answer_listing([])
        await eventually(lambda: len(at.reported) > before)

        times = [report.reported_at for report in at.reported]

    assert times == sorted(set(times))
