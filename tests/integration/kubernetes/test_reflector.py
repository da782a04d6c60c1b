"""The reflector against a scripted API server: lists, watches, bookmarks, 410 and reconnects."""

import pytest

from shared.kubernetes.reflector import BATCH
from tests.support.kubernetes.followed import PODS, following, has
from tests.support.kubernetes.scripted_apiserver import (
    Object,
    Step,
    added,
    bookmark,
    deleted,
    failed,
    hang,
    lists,
    modified,
    pod,
    refuses,
    resets,
    streams,
)


async def test_a_list_is_yielded_and_the_watch_starts_from_its_version() -> None:
    steps = (lists(pod("a", 1), version=7), streams(added(pod("b", 8)), then="silence"))
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("+b@8"))

    listed, watched = followed.server.requests
    assert changes == ["+a@1", "=7", "+b@8"]
    assert (listed.path, listed.query) == (PODS, {"labelSelector": "app=x", "limit": "500"})
    assert watched.query == {
        "labelSelector": "app=x",
        "watch": "true",
        "resourceVersion": "7",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "600",
    }


async def test_all_pages_of_a_list_are_read() -> None:
    pages = (lists(pod("a", 1), version=7, next_page="p2"), lists(pod("b", 2), version=7))
    async with following(*pages) as followed:
        changes = await followed.changes_until(has("=7"))

    assert changes == ["+a@1", "+b@2", "=7"]
    assert followed.server.requests[1].query["continue"] == "p2"


async def test_an_expired_continue_token_starts_the_list_again() -> None:
    steps = (
        lists(pod("a", 1), version=7, next_page="old"),
        refuses(410, "Expired"),
        lists(pod("a", 1), pod("b", 2), version=9),
    )
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("=9"))

    assert changes == ["+a@1", "+b@2", "=9"]
    assert "continue" not in followed.server.requests[2].query


async def test_an_interrupted_list_is_started_again_and_repeats_no_change() -> None:
    steps = (
        lists(pod("a", 1), pod("b", 2), version=7, next_page="p2"),
        refuses(500, "InternalError"),
        lists(pod("a", 1), version=9, next_page="p2"),
        lists(pod("c", 8), version=9),
    )
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("=9"))

    assert changes == ["+a@1", "+b@2", "+c@8", "-b@9", "=9"]
    assert "continue" not in followed.server.requests[2].query


async def test_watch_events_become_changes_with_the_previous_object() -> None:
    events = streams(modified(pod("a", 8)), deleted(pod("a", 9)), then="silence")
    async with following(lists(pod("a", 1), version=7), events) as followed:
        changes = await followed.changes_until(has("-a@9"))

    assert changes == ["+a@1", "=7", "~a@8", "-a@9"]


async def test_a_watch_that_ends_regularly_is_resumed_without_a_pause() -> None:
    steps = (lists(version=7), streams(added(pod("a", 8))), streams(added(pod("b", 9)), then=""))
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("+b@9"))

    assert changes == ["=7", "+a@8", "+b@9"]
    assert followed.watched_from() == ["7", "8"]
    assert followed.pauses == []


async def test_a_watch_that_ends_at_once_is_resumed_after_a_pause() -> None:
    async with following(lists(version=7), *[streams()] * 4) as followed:
        await followed.changes_by_request(6)

    assert followed.pauses == [0.2, 0.4, 0.8, 1.6]


async def test_a_bookmark_advances_the_version() -> None:
    steps = (lists(version=7), streams(bookmark(42)), streams(added(pod("a", 43)), then="silence"))
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("+a@43"))

    assert changes == ["=7", "+a@43"]
    assert followed.watched_from() == ["7", "42"]


async def test_an_hour_of_bookmarks_yields_no_change_and_advances_the_version() -> None:
    hour = [bookmark(100 + minute) for minute in range(60)]
    steps = (lists(version=7), streams(*hour), hang)
    async with following(*steps) as followed:
        changes = await followed.changes_by_request(3)

    assert changes == ["=7"]
    assert followed.watched_from() == ["7", "159"]
    assert followed.reflector.resource_version == "159"
    assert followed.reflector.counts.undecodable == 0


GAP = lists(pod("kept", 1), pod("moved", 12), pod("new", 11), version=20)


BEFORE_GAP = lists(pod("kept", 1), pod("moved", 2), pod("ended", 3), version=7)


AFTER_GAP = ["~moved@12", "+new@11", "-ended@20", "=20"]


async def test_410_at_connect_lists_again_and_yields_only_the_difference() -> None:
    async with following(BEFORE_GAP, refuses(410, "Expired"), GAP) as followed:
        changes = await followed.changes_until(has("=20"))

    assert changes[4:] == AFTER_GAP
    assert followed.pauses == []


async def test_410_mid_stream_lists_again_and_yields_only_the_difference() -> None:
    broken = streams(modified(pod("ended", 9)), failed(410, "Expired"))
    async with following(BEFORE_GAP, broken, GAP) as followed:
        changes = await followed.changes_until(has("=20"))

    assert changes[4:] == ["~ended@9", *AFTER_GAP]


async def test_repeated_410_responses_pause_between_lists() -> None:
    expired = (refuses(410, "Expired"), lists(version=7))
    async with following(lists(version=7), *expired, *expired, *expired) as followed:
        await followed.changes_by_request(7)

    assert followed.pauses[:2] == [0.4, 0.8]


