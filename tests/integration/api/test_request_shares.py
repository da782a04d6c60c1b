"""Requests and live pages in shares of those who send them: a tenant cannot keep others out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest

from services.api.http.http_server import AT_ONCE_OF_ONE, MOST_OPEN_OF_ONE, MOST_WAITING
from services.api.projection.projection import DATA
from shared.credentials.shares import OpenResponses
from shared.model.events.request_reply import GrantReply, GrantRequest
from tests.support.api.running import RunningApi, running_api
from tests.support.clock import FakeClock
from tests.support.kubernetes.reviews import Reviews, reviewed
from tests.support.waiting import until

ROBOTS = [f"system:serviceaccount:team:robot-{number}" for number in range(20)]


@pytest.fixture
async def shown() -> AsyncIterator[RunningApi]:
    reviews = Reviews()
    reviews.rights |= {name: {"default"} for name in ROBOTS}
    reviews.grants |= {*ROBOTS}
    async with (
        reviewed(reviews, FakeClock()) as authenticator,
        running_api(authenticator) as running,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        yield replace(running, client=client)


class LivePages(contextlib.AsyncExitStack):
    """Opens live pages, and keeps them open."""

    def __init__(self, shown: RunningApi) -> None:
        super().__init__()
        self.shown = shown
        self.pages = list[aiohttp.ClientResponse]()

    async def open(self, user: str) -> int:
        headers = {"Authorization": f"Bearer token-of-{user}"}
        after = self.shown.service.feed.position
        url = f"{self.shown.url}/api/v1/events?after={after}"
        connecting = self.shown.client.get(url, headers=headers)
        page = await self.enter_async_context(connecting)
        self.pages.append(page)
        return page.status

    async def shows_changes(self, page: aiohttp.ClientResponse) -> bool:
        """Return whether a page, which may have been ended, shows what changes from now on."""
        feed = self.shown.service.feed
        feed.publish({DATA})
        wanted = feed.version
        async with asyncio.timeout(20):
            async for line in page.content:
                if line.startswith(b"id: ") and int(line.rpartition(b"-")[2]) >= wanted:
                    return True
        return False


async def test_the_service_accounts_of_a_namespace_share_what_one_user_may_have_open(
    shown: RunningApi,
) -> None:
    async with LivePages(shown) as live:
        statuses = [await live.open(ROBOTS[number % 20]) for number in range(MOST_OPEN_OF_ONE + 5)]
        member = await live.open("member")

    assert statuses == [200] * MOST_OPEN_OF_ONE + [429] * 5
    assert member == 200


async def test_a_newcomer_gets_a_live_page_of_the_user_with_most_once_all_are_taken(
    shown: RunningApi,
) -> None:
    shown.server._open = OpenResponses(most=6, of_one=5, reserved=1)
    async with LivePages(shown) as live:
        for _ in range(5):
            assert await live.open(ROBOTS[0]) == 200
        assert await live.open("member") == 200
        assert not await live.shows_changes(live.pages[0])
        assert await live.open("root") == 200
        for page in live.pages[1:]:
            assert await live.shows_changes(page)


class SlowTimekeeper:
    """Answers no grant until it is released."""

    def __init__(self) -> None:
        self.asked = list[str]()
        self.released = asyncio.Event()

    async def request(self, request: GrantRequest, *_: object, **__: object) -> GrantReply:
        self.asked.append(request.actor)
        await self.released.wait()
        return GrantReply(granted="1")


async def test_requests_of_one_namespace_wait_for_each_other_and_nobody_else_does(
    shown: RunningApi,
) -> None:
    timekeeper = SlowTimekeeper()
    shown.server.api.bus = timekeeper  # type: ignore[assignment]

    async def grant(user: str) -> int:
        path = "/api/v1/budgets/default/grants"
        body = {"minutes": "1", "reason": "r", "key": "k"}
        return (await shown.post(path, body, f"token-of-{user}"))[0]

    async with asyncio.TaskGroup() as tasks:
        count = AT_ONCE_OF_ONE + MOST_WAITING + 2
        robots = [tasks.create_task(grant(ROBOTS[number % 20])) for number in range(count)]
        await until(lambda: sum(task.done() for task in robots) == 2)
        root = tasks.create_task(grant("root"))
        await until(lambda: "root" in timekeeper.asked)
        assert len(timekeeper.asked) == AT_ONCE_OF_ONE + 1
        timekeeper.released.set()

    assert sorted(task.result() for task in robots) == [200] * (count - 2) + [429] * 2
    assert root.result() == 200
