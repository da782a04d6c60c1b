"""Connecting to NATS, as one of its users, and staying connected; what went wrong, in words."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client

from shared.clients.logins import Login, load_login
from shared.clients.subjects import inbox_of
from shared.model.errors import UnavailableError

logger = logging.getLogger(__name__)


async def connected(url: str, *, name: str, credentials: Path | None, patience_s: float) -> Client:
    """Return a connection that heals itself; `credentials` is a file that says who we are.

    Raises UnavailableError if no server took us within `patience_s` seconds, RequestError if the
    file cannot be read.
    """
    refusals: list[Exception] = []

    async def met(error: Exception) -> None:
        if "authorization" in repr(error).lower():
            refusals.append(error)
        await _note(error)

    try:
        async with asyncio.timeout(patience_s):
            return await nats.connect(
                url,
                name=name,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.25,
                ping_interval=5,
                max_outstanding_pings=2,
                pending_size=16 * 1024 * 1024,
                error_cb=met,
                disconnected_cb=_said("the connection to NATS was lost; trying again"),
                reconnected_cb=_said("the connection to NATS is back"),
                **(_options(load_login(credentials)) if credentials else {}),
            )
    except (TimeoutError, OSError, nats.errors.Error) as error:
        is_refused = bool(refusals) or isinstance(error, nats.errors.AuthorizationError)
        raise UnavailableError(
            _why_not(url.rpartition("@")[2], patience_s, credentials, is_refused=is_refused)
        ) from error


def _options(login: Login) -> dict[str, Any]:
    """Return who we are, and where we alone hear answers."""
    return {"user": login.user, "password": login.secret, "inbox_prefix": inbox_of(login.user)}


def _why_not(where: str, patience_s: float, credentials: Path | None, *, is_refused: bool) -> str:
    if is_refused and credentials is None:
        return f"NATS at {where} asks who we are: give --nats-credentials FILE"
    if is_refused:
        return (
            f"NATS at {where} refuses the user in {credentials}: compare the file with the "
            "server's configuration; `leasehold doors --out DIR` writes both"
        )
    return (
        f"NATS at {where} did not answer within {patience_s:g} s: is nats-server running, "
        "and is LEASEHOLD_NATS_URL right?"
    )


async def _note(error: Exception) -> None:
    if "permissions violation" in str(error).lower():
        logger.error("%s: our user at NATS lacks a right, see `leasehold doors --nats`", error)
    else:
        logger.debug("NATS: %r", error)


def _said(text: str) -> Callable[[], Any]:
    async def said() -> None:
        logger.info(text)

    return said
