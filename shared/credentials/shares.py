"""Responses that stay open, and each API user's share of them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from shared.credentials.turns import TooManyRequestsError

SERVICE_ACCOUNT = "system:serviceaccount:"


def owner_of(user: str) -> str:
    """Return the owner of what a user uses: a service account's namespace, or else the user.

    A user that may create pods in a namespace has as many service accounts there as it likes.

    >>> owner_of("system:serviceaccount:ml:trainer"), owner_of("jane")
    ('system:serviceaccount:ml', 'jane')
    """
    namespace, _, _ = user.removeprefix(SERVICE_ACCOUNT).partition(":")
    return SERVICE_ACCOUNT + namespace if user.startswith(SERVICE_ACCOUNT) else user


class OpenResponses:
    """Responses that stay open, such as watches: at most `most`, and `of_one` of one owner.

    If all places are taken, an owner with fewer than another gets one of the other's. The last
    `reserved` places are for administrators.
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
        """Raises TooManyRequestsError; TimeoutError once another owner gets the place."""
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
        """End a response unless both owners would have as many then."""
        owner, scopes = max(self._open.items(), key=lambda entry: len(entry[1]))
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
