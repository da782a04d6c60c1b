"""JetStream's files are lost while everything runs: pods go on, and services say what is wrong."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.request import urlopen

import nats.errors
import pytest
import pytest_asyncio

from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.model.events.pod_events import StreamRecovered
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.support.stack import Stack, gpu_pod, stack, vgpu
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVICES = ("watcher", "placer-0", "binder")
REASON = "nats: JetStream is not available on NATS"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up() -> AsyncIterator[Stack]:
    async with stack("--nodes", "2", "--gpus", "4xA100-80GB") as running_stack:
        yield running_stack


async def lose_store(up: Stack) -> None:
    """Remove the files of JetStream, and publish until its open file is full."""
    shutil.rmtree(up.root / "nats" / "jetstream")
    login = up.secret("nats", "watcher")
    credentials = ClientCredentials(
        login_file=Path(login), tls=TlsFiles(ca=up.root / "credentials" / "ca.crt")
    )
    subject = subjects.publish_subject(StreamRecovered)
    async with Bus.connect(
        up.state()["nats_url"], name="test", credentials=credentials, creates_stream=False
    ) as bus:
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            for _ in range(200):
                await bus.work.stream.publish(subject, b"x" * 500_000, timeout=1.0)
            pytest.fail("JetStream still stores")


def reasons(up: Stack, service: str) -> str:
    """Return the text of a service's /readyz."""
    address = json.loads((up.root / "run" / f"{service}.json").read_text())["http"]
    try:
        with urlopen(f"http://{address}/readyz") as response:
            return str(response.read().decode())
    except OSError as error:
        return str(error.read().decode()) if hasattr(error, "read") else repr(error)


async def test_pods_come_and_go_while_jetstream_stores_nothing(up: Stack) -> None:
    for number in range(10):
        await up.create(gpu_pod(f"before-{number}", vgpu(memory=2000)))
    await up.until_all(10)

    await lose_store(up)
    for number in range(10):
        await up.create(gpu_pod(f"during-{number}", vgpu(memory=2000)))
    await asyncio.gather(
        *(up.kube.delete(f"/api/v1/namespaces/default/pods/before-{n}") for n in range(10))
    )
    seen: set[str] = set()

    async def unready() -> set[str]:
        for each in SERVICES:
            if REASON in await asyncio.to_thread(reasons, up, each):
                seen.add(each)
        return seen

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(until(unready, lambda found: found == set(SERVICES), limit_s=45))
        await until(lambda: all_bound(up), limit_s=15)  # P1
    await until(lambda: all(reasons(up, each) == "ok\n" for each in SERVICES))
    await up.create(gpu_pod("after", vgpu(memory=2000)))
    await up.until_all(11)
    await up.audit()
    await up.clear()
    await up.audit()


async def all_bound(up: Stack) -> bool:
    pods = [pod for pod in await up.pods() if pod["metadata"]["name"].startswith("during")]
    return len(pods) == 10 and all(pod["spec"].get("nodeName") for pod in pods)
