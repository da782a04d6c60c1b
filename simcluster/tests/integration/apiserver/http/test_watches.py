"""Watches of the simulated API server over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.support.simcluster.apiserver import (
    PODS,
    ApiUnderTest,
    a_pod,
    api_server,
)

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


@pytest.fixture
async def api() -> AsyncIterator[ApiUnderTest]:
    async with api_server(bookmark_s=0.2, window=50) as started:
        yield started


@asynccontextmanager
async def open_watch(
    api: ApiUnderTest, path: str = PODS, accept: str = "application/json", **query: str
) -> AsyncIterator[AsyncIterator[Any]]:
    async with (
        asyncio.timeout(30),
        api.client() as session,
        session.get(path, params={"watch": "1", **query}, headers={"Accept": accept}) as answer,
    ):
        assert answer.status == 200

        async def events() -> AsyncIterator[Any]:
            async for line in answer.content:
                yield json.loads(line)

        yield events()


def event_summary(event: Any) -> str:
    return f"{event['type']} {event['object']['metadata'].get('name', '')}".strip()


async def test_a_watch_without_a_version_begins_with_the_present_objects(api: ApiUnderTest) -> None:
    api.store.create("pods", a_pod("first"))
    async with open_watch(api) as events:
        assert event_summary(await anext(events)) == "ADDED first"
        api.store.create("pods", a_pod("second"))
        api.store.patch("pods", "default", "first", {"metadata": {"labels": {"a": "b"}}})
        api.store.delete("pods", "default", "first")

        following = [event_summary(await anext(events)) for _ in range(3)]

    assert following == ["ADDED second", "MODIFIED first", "DELETED first"]


async def test_a_watch_from_a_version_sends_later_changes(api: ApiUnderTest) -> None:
    api.store.create("pods", a_pod("before"))
    version = str(api.store.version)
    api.store.create("pods", a_pod("after"))
    api.store.delete("pods", "default", "before")

    async with open_watch(api, resourceVersion=version) as events:
        received = [await anext(events) for _ in range(2)]

    assert [event_summary(event) for event in received] == ["ADDED after", "DELETED before"]
    assert received[1]["object"]["metadata"]["resourceVersion"] == str(api.store.version)
    assert received[0]["object"]["kind"] == "Pod"


async def test_quiet_watches_get_bookmarks(api: ApiUnderTest) -> None:
    version = str(api.store.version)
    async with open_watch(api, resourceVersion=version, allowWatchBookmarks="true") as events:
        api.store.create("configmaps", {"metadata": {"name": "c", "namespace": "default"}})
        latest = {"resourceVersion": str(api.store.version)}
        while (bookmark := await anext(events))["object"]["metadata"] != latest:
            assert bookmark["type"] == "BOOKMARK", "of the time before"

    assert bookmark["type"] == "BOOKMARK"
    assert bookmark["object"]["kind"] == "Pod"


async def test_a_version_too_old_is_an_error_event(api: ApiUnderTest) -> None:
    version = str(api.store.version)
    api.store.create("pods", a_pod("web"))
    api.store.compact()

    async with open_watch(api, resourceVersion=version) as events:
        received = [event async for event in events]

    assert [event["type"] for event in received] == ["ERROR"]
    assert received[0]["object"]["code"] == 410
    assert received[0]["object"]["reason"] == "Expired"


async def test_objects_enter_and_leave_a_watch_by_its_selector(api: ApiUnderTest) -> None:
    version = str(api.store.version)
    api.store.create("pods", a_pod("web", labels={"app": "a"}))
    api.store.create("pods", a_pod("other", labels={"app": "b"}))
    bound = {**api.store.read("pods", "default", "web")}
    bound["spec"] = {**bound["spec"], "nodeName": "node-0"}
    api.store.update("pods", bound, subresource="binding")

    async with open_watch(
        api, resourceVersion=version, labelSelector="app=a", fieldSelector="spec.nodeName="
    ) as events:
        received = [event_summary(await anext(events)) for _ in range(2)]

    assert received == ["ADDED web", "DELETED web"]


async def test_a_watch_ends_after_its_timeout(api: ApiUnderTest) -> None:
    async with open_watch(api, timeoutSeconds="1") as events:
        assert [event async for event in events] == []


async def test_a_streamed_list_ends_with_a_marked_bookmark(api: ApiUnderTest) -> None:
    api.store.create("pods", a_pod("web"))
    async with open_watch(
        api,
        sendInitialEvents="true",
        resourceVersionMatch="NotOlderThan",
        allowWatchBookmarks="true",
    ) as events:
        first = await anext(events)
        end = await anext(events)

    assert event_summary(first) == "ADDED web"
    assert end["type"] == "BOOKMARK"
    assert end["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


async def test_watches_support_tables(api: ApiUnderTest) -> None:
    api.store.create("pods", a_pod("web"))
    async with open_watch(api, accept=TABLE) as events:
        event = await anext(events)

    assert event["object"]["kind"] == "Table"
    assert event["object"]["rows"][0]["cells"][0] == "web"


async def test_one_object_is_watched_by_its_name(api: ApiUnderTest) -> None:
    api.store.create("pods", a_pod("web"))
    api.store.create("pods", a_pod("other"))

    async with open_watch(api, f"{PODS}/other") as events:
        assert event_summary(await anext(events)) == "ADDED other"


async def test_many_watches_all_get_every_change(api: ApiUnderTest) -> None:
    version = str(api.store.version)

    async def follow() -> list[str]:
        async with open_watch(api, resourceVersion=version) as events:
            return [event_summary(await anext(events)) for _ in range(30)]

    async with asyncio.TaskGroup() as tasks:
        followers = [tasks.create_task(follow()) for _ in range(10)]
        for number in range(30):
            api.store.create("pods", a_pod(f"web-{number}"))
            await asyncio.sleep(0)

    expected = [f"ADDED web-{number}" for number in range(30)]
    assert all(follower.result() == expected for follower in followers)


async def test_contradictory_queries_are_refused(api: ApiUnderTest) -> None:
    async with api.client() as session:
        for query in (
            {"watch": "1", "resourceVersion": "abc"},
            {"watch": "1", "sendInitialEvents": "true"},
            {"resourceVersionMatch": "Exact"},
        ):
            answer: aiohttp.ClientResponse = await session.get(PODS, params=query)
            assert answer.status == 400
