"""What a connection reports to the senders of the work that it has received."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import nats.errors

from shared.nats import subjects, wire


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmationTiming:
    report_s: float = 0.25
    """Messages that are received or handled within this time are reported together."""
    held_s: float = 1.0
    """The interval of reports about messages that are not handled yet."""


@dataclass(slots=True)
class _Sender:
    held: set[int] = field(default_factory=set)
    handled: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    is_unreported: bool = False
    reported_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Receipt:
    confirm: Callable[[], None]
    give_back: Callable[[], None]
    """The work is not handled here: its sender sends it to any replica again."""


class Confirmations:
    def __init__(self, client: Any, timing: ConfirmationTiming) -> None:
        self._client = client
        self._timing = timing
        self._senders: dict[str, _Sender] = {}
        self._added = asyncio.Event()

    def take(self, reply: str) -> Receipt | None:
        """Hold the message with this reply subject, unless it is held, or has no number."""
        prefix = reply.rpartition(".")[0]
        number = subjects.number_of(reply)
        if number is None:
            return None
        sender = self._senders.setdefault(prefix, _Sender(reported_at=time.monotonic()))
        if number in sender.held:
            return None
        sender.held.add(number)
        sender.is_unreported = True
        self._added.set()
        settle = partial(self._settle, prefix, number)
        return Receipt(partial(settle, is_handled=True), partial(settle, is_handled=False))

    def _settle(self, prefix: str, number: int, *, is_handled: bool) -> None:
        sender = self._senders.get(prefix)
        if sender is not None and number in sender.held:
            sender.held.remove(number)
            (sender.handled if is_handled else sender.returned).append(number)

    async def run(self) -> None:
        while True:
            await self._added.wait()
            while self._senders:
                await asyncio.sleep(self._timing.report_s)
                if self._client.is_connected:
                    await self._report()
            self._added.clear()

    async def return_all(self) -> None:
        for sender in self._senders.values():
            sender.returned += sorted(sender.held)
            sender.held.clear()
        if self._client.is_connected:
            await self._report()

    async def _report(self) -> None:
        now = time.monotonic()
        for prefix, sender in list(self._senders.items()):
            is_late = bool(sender.held) and now - sender.reported_at >= self._timing.held_s
            if not (sender.handled or sender.returned or sender.is_unreported or is_late):
                continue
            report = wire.Confirmation(
                handled=sender.handled, held=sorted(sender.held), returned=sender.returned
            )
            if sender.held:
                self._senders[prefix] = _Sender(held=sender.held, reported_at=now)
            else:
                del self._senders[prefix]
            with contextlib.suppress(nats.errors.Error):  # the sender sends the messages again
                await self._client.publish(
                    subjects.confirmation_subject(prefix), wire.encode_confirmation(report)
                )
