"""Closes a device, or the node, while what could not be given would fail the next pod, too."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from services.node_agent.allocate.allocation import NOT_ITS_OWN
from services.node_agent.node import Node
from shared.model.bounds import cut
from shared.model.errors import LeaseholdError
from shared.model.leases.lease import Share
from shared.model.names import DeviceUuid
from shared.model.quantity import timestamp

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Pause before what failed is tried again; it doubles."""
MAX_AGAIN_S = 60.0
"""The longest such pause."""
NOT_GIVEN = "GrantFailed"

TryAgain = Callable[[], Awaitable[None]]
"""Raises an error of `NOT_ITS_OWN` while it fails; any other one ends the tries."""


class FailedGrants:
    def __init__(self, node: Node) -> None:
        self.node = node
        self._tries: dict[DeviceUuid | None, TryAgain] = {}
        """None is the node."""
        self._added = asyncio.Event()

    def close_devices(self, shares: Iterable[Share], reason: str, try_again: TryAgain) -> None:
        since = timestamp(self.node.clock.now())
        fault = cut(
            f"{NOT_GIVEN}: no share of it could be given since {since}: {reason}; this is tried "
            f"again at least every {MAX_AGAIN_S:g} s"
        )
        for device in {share.device for share in shares}:
            logger.error("device %s gets no new share: %s", device, fault)
            self.node.grant_faults[device] = fault
            self._tries[device] = try_again
        self.node.report_due.set()
        self._added.set()

    def close_node(self, reason: str, try_again: TryAgain) -> None:
        logger.error("no pod may be bound to this node: %s", reason)
        self.node.unresolved_reason = cut(reason)
        self._tries[None] = try_again
        self._added.set()

    def open_devices(self, shares: Iterable[Share]) -> None:
        for device in {share.device for share in shares} & self.node.grant_faults.keys():
            self._open(device)

    async def run(self) -> None:
        tasks: dict[DeviceUuid | None, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await self._added.wait()
                self._added.clear()
                tasks = {closed: task for closed, task in tasks.items() if not task.done()}
                for closed in self._tries.keys() - tasks.keys():
                    tasks[closed] = group.create_task(self._try_until_open(closed))

    async def _try_until_open(self, closed: DeviceUuid | None) -> None:
        pause_s = AGAIN_S
        while closed in self._tries:
            await self.node.clock.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_AGAIN_S)
            try_again = self._tries.get(closed)
            if try_again is None or not await _succeeds(try_again):
                continue
            if self._tries.get(closed) is try_again:  # nothing else has failed meanwhile
                self._open(closed)

    def _open(self, closed: DeviceUuid | None) -> None:
        self._tries.pop(closed, None)
        if closed is None:
            self.node.unresolved_reason = ""
            logger.info("pods may be bound to this node again")
            return
        self.node.grant_faults.pop(closed, None)
        self.node.report_due.set()
        logger.info("device %s is not closed for that reason any more", closed)


async def _succeeds(try_again: TryAgain) -> bool:
    try:
        await try_again()
    except NOT_ITS_OWN:
        return False
    except LeaseholdError as error:
        logger.info("what could not be given is not tried again: %s", error)
    return True
