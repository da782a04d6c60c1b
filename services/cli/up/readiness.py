"""Readiness of components: the checks of their current processes."""

import asyncio
import contextlib
import json
from pathlib import Path

from services.cli.up.components import Component, FileCheck, ReadinessCheck, RunFileCheck, TcpCheck
from services.cli.up.servers import HOST

TCP_TIMEOUT_S = 1.0


async def is_ready(component: Component, pid: int) -> bool:
    """Return whether every check of the component's process passes now."""
    for check in component.checks:
        if not await _passes(check, pid):
            return False
    return True


def address_of(component: Component) -> str:
    """Return the address to show: the component's own, else the one in its run file."""
    if component.address:
        return component.address
    contents = (
        _read_run_file(check.path) for check in component.checks if isinstance(check, RunFileCheck)
    )
    return next((f"http://{content['http']}" for content in contents if content.get("http")), "")


async def _passes(check: ReadinessCheck, pid: int) -> bool:
    match check:
        case FileCheck(path=path):
            return path.exists()
        case RunFileCheck(path=path):
            return _read_run_file(path).get("pid") == pid
        case TcpCheck():
            return await _responds(check)


async def _responds(check: TcpCheck) -> bool:
    try:
        async with asyncio.timeout(TCP_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, check.port)
            try:
                writer.write(check.send)
                received = await reader.readexactly(len(check.expect)) if check.expect else b""
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    return received == check.expect


def _read_run_file(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
