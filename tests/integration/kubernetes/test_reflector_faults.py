"""A reflector whose API server fails, stops sending, or sends unreadable data."""

import logging

import pytest

from shared.kubernetes.errors import ForbiddenError
from tests.support.kubernetes.followed import following, has
from tests.support.kubernetes.scripted_apiserver import (
    added,
    answers,
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
from tests.support.waiting import until


async def test_retry_after_is_honoured_for_a_list_and_for_a_watch() -> None:
    steps = (
        refuses(429, "TooManyRequests", Retry_After="3"),
        lists(version=7),
        refuses(429, "TooManyRequests", Retry_After="12"),
        hang,
    )
    async with following(*steps) as followed:
        await followed.changes_by_request(4)

    assert followed.pauses == [3.0, 12.0]


async def test_500_is_retried_with_growing_pauses_from_the_last_version() -> None:
    failing = [refuses(500, "InternalError")] * 8
    steps = (lists(version=7), *failing, streams(added(pod("a", 8)), then="silence"))
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("+a@8"))

    assert changes == ["=7", "+a@8"]
    assert followed.pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert set(followed.watched_from()) == {"7"}


async def test_an_error_event_of_500_is_retried_from_the_last_version() -> None:
    steps = (
        lists(version=7),
        streams(added(pod("a", 8)), failed(500, "InternalError")),
        streams(added(pod("b", 9)), then="silence"),
    )
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("+b@9"))

    assert changes == ["=7", "+a@8", "+b@9"]
    assert followed.watched_from() == ["7", "8"]


async def test_pauses_start_small_again_after_success() -> None:
    steps = (
        lists(version=7),
        refuses(500, "InternalError"),
        refuses(500, "InternalError"),
        streams(added(pod("a", 8)), then="reset"),
        hang,
    )
    async with following(*steps) as followed:
        await followed.changes_by_request(5)

    assert followed.pauses == [0.2, 0.4, 0.2]


async def test_a_reset_at_connect_and_mid_stream_is_resumed() -> None:
    steps = (
        lists(version=7),
        resets,
        resets,
        streams(added(pod("a", 8)), then="reset"),
        streams(added(pod("b", 9)), then="silence"),
    )
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("+b@9"))

    assert changes == ["=7", "+a@8", "+b@9"]
    assert followed.watched_from()[-1] == "8"


@pytest.mark.parametrize("then", ["end", "reset"])
async def test_an_incomplete_line_is_dropped_and_the_event_is_received_again(then: str) -> None:
    half = b'{"type":"ADDED","object":{"metadata":{"name":"b","resourceV'
    steps = (
        lists(version=7),
        streams(added(pod("a", 8)), half, then=then),
        streams(added(pod("b", 9)), then="silence"),
    )
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("+b@9"))

    assert changes == ["=7", "+a@8", "+b@9"]
    assert followed.watched_from() == ["7", "8"]


async def test_a_line_that_arrives_in_pieces_is_put_together() -> None:
    line = b'{"type":"ADDED","object":{"metadata":{"name":"a","resourceVersion":"8"}}}\n'
    steps = (lists(version=7), streams(line[:9], line[9:40], line[40:], then="silence"))
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("+a@8"))

    assert changes == ["=7", "+a@8"]


async def test_a_silent_connection_is_closed_and_the_watch_resumed() -> None:
    steps = (
        lists(version=7),
        streams(added(pod("a", 8)), then="silence"),
        streams(added(pod("b", 9)), then="silence"),
    )
    async with following(*steps, silence_s=0.2) as followed:
        changes = await followed.changes_until(has("+b@9"))

    assert changes == ["=7", "+a@8", "+b@9"]
    assert followed.watched_from() == ["7", "8"]


async def test_one_unreadable_pod_is_reported_and_the_stream_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    bad_listed, bad = pod("bad", 5, spec={"priority": "high"}), pod("a", 8, spec=[])
    events = streams(modified(bad), deleted(pod("a", 9, spec=[])), then="silence")
    async with following(lists(bad_listed, pod("a", 1), version=7), events) as followed:
        changes = await followed.changes_until(has("-a@9"))

    assert changes == ["+a@1", "=7", "-a@9"]
    assert followed.reflector.counts.undecodable == 3
    assert "default/bad at version 5" in caplog.text


async def test_a_known_pod_that_is_unreadable_in_a_list_is_not_removed() -> None:
    steps = (
        lists(pod("a", 1), version=7),
        refuses(410, "Expired"),
        lists(pod("a", 8, spec=[]), version=9),
    )
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("=9"))

    assert changes == ["+a@1", "=7", "=9"]


@pytest.mark.parametrize("junk", [b"not json\n", b"x" * (9 << 20), b'{"type":"ADDED"}\n'])
async def test_a_line_that_cannot_be_read_leads_to_a_new_list(junk: bytes) -> None:
    steps = (
        lists(pod("a", 1), version=7),
        streams(modified(pod("a", 8)), junk, then="silence"),
        lists(pod("a", 9), version=10),
    )
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("=10"))

    assert changes == ["+a@1", "=7", "~a@8", "~a@9", "=10"]
    assert followed.pauses == [0.2]


async def test_a_missing_permission_is_raised_before_the_first_list() -> None:
    async with following(refuses(403, "Forbidden", "cannot list pods")) as followed:
        with pytest.raises(ForbiddenError, match="cannot list pods"):
            await followed.changes_until(has("never"))


async def test_a_permission_lost_later_leads_to_a_new_list_after_a_pause() -> None:
    steps = (lists(version=7), refuses(403, "Forbidden"), lists(pod("a", 8), version=9))
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("=9"))

    assert changes == ["=7", "+a@8", "=9"]
    assert followed.pauses == [0.2]


async def test_a_connection_is_closed_as_soon_as_its_consumer_stops() -> None:
    steps = (lists(version=7), streams(added(pod("a", 8)), then="silence"))
    async with following(*steps) as followed:
        await followed.changes_until(has("+a@8"))
        await until(lambda: not followed.server.open_connections, limit_s=30)


async def test_a_truncated_response_is_requested_again() -> None:
    steps = (answers(200, b'{"items":[{"metadata"'), lists(pod("a", 1), version=7))
    async with following(*steps) as followed:
        changes = await followed.changes_until(has("=7"))

    assert changes == ["+a@1", "=7"]
