"""What one sender may use of what all share: turns, and responses that stay open."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from shared.model.errors import RequestError

SERVICE_ACCOUNT = "system:serviceaccount:"


class TooManyRequestsError(RequestError):
    """A sender uses its share already, or all is in use."""


def owner_of(user: str) -> str:
    """Return who owns what a user uses: a service account's namespace, or else the user.

    Whoever may create pods in a namespace has as many service accounts there as it likes.
    """
    namespace, _, _ = user.removeprefix(SERVICE_ACCOUNT).partition(":")
    return SERVICE_ACCOUNT + namespace if user.startswith(SERVICE_ACCOUNT) else user


class FairTurns:
    """Owners with much work wait for themselves: between two turns of one, each other has one.

    `at_once` turns are held at the same time, `of_one` by the same owner; of whose work
    `most_waiting` pieces may wait, with None any number.
    """

    def __init__(
        self, at_once: int = 1, of_one: int = 1, *, most_waiting: int | None = None
    ) -> None:
        self._at_once = at_once
        self._of_one = of_one
        self._most_waiting = most_waiting
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the owner's turn, and hold it. Raises TooManyRequestsError."""
        if self._may_hold(owner):
            self._held[owner] += 1
        else:
            await self._wait(owner)
        try:
            yield
        finally:
            self._release(owner)

    async def _wait(self, owner: str) -> None:
        """Wait until the owner holds a turn more."""
        waiting = self._waiting.setdefault(owner, deque())
        if self._most_waiting is not None and len(waiting) >= self._most_waiting:
            raise TooManyRequestsError(
                f"{len(waiting)} requests of {owner} wait, the most at a time: send fewer at once"
            )
        granted = asyncio.get_running_loop().create_future()
        waiting.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release(owner)
            elif granted in waiting:
                waiting.remove(granted)
                self._forget_idle(owner)
            raise

    def _may_hold(self, owner: str) -> bool:
        return self._held.total() < self._at_once and self._held[owner] < self._of_one

    def _release(self, owner: str) -> None:
        """Give the turn to the owner who has waited longest since the last one."""
        self._held[owner] -= 1
        self._held += Counter()  # without those that are 0
        for next_owner, waiting in list(self._waiting.items()):
            while waiting and waiting[0].done():  # it was cancelled
                waiting.popleft()
            if waiting and self._may_hold(next_owner):
                self._held[next_owner] += 1
                waiting.popleft().set_result(None)
                self._waiting.move_to_end(next_owner)
                self._forget_idle(next_owner)
                return
            self._forget_idle(next_owner)

    def _forget_idle(self, owner: str) -> None:
        if not self._waiting.get(owner, True):
            del self._waiting[owner]


class OpenResponses:
    """Responses that stay open, such as watches: at most `most`, and `of_one` of one owner.

    If all places are taken, an owner with fewer than another gets one of that other's: its oldest
    response ends, and its client asks again. The last `reserved` places are for administrators.
    """

    def __init__(self, most: int, of_one: int, reserved: int) -> None:
        self._most = most
        self._of_one = of_one
        self._reserved = reserved
        self._open: dict[str, deque[asyncio.Timeout]] = {}

    @asynccontextmanager
    async def place(
        self, owner: str, *, is_administrator: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[None]:
        """Hold a place. Raises TooManyRequestsError; TimeoutError once another owner gets it."""
        limit = self._most - self._reserved
        if self._count() >= limit and await is_administrator():
            limit = self._most
        own = len(self._open.get(owner, ()))
        if own >= self._of_one:
            raise TooManyRequestsError(
                f"{own} watches and live pages of {owner} are open, the most at a time: close some"
            )
        if self._count() >= limit:
            self._take_from_largest(own)
        async with asyncio.timeout(None) as scope:
            self._open.setdefault(owner, deque()).append(scope)
            try:
                yield
            finally:
                self._forget(owner, scope)

    def _count(self) -> int:
        return sum(map(len, self._open.values()))

    def _take_from_largest(self, own: int) -> None:
        """End the oldest response of the owner with most, unless both would have as many then."""
        owner, scopes = max(self._open.items(), key=lambda each: len(each[1]))
        if len(scopes) <= own + 1:
            raise TooManyRequestsError(
                f"{self._count()} watches and live pages are open, the most at a time: try later"
            )
        scope = scopes[0]
        self._forget(owner, scope)
        scope.reschedule(asyncio.get_running_loop().time())

    def _forget(self, owner: str, scope: asyncio.Timeout) -> None:
        scopes = self._open.get(owner, deque())
        if scope in scopes:
            scopes.remove(scope)
        if not scopes:
            self._open.pop(owner, None)
