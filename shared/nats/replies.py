"""Replies to the requests that one connection receives, each to the inbox of its sender only."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.model.errors import LeaseholdError
from shared.model.events.event import Event
from shared.nats import subjects, wire
from shared.nats.inbox import OnRefused, count_refused, decode_checked, is_from_own_inbox
from shared.nats.limited_log import LimitedLog
from shared.nats.sender_shares import SenderShares

logger = logging.getLogger(__name__)
_limited = LimitedLog(logger)

MOST_OF_SERVICES = 4096
"""Services give up after a few seconds."""
MOST_RAW = 8192
Reply = Callable[[Any], Awaitable[Event | None]]


class Replies:
    """`run` must run while requests are received."""

    def __init__(self, client: Any, on_refused: OnRefused) -> None:
        self._client = client
        self._on_refused = on_refused
        self._group: asyncio.TaskGroup
        self._tasks = set[asyncio.Task[None]]()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            await asyncio.get_running_loop().create_future()

    async def drain(self, limit_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)

    async def subscribe(
        self, kind: type[Event], group: str, route: str, reply: Reply, *, concurrency: int
    ) -> Subscription:
        """Reply to requests of `kind` (for `route` only, if given) as one replica of `group`.

        Up to `concurrency` requests are handled at once; the others wait, each node's in its share.
        """
        free = asyncio.Semaphore(concurrency)
        shares = SenderShares(MOST_OF_SERVICES)

        async def handle(message: Msg) -> None:
            async with free:
                await self._handle(kind, message, reply)

        async def receive(message: Msg) -> None:
            if not is_from_own_inbox(kind, message, self._on_refused):
                return
            leave = shares.take(kind, message.subject)
            if leave is not None:
                self._start(handle(message)).add_done_callback(lambda _: leave())

        count_refused(kind, 0)
        subject = subjects.reply_subject(kind, route)
        subscription = await self._client.subscribe(subject, queue=group, cb=receive)
        self._client.rates.watch(subscription._id, kind)  # noqa: SLF001 - it has no other name
        return subscription

    async def subscribe_raw(
        self, subject: str, group: str, reply: Callable[[bytes], Awaitable[bytes]]
    ) -> Subscription:
        """Reply to all requests that wait at once; an error is logged, and no reply is sent."""
        waiting = set[asyncio.Task[None]]()

        async def handle(message: Msg) -> None:
            try:
                await self._client.publish(message.reply, await reply(message.data))
            except (LeaseholdError, nats.errors.Error) as error:
                _limited.write(logging.WARNING, subject, f"no reply on {subject}: {error}")
            except Exception as error:  # noqa: BLE001 - it must not end the task group
                _limited.write(logging.ERROR, subject, f"no reply on {subject}: a bug", error)

        async def receive(message: Msg) -> None:
            if len(waiting) >= MOST_RAW:
                _limited.write(logging.WARNING, subject, f"{MOST_RAW} requests on {subject} wait")
                return
            task = self._start(handle(message))
            waiting.add(task)
            task.add_done_callback(waiting.discard)

        return await self._client.subscribe(subject, queue=group, cb=receive)

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _handle(self, kind: type[Event], message: Msg, reply: Reply) -> None:
        cause = f"{kind.subject} {subjects.node_in(kind, message.subject)}"
        try:
            requests = decode_checked(kind, message, self._on_refused)
            response = await reply(requests[0]) if requests else None
            if response is not None:
                # Without headers: the library's `respond` would send those of the request back.
                await self._client.publish(message.reply, wire.encode([response]))
        except (LeaseholdError, nats.errors.Error) as error:
            _limited.write(logging.WARNING, cause, f"no reply to {kind.subject}: {error!s}")
        except Exception as error:  # noqa: BLE001 - it must not end the task group
            _limited.write(logging.ERROR, cause, f"no reply to {kind.subject}: a bug", error)
