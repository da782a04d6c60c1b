"""Responses that stay open in shares of their owners."""

import asyncio
import contextlib
from collections import Counter

from shared.credentials.shares import OpenResponses, owner_of
from shared.credentials.turns import TooManyRequestsError
from tests.support.waiting import until


def test_what_service_accounts_use_is_their_namespaces() -> None:
    accounts = [f"system:serviceaccount:team-a:robot-{number}" for number in range(3)]

    assert {owner_of(name) for name in accounts} == {"system:serviceaccount:team-a"}
    assert owner_of("jane") == "jane"


class Places:
    """Opens responses that stay open until they are ended."""

    def __init__(self, responses: OpenResponses, group: asyncio.TaskGroup) -> None:
        self.responses = responses
        self.group = group
        self.open_of = Counter[str]()

    async def open(self, owner: str, *, administrator: bool = False) -> bool:
        """Return whether the owner gets a place."""
        answered = asyncio.get_running_loop().create_future()
        self.group.create_task(self._hold(owner, administrator, answered))
        return bool(await answered)

    async def _hold(self, owner: str, administrator: bool, answered: asyncio.Future[bool]) -> None:
        async def is_administrator() -> bool:
            return administrator

        with contextlib.suppress(TimeoutError, TooManyRequestsError):
            async with self.responses.place(owner, is_administrator=is_administrator):
                answered.set_result(True)
                self.open_of[owner] += 1
                try:
                    await asyncio.Event().wait()
                finally:
                    self.open_of[owner] -= 1
        if not answered.done():
            answered.set_result(False)

    async def close_all(self) -> None:
        for task in list(self.group._tasks):
            task.cancel()


async def test_a_newcomer_gets_its_part_of_what_one_owner_has_filled() -> None:
    async with asyncio.TaskGroup() as group:
        places = Places(OpenResponses(most=12, of_one=8, reserved=2), group)
        for owner in ("first", "second"):
            for _ in range(5):
                assert await places.open(owner)
        assert not await places.open("second")

        assert [await places.open("late") for _ in range(4)] == [True, True, True, False]
        await until(lambda: places.open_of == {"first": 3, "second": 4, "late": 3})
        assert await places.open("root", administrator=True)
        await places.close_all()


async def test_an_owner_has_a_bound_and_a_place_that_is_closed_is_free_again() -> None:
    async with asyncio.TaskGroup() as group:
        places = Places(OpenResponses(most=10, of_one=2, reserved=1), group)
        assert [await places.open("one") for _ in range(3)] == [True, True, False]
        await places.close_all()
        await until(lambda: not places.open_of["one"])
        assert await places.open("one")
        await places.close_all()


async def test_places_of_administrators_are_kept_for_them_however_many_others_there_are() -> None:
    async with asyncio.TaskGroup() as group:
        places = Places(OpenResponses(most=6, of_one=2, reserved=2), group)
        others = [await places.open(f"user-{number}") for number in range(8)]
        root = [await places.open("root", administrator=True) for _ in range(2)]
        await places.close_all()

    assert others == [True] * 4 + [False] * 4
    assert root == [True, True]
