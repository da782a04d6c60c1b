"""The reflector against a scripted API server: lists, watches, bookmarks, 410 and reconnects."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from shared.kubernetes import reflector
from shared.kubernetes.errors import ForbiddenError
from shared.kubernetes.reflector import BATCH
from tests.support.kubernetes.followed import PODS, following, has
from tests.support.kubernetes.scripted_apiserver import (
    Object,
    Step,
    added,
    answers,
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
from tests.support.waiting import until


@dataclass(frozen=True)
class Case:
    """What the server answers, and what the reflector yields and does."""

    steps: Sequence[Step]
    changes: str
    watched: str = ""
    """The versions that watches start from."""
    continued: str = ""
    """The pages that lists request."""
    pauses: Sequence[float] | None = None
    checks: Sequence[Step] = ()
    requests: int = 0
    """How many to wait for; 0: until the last change."""
    silence_s: float = 30.0


def watch(*chunks: bytes | Object) -> Step:
    """A watch that stays open."""
    return streams(*chunks, then="silence")


EMPTY = lists(version=7)
EXPIRED = refuses(410, "Expired")
ERROR = refuses(500, "InternalError")
A8 = added(pod("a", 8))
B9 = added(pod("b", 9))
GAP = lists(pod("kept", 1), pod("moved", 12), pod("new", 11), version=20)
BEFORE_GAP = lists(pod("kept", 1), pod("moved", 2), pod("ended", 3), version=7)
BEFORE, AFTER = "+kept@1 +moved@2 +ended@3 =7", "~moved@12 +new@11 -ended@20 =20"
RESTORED = lists(pod("a", 3), version=40)
"""The list of an API server whose etcd was restored to a state before pod b."""
B80 = lists(pod("b", 80), version=90)
FROM_B80 = "+b@80 =90 +a@3"
HALF = b'{"type":"ADDED","object":{"metadata":{"name":"b","resourceV'
LINE = b'{"type":"ADDED","object":{"metadata":{"name":"a","resourceVersion":"8"}}}\n'


def opaque(version: str) -> Object:
    return {"metadata": {"name": "a", "uid": "u", "resourceVersion": version}}


CASES = {
    "all pages of a list are read": Case(
        (lists(pod("a", 1), version=7, next_page="p2"), lists(pod("b", 2), version=7)),
        "+a@1 +b@2 =7",
        continued="- p2",
    ),
    "an expired continue token starts the list again": Case(
        (
            lists(pod("a", 1), version=7, next_page="old"),
            EXPIRED,
            lists(pod("a", 1), pod("b", 2), version=9),
        ),
        "+a@1 +b@2 =9",
        continued="- old -",
    ),
    "an interrupted list is started again and repeats no change": Case(
        (
            lists(pod("a", 1), pod("b", 2), version=7, next_page="p2"),
            ERROR,
            lists(pod("a", 1), version=9, next_page="p2"),
            lists(pod("c", 8), version=9),
        ),
        "+a@1 +b@2 +c@8 -b@9 =9",
        continued="- p2 - p2",
    ),
    "events become changes": Case(
        (lists(pod("a", 1), version=7), watch(modified(pod("a", 8)), deleted(pod("a", 9)))),
        "+a@1 =7 ~a@8 -a@9",
    ),
    "repeated events are ignored": Case(
        (
            lists(pod("a", 1), pod("b", 2), version=7),
            watch(*[modified(pod("a", 12))] * 2, *[deleted(pod("b", 13))] * 2, added(pod("c", 14))),
        ),
        "+a@1 +b@2 =7 ~a@12 -b@13 +c@14",
    ),
    "a watch that ends regularly is resumed without a pause": Case(
        (EMPTY, streams(A8), streams(B9, then="")), "=7 +a@8 +b@9", watched="7 8", pauses=()
    ),
    "a watch that ends at once is resumed after a pause": Case(
        (EMPTY, *[streams()] * 4), "=7", requests=6, pauses=(0.2, 0.4, 0.8, 1.6)
    ),
    "a bookmark advances the version": Case(
        (EMPTY, streams(bookmark(42)), watch(added(pod("a", 43)))), "=7 +a@43", watched="7 42"
    ),
    "an hour of bookmarks yields no change and advances the version": Case(
        (EMPTY, watch(*(bookmark(100 + minute) for minute in range(60))), hang),
        "=7",
        requests=3,
        watched="7 159",
        silence_s=0.2,
    ),
    "410 at connect lists again": Case((BEFORE_GAP, EXPIRED, GAP), f"{BEFORE} {AFTER}", pauses=()),
    "410 mid stream lists again": Case(
        (BEFORE_GAP, streams(modified(pod("ended", 9)), failed(410, "Expired")), GAP),
        f"{BEFORE} ~ended@9 {AFTER}",
    ),
    "repeated 410 responses pause between lists": Case(
        (EMPTY, *(EXPIRED, EMPTY) * 3), "=7 =7 =7 =7", pauses=(0.4, 0.8)
    ),
    "a server whose store was emptied is listed again": Case(
        (
            lists(pod("a", 90), version=90),
            refuses(504, "Timeout", causes=["ResourceVersionTooLarge"]),
            lists(pod("a", 2, uid="other"), version=3),
            streams(modified(pod("a", 4, uid="other")), then=""),
        ),
        "+a@90 =90 -a@2 +a@2 =3 restored ~a@4",
    ),
    "a pod replaced during a gap is removed before it is added": Case(
        (
            lists(pod("a", 1, uid="first"), version=7),
            EXPIRED,
            lists(pod("a", 15, uid="second"), version=20),
        ),
        "+a@1 =7 -a@15 +a@15 =20",
    ),
    **{
        f"a lower version in a watch lists anew at once: {name}": Case(
            (lists(pod("a", 5), pod("b", 80), version=90), streams(event, then=""), RESTORED),
            "+a@5 +b@80 =90 ~a@3 -b@40 =40 restored",
            pauses=(),
        )
        for name, event in {
            "bookmark": bookmark(41),
            "new": added(pod("c", 41)),
            "changed": modified(pod("a", 41)),
            "gone": deleted(pod("b", 41)),
            "unreadable": added({**pod("bad", 41), "spec": []}),
        }.items()
    },
    **{
        f"a store at a lower version than the watch is listed anew: {then}": Case(
            (B80, streams(bookmark(95), then=then), RESTORED),
            f"{FROM_B80} -b@40 =40 restored",
            checks=(lists(version=40),),
        )
        for then in ("end", "reset")
    },
    **{
        f"an api server that was away is listed anew whatever its version: {name}": Case(
            (B80, streams(then="reset"), lists(pod("a", 3), version=200)),
            f"{FROM_B80} -b@200 =200 restored",
            checks=(away, away),  # a request on a closed connection is sent once more
        )
        for name, away in {"reset": resets, "503": refuses(503, "ServiceUnavailable")}.items()
    },
    "an api server that throttles is not listed anew": Case(
        (EMPTY, streams(then="reset"), watch(A8)),
        "=7 +a@8",
        checks=(refuses(429, "TooManyRequests", Retry_After="3"),),
        pauses=(0.2, 3.0),
    ),
    "versions that are not numbers pass through": Case(
        (EMPTY, watch(added(opaque("x1")), added(opaque("x1")), modified(opaque("w9")))),
        "=7 +a@x1 ~a@w9",
    ),
    "retry-after is honoured for a list and for a watch": Case(
        (
            refuses(429, "TooManyRequests", Retry_After="3"),
            EMPTY,
            refuses(429, "TooManyRequests", Retry_After="12"),
            hang,
        ),
        "=7",
        requests=4,
        pauses=(3.0, 12.0),
    ),
    "500 is retried with growing pauses from the last version": Case(
        (EMPTY, *[ERROR] * 8, watch(A8)),
        "=7 +a@8",
        watched=" ".join("7" * 9),
        pauses=(0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0),
    ),
    "an error event of 500 is retried from the last version": Case(
        (EMPTY, streams(A8, failed(500, "InternalError")), watch(B9)),
        "=7 +a@8 +b@9",
        watched="7 8",
    ),
    "pauses start small again after success": Case(
        (EMPTY, ERROR, ERROR, streams(A8, then="reset"), hang),
        "=7 +a@8",
        requests=5,
        pauses=(0.2, 0.4, 0.2),
    ),
    "a reset at connect and mid stream is resumed": Case(
        (EMPTY, resets, resets, streams(A8, then="reset"), watch(B9)),
        "=7 +a@8 +b@9",
        watched="7 7 7 8",
    ),
    **{
        f"an incomplete line is dropped and the event is received again: {then}": Case(
            (EMPTY, streams(A8, HALF, then=then), watch(B9)), "=7 +a@8 +b@9", watched="7 8"
        )
        for then in ("end", "reset")
    },
    "a line that arrives in pieces is put together": Case(
        (EMPTY, watch(LINE[:9], LINE[9:40], LINE[40:])), "=7 +a@8"
    ),
    "a silent connection is closed and the watch resumed": Case(
        (EMPTY, watch(A8), watch(B9)), "=7 +a@8 +b@9", watched="7 8", silence_s=0.2
    ),
    "a known pod that is unreadable in a list is not removed": Case(
        (lists(pod("a", 1), version=7), EXPIRED, lists(pod("a", 8, spec=[]), version=9)),
        "+a@1 =7 =9",
    ),
    **{
        f"a line that cannot be read leads to a new list: {junk[:9]!r}": Case(
            (
                lists(pod("a", 1), version=7),
                watch(modified(pod("a", 8)), junk),
                lists(pod("a", 9), version=10),
            ),
            "+a@1 =7 ~a@8 ~a@9 =10",
            pauses=(0.2,),
        )
        for junk in (b"not json\n", b"x" * (9 << 20), b'{"type":"ADDED"}\n')
    },
    "a permission lost later leads to a new list after a pause": Case(
        (EMPTY, refuses(403, "Forbidden"), lists(pod("a", 8), version=9)),
        "=7 +a@8 =9",
        pauses=(0.2,),
    ),
    "a truncated response is requested again": Case(
        (answers(200, b'{"items":[{"metadata"'), lists(pod("a", 1), version=7)), "+a@1 =7"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_changes_follow_what_the_server_answers(case: Case) -> None:
    async with following(*case.steps, silence_s=case.silence_s) as followed:
        followed.server.checks = list(case.checks)
        if case.requests:
            changes = await followed.changes_by_request(case.requests)
        else:
            count = len(case.changes)
            changes = await followed.changes_until(lambda so_far: len(" ".join(so_far)) >= count)

    assert " ".join(changes) == case.changes
    if case.watched:
        assert " ".join(followed.watched_from()) == case.watched
    if case.continued:
        queries = [request.query for request in followed.server.requests]
        assert " ".join(query.get("continue", "-") for query in queries) == case.continued
    if case.pauses is not None:
        assert followed.pauses == list(case.pauses)


async def test_pauses_grow_while_an_api_server_throttles_after_a_long_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reflector, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(reflector, "LONGEST_PAUSE_S", 0.05)
    throttles = refuses(429, "TooManyRequests")
    async with following(EMPTY, watch(A8), watch(B9), silence_s=0.1) as followed:
        followed.server.checks = [throttles] * 3
        await followed.changes_until(has("+b@9"))

    assert followed.pauses == [0.001, 0.002, 0.004, 0.008]


async def test_a_list_is_yielded_and_the_watch_starts_from_its_version() -> None:
    async with following(lists(pod("a", 1), version=7), watch(added(pod("b", 8)))) as followed:
        changes = await followed.changes_until(has("+b@8"))

    listed, watched = followed.server.requests
    assert changes == ["+a@1", "=7", "+b@8"]
    assert (listed.path, listed.query) == (PODS, {"fieldSelector": "a=x", "limit": "500"})
    assert watched.query == {
        "fieldSelector": "a=x",
        "watch": "true",
        "resourceVersion": "7",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "600",
    }


BURST = b"".join(
    b'{"type":"ADDED","object":{"metadata":{"name":"p%d","resourceVersion":"%d"}}}\n' % (n, n + 8)
    for n in range(1000)
)


async def test_a_consumer_that_stops_and_resumes_misses_no_change_of_many_in_batches() -> None:
    items = [pod(f"old{n}", 1) for n in range(300)]
    async with following(lists(*items, version=7), watch(BURST), hang) as followed:
        await followed.changes_until(lambda _: True)
        assert len(followed.batches) == 1
        await followed.changes_until(has("+p0@8"))
        changes = await followed.changes_until(has("+p999@1007"))

    assert sorted(changes) == sorted(set(changes))
    assert len(changes) == 1301
    assert max(len(batch.changed) for batch in followed.batches) == BATCH
    assert len(followed.batches) < 30


async def test_one_unreadable_pod_is_reported_and_the_stream_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    bad_listed = pod("bad", 5, spec={"priority": "high"})
    bad = pod("a", 8, spec=[])
    events = watch(modified(bad), deleted(pod("a", 9, spec=[])))
    async with following(lists(bad_listed, pod("a", 1), version=7), events) as followed:
        changes = await followed.changes_until(has("-a@9"))

    assert changes == ["+a@1", "=7", "-a@9"]
    assert len(caplog.records) == 3
    assert "default/bad at version 5" in caplog.text


async def test_a_missing_permission_is_raised_before_the_first_list() -> None:
    async with following(refuses(403, "Forbidden", "cannot list pods")) as followed:
        with pytest.raises(ForbiddenError, match="cannot list pods"):
            await followed.changes_until(has("never"))


async def test_a_connection_is_closed_as_soon_as_its_consumer_stops() -> None:
    async with following(EMPTY, watch(A8)) as followed:
        await followed.changes_until(has("+a@8"))
        await until(lambda: not followed.server.open_connections, limit_s=30)
