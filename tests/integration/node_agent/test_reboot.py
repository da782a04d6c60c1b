"""A node that boots: its kubelet admits pods anew, and refuses whose devices nobody serves."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import ResyncRequested
from shared.nats.bus import Bus
from simcluster.kubelet.containers.container_state import ContainerPhase
from tests.support.node_agent.agent import NUMBER, Site, share, site
from tests.support.servers.nats import NatsServer
from tests.support.simcluster.kubelet import FAST, NODE, pod
from tests.support.waiting import until

REAL = replace(FAST, admits_after_s=0.8)
"""So long after its socket was there a real kubelet, 1.36.2, admitted the first of its pods."""
PODS = 6


@asynccontextmanager
async def pods_running() -> AsyncIterator[Site]:
    async with site(settings=REAL) as at:
        async with at.running():
            for number in range(PODS):
                at.bind(pod(f"p{number}", limits={NUMBER: 1}), share(slot=number, fence=number + 1))
            for number in range(PODS):
                await at.node.phase(f"p{number}", "Running")
        yield at


@asynccontextmanager
async def process_of(at: Site, nats_url: str, notify: Path) -> AsyncIterator[None]:
    """Run an agent as its node's init system would."""
    settings = at.settings
    flags = {
        "node": NODE,
        "nats-url": nats_url,
        "gpus": at.gpus,
        "kubelet-dir": settings.kubelet_dir,
        "kubeconfig": settings.kubeconfig,
        "state-dir": settings.state_dir,
        "run-file": at.root / "run.json",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.node_agent"),
        *(word for flag, value in flags.items() for word in (f"--{flag}", str(value))),
        env={"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path), "NOTIFY_SOCKET": str(notify)},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def all_run(at: Site) -> None:
    """Wait until each pod was admitted anew and its container runs."""

    def running(name: str) -> bool:
        state = at.node.kubelet.state_of("default", name)
        assert at.node.pod(name)["status"]["phase"] != "Failed", at.message(name)
        return state is not None and state.containers["main"].phase == ContainerPhase.RUNNING

    for number in range(PODS):
        await until(partial(running, f"p{number}"))


class Notified(asyncio.DatagramProtocol):
    """What an init system hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def datagram_received(self, data: bytes, _: object) -> None:
        self.heard.append(data.decode())


async def test_pods_come_back_where_the_agent_is_there_before_the_kubelet() -> None:
    async with pods_running() as at:
        at.ledger.silent = True  # as NATS, which is not there yet
        async with at.running():
            await at.node.kubelet.reboot()

            await all_run(at)
            assert not at.refused


async def test_pods_fail_for_good_where_the_agent_comes_after_the_kubelet() -> None:
    async with pods_running() as at:
        await at.node.kubelet.reboot()
        for number in range(PODS):
            failed = await at.node.phase(f"p{number}", "Failed")
            assert failed["status"]["reason"] == "UnexpectedAdmissionError"
            assert "no healthy devices present" in failed["status"]["message"]


async def test_an_agent_that_cannot_reach_nats_says_that_it_started_and_serves_the_kubelet() -> (
    None
):
    nats = NatsServer()  # not started yet, as when it is to run on the node that boots
    async with pods_running() as at:
        told = await asyncio.get_running_loop().create_datagram_endpoint(
            Notified, str(at.root / "n"), family=1
        )
        async with process_of(at, nats.url, at.root / "n"):
            await until(lambda: told[1].heard, limit_s=30)
            await at.node.kubelet.reboot()
            await all_run(at)
            assert not (at.root / "run.json").exists()

            await nats.start()
            try:
                await _reports(nats.url)
                run = await until((at.root / "run.json").exists, limit_s=20)
            finally:
                nats.forget()
                nats.store.rmdir()
        told[0].close()

    assert run
    assert told[1].heard[0].startswith("READY=1\n")


async def _reports(url: str) -> None:
    """Wait until the agent says what it has, as it does to a binder."""
    async with Bus.connect(url, name="test binder") as bus:
        inbox = await bus.subscribe([DeviceReported], durable="binder")
        async with asyncio.timeout(30):
            await bus.publish([ResyncRequested(reason="a test asks")])
            for delivered in await inbox.batch():
                assert len(delivered.events[0].allocations) == PODS
                await delivered.ack()