async def test_a_server_whose_store_was_emptied_is_listed_again() -> None:
    future = refuses(504, "Timeout", causes=["ResourceVersionTooLarge"])
    steps = (lists(pod("a", 90), version=90), future, lists(pod("a", 2, uid="other"), version=3))
    async with following(*steps, streams(modified(pod("a", 4, uid="other")), then="")) as followed:
        changes = await followed.changes_until(has("~a@4"))

    assert changes == ["+a@90", "=90", "-a@2", "+a@2", "=3 restored", "~a@4"]


async def test_a_pod_replaced_under_its_name_during_a_gap_is_removed_before_it_is_added() -> None:
    steps = (
        lists(pod("a", 1, uid="first"), version=7),
        refuses(410, "Expired"),
        lists(pod("a", 15, uid="second"), version=20),
    )
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("=20"))

    assert changes == ["+a@1", "=7", "-a@15", "+a@15", "=20"]


async def test_repeated_events_are_ignored() -> None:
    a, gone = modified(pod("a", 12)), deleted(pod("b", 13))
    events = streams(a, a, gone, gone, added(pod("c", 14)), then="silence")
    async with following(lists(pod("a", 1), pod("b", 2), version=7), events) as followed:
        changes = await followed.changes_until(has("+c@14"))

    assert changes == ["+a@1", "+b@2", "=7", "~a@12", "-b@13", "+c@14"]
    assert followed.reflector.ignored == 2


RESTORED = lists(pod("a", 3), version=40)
"""The list of an API server whose etcd was restored to a state before pod b."""


@pytest.mark.parametrize(
    "event",
    [
        bookmark(41),
        added(pod("c", 41)),
        modified(pod("a", 41)),
        deleted(pod("b", 41)),
        added({**pod("bad", 41), "spec": []}),
    ],
)
async def test_a_lower_version_in_a_watch_lists_anew_at_once(event: Object) -> None:
    steps = (lists(pod("a", 5), pod("b", 80), version=90), streams(event, then=""), RESTORED)
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("=40 restored"))

    assert changes == ["+a@5", "+b@80", "=90", "~a@3", "-b@40", "=40 restored"]
    assert followed.pauses == []


@pytest.mark.parametrize("then", ["end", "reset"])
async def test_a_store_at_a_lower_version_than_the_watch_is_listed_anew(then: str) -> None:
    watch = streams(bookmark(95), then=then)
    async with following(lists(pod("b", 80), version=90), watch, RESTORED) as followed:
        followed.server.checks = [lists(version=40)]
        changes = await followed.changes_until(has("=40 restored"))

    assert changes == ["+b@80", "=90", "+a@3", "-b@40", "=40 restored"]


@pytest.mark.parametrize("away", [resets, refuses(503, "ServiceUnavailable")])
async def test_an_api_server_that_was_away_is_listed_anew_whatever_its_version(away: Step) -> None:
    caught_up = lists(pod("a", 3), version=200)
    async with following(lists(pod("b", 80), version=90), streams(then="reset"), caught_up) as at:
        at.server.checks = [away, away]  # a request on a closed connection is sent once more
        changes = await at.changes_until(has("=200 restored"))

    assert changes == ["+b@80", "=90", "+a@3", "-b@200", "=200 restored"]


async def test_an_api_server_that_throttles_is_not_listed_anew() -> None:
    steps = (lists(version=7), streams(then="reset"), streams(added(pod("a", 8)), then="silence"))
    async with following(*steps) as followed:
        followed.server.checks = [refuses(429, "TooManyRequests", Retry_After="3")]
        changes = await followed.changes_until(has("+a@8"))

    assert changes == ["=7", "+a@8"]
    assert 3.0 in followed.pauses


async def test_versions_that_are_not_numbers_pass_through() -> None:
    opaque = pod("a", 1)
    opaque["metadata"] = {"name": "a", "uid": "u", "resourceVersion": "x1"}
    later = {**opaque, "metadata": {"name": "a", "uid": "u", "resourceVersion": "w9"}}
    events = streams(added(opaque), added(opaque), modified(later), then="silence")
    async with following(lists(version=7), events) as followed:
        changes = await followed.changes_until(has("~a@w9"))

    assert changes == ["=7", "+a@x1", "~a@w9"]


BURST = b"".join(
    b'{"type":"ADDED","object":{"metadata":{"name":"p%d","resourceVersion":"%d"}}}\n' % (n, n + 8)
    for n in range(1000)
)


async def test_many_events_at_once_come_in_batches_of_at_most_256() -> None:
    async with following(lists(version=7), streams(BURST, then="silence")) as followed:
        changes = await followed.changes_until(has("+p999@1007"))

    assert len(changes) == 1001
    assert max(map(len, followed.batches)) == BATCH
    assert len(followed.batches) < 30


async def test_a_consumer_that_stops_and_resumes_misses_no_change() -> None:
    items = [pod(f"old{n}", 1) for n in range(300)]
    steps = (lists(*items, version=7), streams(BURST, then="silence"), hang)
    async with following(*steps) as followed:
        await followed.changes_until(lambda _: True)
        assert len(followed.batches) == 1
        await followed.changes_until(has("+p0@8"))
        await followed.changes_until(has("+p999@1007"))

    assert sorted(followed.changes()) == sorted(set(followed.changes()))
    assert len(followed.changes()) == 1301
