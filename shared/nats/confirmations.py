"""What a connection reports to the senders of the work that it has received.

A sender keeps a message until a receiver reports it as handled. Messages to report are collected
for `report_s`, so that many share one report; messages that take longer are reported as held.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import nats.errors

from shared.nats import subjects, wire


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmationTiming:
    """When receivers report."""

    report_s: float = 0.25
    held_s: float = 1.0
    """Interval of the reports about messages that are not handled yet."""


@dataclass(slots=True)
class _Sender:
    """The messages of one sender."""

    held: set[int] = field(default_factory=set)
    handled: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    is_unreported: bool = False
    """Whether some held message was in no report yet."""
    reported_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Receipt:
    """A message of work that this process holds."""

    confirmations: "Confirmations"
    sender: str
    number: int

    def confirm(self) -> None:
        """Report that the message is handled: its sender forgets it."""
        self.confirmations.settle(self, is_handled=True)

    def give_back(self) -> None:
        """Report that this replica cannot handle the message: it is sent to any replica again."""
        self.confirmations.settle(self, is_handled=False)


class Confirmations:
    """The messages of work that this process holds, by sender."""

    def __init__(
        self,
        client: Any,
        timing: ConfirmationTiming,
        *,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._timing = timing
        self._ticks = ticks
        self._senders: dict[str, _Sender] = {}
        self._added = asyncio.Event()

    def take(self, reply: str) -> Receipt | None:
        """Hold the message with this reply subject; None: it is held already, or has no sender."""
        prefix, number = reply.rpartition(".")[0], subjects.number_of(reply)
        if number is None or not subjects.is_inbox(prefix):
            return None
        sender = self._senders.setdefault(prefix, _Sender(reported_at=self._ticks()))
        receipt = Receipt(self, prefix, number)
        if receipt.number in sender.held:
            return None
        sender.held.add(receipt.number)
        sender.is_unreported = True
        self._added.set()
        return receipt

    def settle(self, receipt: Receipt, *, is_handled: bool) -> None:
        """Report a held message as handled, or as returned."""
        sender = self._senders.get(receipt.sender)
        if sender is None or receipt.number not in sender.held:
            return
        sender.held.remove(receipt.number)
        (sender.handled if is_handled else sender.returned).append(receipt.number)

    async def run(self) -> None:
        """Send reports until cancelled; nothing is done while nothing is held."""
        while True:
            await self._added.wait()
            while self._senders:
                await asyncio.sleep(self._timing.report_s)
                if self._client.is_connected:
                    await self._report()
            self._added.clear()

    async def return_all(self) -> None:
        """Return every message that is held: this process is stopping."""
        for sender in self._senders.values():
            sender.returned += sorted(sender.held)
            sender.held.clear()
        if self._client.is_connected:
            await self._report()

    async def _report(self) -> None:
        now = self._ticks()
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
