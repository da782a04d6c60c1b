"""Cutting a stream into lines, and how long to wait when it breaks."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kubernetes.reflector import pause_s
from shared.kubernetes.types import ApiNode, ApiPod
from shared.kubernetes.watch_events import EventReader, Lines, Undecodable, UnreadableLineError


@given(st.lists(st.binary(min_size=1).filter(lambda line: b"\n" not in line)), st.data())
def test_lines_do_not_depend_on_where_the_stream_is_split(
    wanted: list[bytes], data: st.DataObject
) -> None:
    body = b"".join(line + b"\n" for line in wanted)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)))))
    lines = Lines()

    found = [
        line
        for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)
        for line in lines.feed(body[start:end])
    ]

    assert found == wanted


def test_a_line_longer_than_the_limit_is_an_error() -> None:
    lines = Lines(limit_bytes=10)
    lines.feed(b"12345678")

    with pytest.raises(UnreadableLineError, match="longer than 10 bytes"):
        lines.feed(b"9abc")


@given(st.integers(1, 10_000), st.floats(0.5, 1.0))
def test_a_pause_is_between_a_tenth_of_a_second_and_ten(failures: int, jitter: float) -> None:
    assert 0.1 <= pause_s(failures, jitter=jitter) <= 10


def test_retry_after_lengthens_the_pause() -> None:
    assert pause_s(1, jitter=1, retry_after_s=30) == 30
    assert pause_s(9, jitter=1, retry_after_s=1) == 10
    assert pause_s(1, jitter=1, retry_after_s=86_400) == 60


DEEP = b'{"type": "ADDED", "object": {"spec": {"other": ' + b"[" * 20_000 + b"]" * 20_000 + b"}}}"


def test_an_object_that_is_too_deep_is_one_that_cannot_be_read() -> None:
    reader = EventReader(ApiPod)

    assert isinstance(reader.read_item(msgspec.Raw(DEEP)), Undecodable)
    with pytest.raises(UnreadableLineError):
        reader.read_event(DEEP)


@pytest.mark.parametrize("kind", [ApiPod, ApiNode])
def test_every_field_may_be_missing(kind: type[ApiPod | ApiNode]) -> None:
    assert msgspec.json.decode(b"{}", type=kind) == kind()
    assert msgspec.json.decode(b'{"metadata":{},"spec":{},"status":{}}', type=kind) == kind()
