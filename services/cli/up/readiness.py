"""Asking a part whether it is ready."""

import asyncio
import contextlib
import json
from pathlib import Path

from services.cli.up.parts import Announces, Answers, Check, Exists, Part
from services.cli.up.servers import HOST


async def is_ready(part: Part, pid: int) -> bool:
    """Say whether every check of the part's process passes now."""
    for check in part.checks:
        if not await _passes(check, pid):
            return False
    return True


def announced_address(part: Part) -> str:
    """Return the address the part shows to people."""
    if part.address:
        return part.address
    told = (_announced(check.path) for check in part.checks if isinstance(check, Announces))
    return next((f"http://{said['http']}" for said in told if said.get("http")), "")


async def _passes(check: Check, pid: int) -> bool:
    match check:
        case Exists(path=path):
            return path.exists()
        case Announces(path=path):
            return _announced(path).get("pid") == pid
        case Answers():
            return await _answers(check)


async def _answers(check: Answers) -> bool:
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(HOST, check.port)
            try:
                writer.write(check.says)
                heard = await reader.readexactly(len(check.expects)) if check.expects else b""
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    return heard == check.expects


def _announced(path: Path) -> dict[str, object]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
