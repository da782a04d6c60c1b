"""A watch: its lines, its pauses, and the objects that its events add up to."""

import sys
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kubernetes.known_objects import Change, KnownObjects, newer
from shared.kubernetes.reflector import pause_s
from shared.kubernetes.types import ApiNode, ApiPod, ObjectMeta
from shared.kubernetes.watch_events import (
    EventReader,
    LineSplitter,
    ObjectIdentity,
    UndecodableObject,
    UnreadableLineError,
)


@given(st.lists(st.binary(min_size=1).filter(lambda line: b"\n" not in line)), st.data())
def test_lines_do_not_depend_on_where_the_stream_is_split(
    wanted: list[bytes], data: st.DataObject
) -> None:
    body = b"".join(line + b"\n" for line in wanted)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)))))
    lines = LineSplitter()

    found = [
        line
        for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)
        for line in lines.feed(body[start:end])
    ]

    assert found == wanted


def test_a_line_longer_than_the_limit_is_an_error() -> None:
    lines = LineSplitter(limit_bytes=10)
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

    assert isinstance(reader.read_item(msgspec.Raw(DEEP)), UndecodableObject)
    with pytest.raises(UnreadableLineError):
        reader.read_event(DEEP)


@pytest.mark.parametrize("kind", [ApiPod, ApiNode])
def test_every_field_may_be_missing(kind: type[ApiPod | ApiNode]) -> None:
    assert msgspec.json.decode(b"{}", type=kind) == kind()
    assert msgspec.json.decode(b'{"metadata":{},"spec":{},"status":{}}', type=kind) == kind()


LAST = 30


def pod(name: str, uid: str, version: int) -> ApiPod:
    return ApiPod(metadata=ObjectMeta(name=name, uid=uid, resource_version=str(version)))


class RecordedChanges:
    """A reader of changes that minds their order."""

    def __init__(self) -> None:
        self.pods: dict[str, ApiPod] = {}

    def take(self, changes: Iterable[Change[ApiPod]]) -> None:
        for named, item in changes:
            if item is None:
                assert self.pods.pop(named.name).metadata.uid == named.uid
            else:
                assert self.pods.get(named.name) != item
                self.pods[named.name] = item


History = list[tuple[str, ApiPod]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """What happened in a cluster: an event per version, from 1 on."""
    alive: dict[str, str] = {}
    history: History = []
    for version in range(1, LAST + 1):
        name = draw(st.sampled_from("abc"))
        if name not in alive:
            alive[name] = f"{name}-{version}"
            history.append(("ADDED", pod(name, alive[name], version)))
        elif draw(st.booleans()):
            history.append(("MODIFIED", pod(name, alive[name], version)))
        else:
            history.append(("DELETED", pod(name, alive.pop(name), version)))
    return history


def existing(history: History, version: int) -> dict[str, ApiPod]:
    pods: dict[str, ApiPod] = {}
    for kind, item in history[:version]:
        if kind == "DELETED":
            del pods[item.metadata.name]
        else:
            pods[item.metadata.name] = item
    return pods


def list_at(known: KnownObjects[ApiPod], history: History, version: int) -> list[Change[ApiPod]]:
    known.begin_list()
    items = existing(history, version).values()
    changes = [change for item in items for change in known.list_item(item)]
    return [*changes, *known.end_list(str(version))]


@given(histories(), st.data())
def test_changes_add_up_to_the_objects_that_exist(history: History, data: st.DataObject) -> None:
    """Lists at any time; watches that replay some of what was seen already, then go on."""
    known: KnownObjects[ApiPod] = KnownObjects()
    recorded = RecordedChanges()
    seen = data.draw(st.integers(0, LAST))
    recorded.take(list_at(known, history, seen))
    for step in data.draw(st.lists(st.integers(0, 9), max_size=6)):
        before, seen = seen, min(LAST, seen + step)
        if data.draw(st.booleans()):
            recorded.take(list_at(known, history, seen))
        else:
            for kind, item in history[data.draw(st.integers(0, before)) : seen]:
                is_gone = kind == "DELETED"
                recorded.take(known.remove(item.metadata) if is_gone else known.upsert(item))
        assert recorded.pods == existing(history, seen)
        assert known.resource_version == str(seen)
        assert len(known) == len(recorded.pods)


def test_an_unreadable_replacement_removes_the_pod_that_had_its_name() -> None:
    known: KnownObjects[ApiPod] = KnownObjects()
    known.upsert(pod("a", "first", 1))

    recorded = known.skip(ObjectIdentity(name="a", uid="second", resource_version="5"))

    assert recorded == ((ObjectIdentity(name="a", uid="first", resource_version="5"), None),)


def test_the_objects_themselves_are_not_kept() -> None:
    known: KnownObjects[ApiPod] = KnownObjects()
    item = pod("a", "a", 1)
    before = sys.getrefcount(item)

    assert known.upsert(item) == ((item.metadata, item),)

    assert sys.getrefcount(item) == before


def test_numeric_resource_versions_compare_as_integers() -> None:
    assert newer("10", "9")
    assert not newer("9", "10")
    assert not newer("9", "9")
    assert newer("9", "")


def test_other_resource_versions_compare_for_equality_only() -> None:
    assert newer("a1", "b2")
    assert newer("b2", "a1")
    assert not newer("a1", "a1")
