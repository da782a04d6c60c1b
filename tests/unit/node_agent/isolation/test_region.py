"""Reading a region that its container may have filled with anything."""

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.node_agent.isolation.region import InvalidRegion, Region, decode, sums
from services.node_agent.isolation.region_layouts import (
    LAYOUTS,
    MAGIC,
    V1_1_BAD,
    V1_2,
    RegionLayout,
    layout_of,
)
from services.node_agent.isolation.region_reader import ROUNDS, read_region
from tests.support.effort import tries
from tests.support.node_agent.regions import SEED, at, fresh, process, write

GIB = 1 << 30


def read(tmp_path: Path, image: bytes | bytearray) -> Region | InvalidRegion | None:
    place = at(tmp_path)
    write(place, image)
    return read_region(place)


def region_of(image: bytes | bytearray) -> Region:
    return decode(V1_2, bytes(image))


def refused(found: Region | InvalidRegion | None) -> str:
    assert isinstance(found, InvalidRegion)
    return found.reason


# Files with holes


def test_slots_in_a_file_with_holes_are_read_as_soon_as_a_process_has_mapped_them(
    tmp_path: Path,
) -> None:
    place = at(tmp_path)
    empty = fresh()
    used = fresh()
    process(used, 700, 41, totals=(GIB,), counted=False)
    process(used, 0, 17, totals=(GIB,))
    with place.open("w+b") as file:
        file.truncate(len(empty))
        file.seek(V1_2.slot_count)
        file.write(empty[V1_2.slot_count :])
        file.seek(0)
        file.write(empty[:4096])
        file.flush()
        before = read_region(place)
        with mmap.mmap(file.fileno(), 0) as mapped:
            for index in (0, 700):
                start, end = V1_2.slot_at(index), V1_2.slot_at(index + 1)
                mapped[start:end] = bytes(used[start:end])
            mapped[V1_2.slot_count :] = bytes(used[V1_2.slot_count :])
            after = read_region(place)

    assert before == region_of(empty)
    assert after == region_of(used)
    assert isinstance(after, Region)
    assert [slot.pid for slot in (*after.slots, *after.orphans)] == [17, 41]


# What is no region


@pytest.mark.parametrize("size", [0, 1, 63, 804680, 1197896, 2008952, 2008954, 2008984, 5_000_000])
def test_hami_core_2_a_file_of_any_other_size_is_tampered(tmp_path: Path, size: int) -> None:
    place = at(tmp_path)
    write(place, fresh())
    os.truncate(place, size)

    assert f"it has {size} bytes" in refused(read_region(place))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_hami_core_2_another_magic_is_tampered(tmp_path: Path, layout: RegionLayout) -> None:
    assert "begins with 0" in refused(read(tmp_path, bytes(layout.file_size)))


@pytest.mark.parametrize(
    ("size", "version"),
    [(V1_2.file_size, (1, 3)), (V1_2.file_size, (2, 2)), (V1_1_BAD.file_size, (1, 2))],
)
def test_a_version_that_does_not_match_the_file_size_is_tampered(
    size: int, version: tuple[int, int]
) -> None:
    assert f"version {version[0]}.{version[1]}" in str(layout_of(size, MAGIC, version))


def _link(place: Path) -> None:
    place.symlink_to(other_region(place))


def _linked_directory(place: Path) -> None:
    place.parent.rmdir()
    place.parent.symlink_to(other_region(place).parent)


def _hard_link(place: Path) -> None:
    place.hardlink_to(other_region(place))


def _socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(os.path.relpath(place))


def other_region(place: Path) -> Path:
    other = at(place.parents[1] / "u2_main")
    write(other, fresh())
    return other


@pytest.mark.parametrize(
    ("create", "reason"),
    [
        (_link, "it is a symbolic link"),
        (_linked_directory, "it cannot be opened: Not a directory"),
        (_hard_link, "it has 2 hard links"),
        (os.mkfifo, "it is not a regular file"),
        (_socket, "it is not a regular file"),
        (Path.mkdir, "it is not a regular file"),
    ],
)
def test_hami_core_2_what_is_no_regular_file_of_its_own_is_not_opened(
    tmp_path: Path, create: Callable[[Path], None], reason: str
) -> None:
    place = at(tmp_path / "u1_main")
    create(place)
    began = time.monotonic()

    assert refused(read_region(place)) == reason
    assert time.monotonic() - began < 5, "a pipe without a writer would block for ever"


