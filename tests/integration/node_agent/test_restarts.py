"""A node agent, its kubelet or its files that come back: what each knew before still holds."""

import asyncio
import shutil

from msgspec import structs

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.kubelet.device_plugin import encode_setup
from shared.model.events.request_reply import TerminationRequest
from shared.model.lease import LeaseState
from shared.model.names import NodeName, PodUid
from tests.support.node_agent.agent import NUMBER, Site, handler_of, share, site
from tests.support.simcluster.kubelet import NODE, pod
from tests.support.waiting import until


async def test_40_a_restarted_agent_leaves_running_pods_alone_and_honours_pending_leases() -> None:
    async with site() as at:
        async with at.running():
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
            before = at.env("one")
        async with at.running() as agent:
            at.bind(pod("two", limits={NUMBER: 1}), share(0, 2000, slot=1, fence=2), told=False)
            await at.node.phase("two", "Running")
            told = {activation.container for activation in agent.checkpoint.allocations}

            assert len(agent.checkpoint.allocations) == 2
            assert told == {"main"}
            assert at.env("one") == before
            assert at.env("two")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_40_a_restarted_kubelet_is_registered_with_within_a_second() -> None:
    async with site() as at, at.running():
        at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
        await at.node.phase("one", "Running")
        await at.node.kubelet.restart()
        began = asyncio.get_running_loop().time()
        await until(lambda: at.node.amount(NUMBER) == "20", limit_s=3)
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
            await until(lambda: agent.checkpoint.allocations)

            assert agent.checkpoint.allocations[0].name == "one"
            assert (at.root / "agent" / "checkpoint.damaged").exists()


async def test_a_checkpoint_that_was_deleted_is_rebuilt_and_restarts_are_agreed_to() -> None:
    async with site() as at:
        async with at.running():
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
        ids = list((await at.node.allocated_devices())["one", "main"])
        shutil.rmtree(at.root / "agent")
        async with at.running() as agent:
            await until(lambda: agent.checkpoint.allocations)

            await handler_of(agent).pre_start_container(NUMBER, ids)


async def test_23_the_same_question_gets_the_same_answer_also_after_a_restart() -> None:
    async with site() as at:
        async with at.running() as agent:
            at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
            ids = list((await at.node.allocated_devices())["one", "main"])
            first = agent.checkpoint.find(*_key(at, "one"))
        assert at.node.kubelet._pods is not None
        at.node.kubelet._pods._devices.state.allocations.clear()  # the kubelet lost its record
        async with at.running() as agent:
            again = await handler_of(agent).allocate(NUMBER, ids)

    assert first is not None
    assert encode_setup(first.setup) == encode_setup(again)


async def test_a_pod_that_is_gone_is_forgotten_once_its_lease_has_ended() -> None:
    async with (
        site(timing=AgentTiming(cleanup_s=0.05, new_files_s=-1.0)) as at,
        at.running() as agent,
    ):
        lease = at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
        await at.node.phase("one", "Running")
        never = PodUid("never-here")
        asked = TerminationRequest(node=NodeName(NODE), pod=lease.pod, more_pods=(never, lease.pod))
        running = await agent.report_terminated(asked)
        assert running.terminated_pods == (never,)
        at.node.store.delete("pods", "default", "one", grace_s=0)
        await until(lambda: not at.node.exists("one"))
        await asyncio.sleep(0.2)
        kept = len(agent.checkpoint.allocations)
        directory = at.root / "agent" / "containers" / f"{lease.pod}_main"
        there = directory.exists()
        await at.tell(structs.replace(lease, state=LeaseState.RELEASED, version=9))
        await until(lambda: not agent.checkpoint.allocations and not directory.exists())
        gone = await agent.report_terminated(asked)

    assert (running.terminated, gone.terminated) == (False, True)
    assert kept == 1, "the lease had not ended yet"
    assert there


async def test_a_second_agent_waits_until_the_first_has_left() -> None:
    async with site() as at:
        async with at.running():
            second = asyncio.create_task(_settled(at))
            await asyncio.sleep(0.3)
            early = second.done()
        async with asyncio.timeout(30):
            await second

    assert not early


async def _settled(at: Site) -> None:
    async with at.running(registered=False):
        return


def _key(at: Site, name: str) -> tuple[PodUid, str, str]:
    return PodUid(at.node.pod(name)["metadata"]["uid"]), "main", NUMBER


async def test_a_kubelet_that_restarts_inside_allocate_costs_that_pod_and_no_other() -> None:
    async with site() as at, at.running() as agent:
        at.ledger.silent = True
        at.bind(pod("unlucky", limits={NUMBER: 1}), share(0, 1000), told=False)
        await until(lambda: any(question.pods for question in at.ledger.questions))
        await at.node.kubelet.restart()
        at.ledger.silent = False
        await at.node.phase("unlucky", "Failed")
        await until(lambda: agent.plugins.unready_reason() is None)
        await at.node.allocatable(NUMBER, 20)
        at.bind(pod("two", limits={NUMBER: 1}), share(0, 2000, slot=1, fence=2))
        await at.node.phase("two", "Running")

        assert at.env("two")["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2000m"


async def test_nothing_is_forgotten_before_the_ledger_has_told_which_leases_live() -> None:
    async with site(timing=AgentTiming(cleanup_s=0.02)) as at:
        async with at.running():
            lease = at.bind(pod("one", limits={NUMBER: 1}), share(0, 1000))
            await at.node.phase("one", "Running")
        at.node.store.delete("pods", "default", "one", grace_s=0)
        at.ledger.silent = True
        async with at.running() as agent:
            await asyncio.sleep(0.3)
            kept = agent.checkpoint.pods
            del at.ledger.leases[lease.pod]
            at.ledger.silent = False
            await until(lambda: not agent.checkpoint.pods)

    assert kept == {lease.pod}
