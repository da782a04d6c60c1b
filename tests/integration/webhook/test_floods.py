"""Floods of peers whom nobody knows: honest reviews are answered, and memory has a bound."""

import asyncio
import base64
import io
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from services.webhook.registration import PATH
from shared.dialects.reserved import NOTHING_VISIBLE, VISIBLE
from tests.support.webhook.flood import Flood
from tests.support.webhook.replica import pod
from tests.support.webhook.worst_pods import review_of

ROOT = Path(__file__).parents[3]
MOST_MIB = 400
"""Well below the limit of the manifest, 1 GiB."""
TIMEOUT_S = 30
"""The longest that an API server waits."""
MOST_WORK_S = 5.0
"""Processor time of the webhook until a review is answered: other tests use the machine, too."""
REVIEWS = 2
LARGE_BYTES = 600_000
HIDDEN = [
    {
        "op": "replace",
        "path": "/spec/containers/0/env/0",
        "value": {"name": VISIBLE, "value": NOTHING_VISIBLE},
    }
]


@asynccontextmanager
async def running(module: str, *args: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run a module in a process of its own, and yield its first line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *args, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode()
    finally:
        process.kill()
        await process.wait()


def peak_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def work_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


async def reviewed(port: int, body: bytes) -> Any:
    """Return what is patched, as for an API server that has no open connection, or why not."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    url = f"https://127.0.0.1:{port}{PATH}?timeout={TIMEOUT_S}s"
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
            session.post(
                url, data=io.BytesIO(body), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
            ) as response,
        ):
            answer = json.loads(await response.read())["response"]
            return json.loads(base64.b64decode(answer["patch"])) if answer["allowed"] else answer
    except (aiohttp.ClientError, TimeoutError) as error:
        return repr(error)


def seeing(size: int = 0) -> bytes:
    """The review of a pod whose container would see all devices."""
    obj = pod()
    obj["spec"]["containers"][0]["env"] = [{"name": VISIBLE, "value": "all"}]
    obj["metadata"]["annotations"] = {f"example.com/{n}": "x" * 1_000 for n in range(size // 1_020)}
    return review_of(obj, namespace="honest")


async def test_honest_reviews_are_answered_in_time_during_floods(tmp_path: Path) -> None:
    """The floods come from the address of the honest client, or from many."""
    bodies = [seeing()] * REVIEWS + [seeing(LARGE_BYTES)]
    answers: dict[str, list[Any]] = {}
    work: dict[str, float] = {}
    async with running("tests.support.webhook.lone_webhook", str(tmp_path)) as (webhook, line):
        port = json.loads(line)["port"]
        for kind in Flood(port).kinds:
            async with running("tests.support.webhook.flood", kind, str(port)):
                answers[kind] = []
                for body in bodies:
                    before = work_s(webhook.pid)
                    answers[kind].append(await reviewed(port, body))
                    work[kind] = max(work.get(kind, 0.0), work_s(webhook.pid) - before)
        peak = peak_mib(webhook.pid)

    assert answers == {kind: [HIDDEN] * len(bodies) for kind in answers}
    assert max(work.values()) < MOST_WORK_S, work
    assert peak < MOST_MIB