# Bytes that cannot be


@settings(
    max_examples=tries(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    layout=st.sampled_from(LAYOUTS),
    scribbles=st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=64)), max_size=40),
    count=st.integers(-(2**31), 2**31 - 1),
)
def test_any_bytes_after_the_magic_are_read_as_a_region(
    tmp_path: Path,
    layout: RegionLayout,
    scribbles: list[tuple[float, bytes]],
    count: int,
) -> None:
    image = bytearray(layout.file_size)
    for where, what in scribbles:
        start = int(where * (layout.file_size - len(what)))
        image[start : start + len(what)] = what
    struct.pack_into("<i", image, layout.slot_count, count)
    struct.pack_into("<iII", image, 0, MAGIC, *(layout.version or (0, 0)))

    region = read(tmp_path, image)

    assert isinstance(region, Region)
    assert len(region.slots) == min(max(count, 0), 1024)
    for position in range(16):
        added = sums(region, position)
        assert 0 <= added.total <= added.enforced < 1024 << 63
        assert 0 <= added.sm_percent <= 1024 * 100
    for uuid in region.uuids:
        assert uuid == "" or (uuid[:4] in {"GPU-", "MIG-"} and uuid.isascii() and len(uuid) < 96)


@given(st.binary(max_size=4096), st.sampled_from(LAYOUTS))
@settings(
    max_examples=tries(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_random_files_are_tampered(tmp_path: Path, noise: bytes, layout: RegionLayout) -> None:
    for image in (noise, noise.ljust(layout.file_size, b"\xff")[: layout.file_size]):
        assert isinstance(read(tmp_path, image), InvalidRegion)


def slowness() -> float:
    """How many times slower this machine is now than an idle one, by what both can count."""
    took = []
    for _ in range(5):
        began = time.thread_time()
        sum(range(100_000))
        took.append(time.thread_time() - began)
    return min(took) / 0.0017


def test_hami_core_4_impossible_counts_are_clamped_and_read_within_50_ms(tmp_path: Path) -> None:
    place = at(tmp_path)
    image = fresh()
    for index in range(1024):
        process(image, index, index + 1, totals=(1,) * 16)
    struct.pack_into("<i", image, V1_2.slot_count, 5000)
    write(place, image)

    took = []
    for _ in range(5):
        began = time.thread_time()
        region = read_region(place)
        took.append(time.thread_time() - began)

    assert isinstance(region, Region)
    assert len(region.slots) == 1024
    assert min(took) < 0.05 * max(1.0, slowness())
    struct.pack_into("<i", image, V1_2.slot_count, -1)
    assert region_of(image).slots == ()


@pytest.mark.parametrize("settles", [False, True])
def test_hami_core_5_a_slot_being_written_is_read_again_and_torn_after_pauses_of_at_most_20_ms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settles: bool
) -> None:
    place = at(tmp_path)
    image = fresh()
    pauses_s = list[float]()
    process(image, 0, 10, totals=(1,), seqlock=2)
    process(image, 1, 11, totals=(2,), seqlock=3)
    write(place, image)

    def sleep(pause_s: float) -> None:
        pauses_s.append(pause_s)
        if settles:
            process(image, 1, 11, totals=(7,), seqlock=4)
            with place.open("r+b") as file:
                file.write(image)

    # Only the reader sleeps so: threads of other tests may still sleep.
    reader_time = SimpleNamespace(sleep=sleep)
    monkeypatch.setattr("services.node_agent.isolation.region_reader.time", reader_time)
    region = read_region(place)

    assert isinstance(region, Region)
    assert [slot.torn for slot in region.slots] == [False, not settles]
    assert sums(region, 0).total == (8 if settles else 3), "the amounts of a torn slot still count"
    assert len(pauses_s) == (1 if settles else ROUNDS)
    assert sum(pauses_s) <= 0.02


def test_hami_core_6_negative_amounts_are_left_out_and_counted() -> None:
    image = fresh()
    process(image, 0, 10, totals=(2 * GIB,))
    process(image, 1, 11, totals=((1 << 64) - 5, 1))

    added = sums(region_of(image), 0)

    assert (added.total, added.enforced, added.wrapped) == (2 * GIB, 2 * GIB, 1)
    assert sums(region_of(image), 1).wrapped == 0


def test_hami_core_7_processes_beyond_the_slot_count_are_found_while_they_live() -> None:
    image = fresh()
    process(image, 0, 10, totals=(GIB,))
    process(image, 1, 11, totals=(3 * GIB,), counted=False)
    process(image, 2, 12, totals=(GIB,), counted=False)
    process(image, 900, 13, totals=(GIB,), counted=False, status=0)

    region = region_of(image)
    living = frozenset({10, 11, 13})

    assert [slot.pid for slot in region.lost(living)] == [11]
    assert [slot.pid for slot in region.processes(living)] == [10, 11]
    assert sums(region, 0, living).total == 4 * GIB
    assert sums(region, 0).total == GIB, "nothing is known of processes beyond the count"


@pytest.mark.parametrize(
    ("below", "above", "true_gib"), [(4, 8, 5), (4, 4, 5), (0, 0, 1), (8, 4, 1)]
)
def test_hami_core_7_of_two_records_of_a_process_the_one_that_was_written_last_is_true(
    below: int, above: int, true_gib: int
) -> None:
    image = fresh()
    process(image, 0, 10, totals=(GIB,))
    process(image, 1, 11, totals=(GIB,), seqlock=below)
    process(image, 2, 11, totals=(5 * GIB,), seqlock=above, counted=False)

    region = region_of(image)

    assert sums(region, 0, {10, 11}).total == (1 + true_gib) * GIB
    assert [slot.index for slot in region.lost({10, 11})] == ([2] if true_gib == 5 else [])
    assert sums(region, 0, {10, 11}).enforced == 2 * GIB
    assert not region.lost({10})


def test_hami_core_8_ended_and_killed_processes_count_only_in_the_enforced_usage() -> None:
    image = fresh()
    process(image, 0, 10, totals=(GIB,))
    process(image, 1, 11, totals=(2 * GIB,), status=0)
    process(image, 2, 0, totals=(4 * GIB,))
    process(image, 3, 12, totals=(8 * GIB,))

    added = sums(region_of(image), 0, {10, 11})

    assert (added.total, added.enforced) == (GIB, 15 * GIB)
    assert [slot.pid for slot in region_of(image).processes({10, 11})] == [10]
    assert region_of(image).holders() == {10, 12}


@pytest.mark.parametrize(
    ("text", "read_as"),
    [
        (b"GPU-12ab-cd", "GPU-12ab-cd"),
        (b"MIG-12ab-cd", "MIG-12ab-cd"),
        (b"GPU-12\xff", ""),
        (b'GPU-12"} 1\n', ""),
        (b"gpu-12", ""),
        (b"GPU-" + b"a" * 92, ""),
        (b"", ""),
    ],
)
def test_hami_core_9_only_a_valid_uuid_is_read(text: bytes, read_as: str) -> None:
    image = fresh()
    image[V1_2.uuids : V1_2.uuids + len(text)] = text

    assert region_of(image).uuids[0] == read_as


def test_hami_core_3_a_file_truncated_during_a_read_is_tampered(tmp_path: Path) -> None:
    place = at(tmp_path)
    image = fresh(SEED)
    write(place, image)
    done = threading.Event()

    def shrink() -> None:
        while not done.is_set():
            with place.open("r+b") as file:
                file.truncate(0)
                file.truncate(len(image))
                file.write(image[:2000])

    tenant = threading.Thread(target=shrink)
    tenant.start()
    try:
        kinds = {type(read_region(place)) for _ in range(2000)}
    finally:
        done.set()
        tenant.join()

    assert kinds <= {Region, InvalidRegion}
    assert InvalidRegion in kinds
