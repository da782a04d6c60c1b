"""Two agents on one node: one serves, the other waits and logs the owner of the lock."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.node_agent.instance_lock import (
    FILE,
    WARN_AFTER_S,
    AgentInstance,
    instance_lock,
    running_instance,
)
from shared.runtime.run import notify_ready
from tests.support.waiting import until

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
UNIT = {"INVOCATION_ID": "0123"}


@asynccontextmanager
async def waiting(
    state_dir: Path, environ: dict[str, str], *, warn_after_s: float = WARN_AFTER_S
) -> AsyncIterator[asyncio.Event]:
    """Another agent; the event is set once it serves."""
    serves = asyncio.Event()

    async def other() -> None:
        async with instance_lock(state_dir, environ, warn_after_s=warn_after_s):
            serves.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(other())
    try:
        yield serves
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("environ", "form", "named"),
    [(UNIT, "unit", "a unit of this node, pid"), (POD, "pod", "pod "), ({}, "process", "process ")],
)
async def test_the_lock_file_names_the_form_of_the_running_agent(
    tmp_path: Path, environ: dict[str, str], form: str, named: str
) -> None:
    assert running_instance(tmp_path) is None
    async with instance_lock(tmp_path, environ):
        holder = running_instance(tmp_path)
    assert running_instance(tmp_path) is None  # the file stays, unlocked

    assert holder is not None
    assert (holder.form, holder.pid) == (form, os.getpid())
    assert str(holder).startswith(named)


async def test_a_second_agent_logs_the_lock_owner_waits_and_takes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with instance_lock(tmp_path, UNIT), waiting(tmp_path, POD, warn_after_s=0.0) as serves:
        await until(lambda: "another node agent serves" in caplog.text)
        assert not serves.is_set()
        assert "a unit of this node, pid" in caplog.text
        assert "leasehold.dev/agent=unit" in caplog.text
    async with waiting(tmp_path, POD, warn_after_s=0.0) as serves, asyncio.timeout(30):
        await serves.wait()
        holder = running_instance(tmp_path)

    assert isinstance(holder, AgentInstance)
    assert holder.form == "pod"


async def test_a_lock_owner_without_a_name_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with instance_lock(tmp_path, UNIT):
        (tmp_path / FILE).write_text("")
        async with waiting(tmp_path, POD, warn_after_s=0.0):
            await until(lambda: "its name is not in the lock file" in caplog.text)


@pytest.mark.parametrize("abstract", [False, True])
def test_sd_notify_writes_to_path_and_abstract_sockets(tmp_path: Path, *, abstract: bool) -> None:
    name = f"leasehold-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as init:
        init.bind(f"\0{name}" if abstract else name)
        init.settimeout(10)

        notify_ready("ready", {"NOTIFY_SOCKET": f"@{name}" if abstract else name})

        assert init.recv(100) == b"READY=1\nSTATUS=ready"


def test_a_missing_notify_socket_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notify_ready("ready", {"NOTIFY_SOCKET": str(tmp_path / "gone")})
    notify_ready("ready", {})

    assert "gone: No such file or directory" in caplog.text
