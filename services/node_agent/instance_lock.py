"""The lock of the state directory: one agent serves the node, others wait."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import platform
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from shared.model.errors import UnavailableError
from shared.runtime.run import notify_ready

logger = logging.getLogger(__name__)

FILE = "agent.lock"
LOOK_S = 0.2
"""Interval of attempts to get the lock."""
WARN_AFTER_S = 10.0
"""An agent that is being replaced has ended by then; after that, two were started."""
WARN_AGAIN_S = 60.0
"""Interval of warnings."""
UNIT = "unit"
POD = "pod"
PROCESS = "process"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentInstance:
    form: str
    """`unit` of the init system, `pod`, or a `process` that was started by hand."""
    name: str
    pid: int

    def __str__(self) -> str:
        return {UNIT: f"a unit of this node, pid {self.pid}", POD: f"pod {self.name}"}.get(
            self.form, f"process {self.pid}"
        )


def this_instance(environ: Mapping[str, str]) -> AgentInstance:
    form = PROCESS
    if "KUBERNETES_SERVICE_HOST" in environ:
        form = POD
    elif "INVOCATION_ID" in environ:
        form = UNIT
    return AgentInstance(form=form, name=platform.node(), pid=os.getpid())


def running_instance(state_dir: Path) -> AgentInstance | None:
    """Raises OSError if the lock cannot be read."""
    try:
        file = (state_dir / FILE).open()
    except FileNotFoundError:
        return None
    with file:
        return None if _locked(file, fcntl.LOCK_SH) else _read(file)


@contextlib.asynccontextmanager
async def instance_lock(
    state_dir: Path, environ: Mapping[str, str] = os.environ, *, warn_after_s: float = WARN_AFTER_S
) -> AsyncIterator[None]:
    """Raises UnavailableError if the directory cannot be written to."""
    try:
        await asyncio.to_thread(state_dir.mkdir, parents=True, exist_ok=True)
        file = await asyncio.to_thread((state_dir / FILE).open, "a+")
    except OSError as error:
        raise UnavailableError(
            f"{error.filename or state_dir}: {error.strerror}; --state-dir must be writable by the "
            "node agent"
        ) from error
    with file:
        await _lock(file, state_dir, warn_after_s)
        with contextlib.suppress(OSError):  # a full disk; others see an agent without its name
            file.seek(0)
            file.truncate()
            file.write(json.dumps(asdict(this_instance(environ))))
            file.flush()
        yield


async def _lock(file: IO[str], state_dir: Path, warn_after_s: float) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    warn_at = began + warn_after_s
    while not _locked(file, fcntl.LOCK_EX):
        if loop.time() - began < LOOK_S:
            logger.info("waiting for another node agent to release %s", state_dir)
            notify_ready("waits for another node agent to end")  # that one serves the kubelet
        if loop.time() >= warn_at:
            warn_at = loop.time() + WARN_AGAIN_S
            logger.warning(
                "another node agent serves this node: %s. One is enough: label the node "
                "leasehold.dev/agent=unit if its unit is to serve it, else stop the unit with "
                "systemctl disable --now leasehold-agent",
                _read(file) or "its name is not in the lock file",
            )
        await asyncio.sleep(LOOK_S)


def _locked(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: IO[str]) -> AgentInstance | None:
    file.seek(0)
    try:
        return AgentInstance(**json.loads(file.read()))
    except (ValueError, TypeError):  # an older agent did not write it
        return None
