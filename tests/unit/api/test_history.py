"""The history: what is sampled, condensed, bounded and forgotten, and what survives a restart."""

import asyncio
import contextlib
import logging
import sqlite3
import threading
from functools import partial
from pathlib import Path

import pytest

from services.api import history_file
from services.api.history import (
    CLUSTER,
    DEVICE,
    NAMESPACE,
    NODE,
    POD,
    RANGES,
    WAITING,
    Recorded,
    Sample,
    Subject,
    history_columns,
    range_of,
    sample_of,
)
from services.api.history_file import DAY_S, HistoryFile
from services.api.lease_views import finished_pod
from shared.model.device import Hardware
from shared.model.errors import UnavailableError
from shared.model.names import DeviceUuid, NodeName
from tests.support import build
from tests.support.api.board import lease, node_totals, projected, usage

HOUR, DAY, WEEK = RANGES
GPU = Subject(kind=DEVICE, name="gpu")
BEGIN = 1_800_000_000.0
"""A multiple of an hour and of ten minutes."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite"


@pytest.fixture
def history(path: Path) -> HistoryFile:
    return HistoryFile(path)


def device_sample(memory: float, name: str = "gpu") -> Sample:
    return {DEVICE: {name: [memory, 20, 10, None, 0]}, CLUSTER: {"": [memory] * 5}}


async def filled(history: HistoryFile, *, for_s: int, every_s: int = 30) -> None:
    for after_s in range(0, for_s, every_s):
        await history.add(partial(device_sample, 1000 + after_s // 600), BEGIN + after_s)


async def memory_of(
    history: HistoryFile, now: float, within: str = "1h", kind: str = DEVICE, name: str = "gpu"
) -> list[float | None]:
    recorded = await history.read(Subject(kind=kind, name=name), range_of(within), now)
    return list(recorded.columns.get("memory", ()))


async def test_longer_ranges_have_the_means_of_shorter_ones_and_the_latest_values(
    path: Path,
) -> None:
    history, end = HistoryFile(path), 3 * 3600 + 30
    await filled(history, for_s=end + 30)

    now = BEGIN + end
    hour = await history.read(GPU, HOUR, now)
    assert len(hour.at) == 120
    assert hour.at[-1] == now
    day = await memory_of(history, now, "1d")
    assert day == pytest.approx([1000, *range(1000, 1018), 1018], rel=1e-3)
    week = [1000, 1002.5, 1008.5, 1014.5, 1018]
    assert await memory_of(history, now, "7d") == pytest.approx(week, rel=1e-3)


async def test_of_each_range_only_its_span_is_kept(history: HistoryFile) -> None:
    await filled(history, for_s=8 * 86_400, every_s=600)

    rows = await history._run(
        lambda db: dict(db.execute("SELECT range, count(*) FROM samples GROUP BY range"))
    )
    kinds = 2
    assert rows["1h"] <= kinds * (HOUR.span_s / 600 + 1)
    assert rows["1d"] <= len(history._layouts) * (DAY.span_s / DAY.step_s + 2)
    assert rows["7d"] <= len(history._layouts) * (WEEK.span_s / WEEK.step_s + 2)


async def test_the_history_survives_a_restart_with_a_gap(path: Path) -> None:
    history = HistoryFile(path)
    await filled(history, for_s=60)
    await history.aclose()

    again = HistoryFile(path)
    await again.add(partial(device_sample, 7), BEGIN + 600)

    at, columns, _ = history_columns(await again.read(GPU, HOUR, BEGIN + 600), HOUR)
    assert at == (BEGIN, BEGIN + 30, BEGIN + 60, BEGIN + 600)
    assert columns["memory"] == (1000, 1000, None, 7)


@pytest.mark.parametrize("damage", [b"not a database at all" * 400, b""])
async def test_a_damaged_file_is_refused_with_words_and_begun_anew(
    path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    history = HistoryFile(path)
    await filled(history, for_s=3600)
    await history.aclose()
    whole = path.read_bytes()
    path.write_bytes(damage or whole[:8192] + b"\xff" * (len(whole) - 8192))

    again = HistoryFile(path)
    await again.add(partial(device_sample, 7), BEGIN)

    assert f"the history in {path} is damaged, and begins anew" in caplog.text
    assert await memory_of(again, BEGIN) == [7]
    await again.aclose()
    assert await memory_of(HistoryFile(path), BEGIN) == [7]


async def test_a_file_of_another_version_is_begun_anew(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 1")

    await HistoryFile(path).add(partial(device_sample, 7), BEGIN)

    assert "begins anew: its version is 1, not" in caplog.text


async def test_a_file_that_is_damaged_while_it_is_in_use_is_begun_anew(
    history: HistoryFile,
) -> None:
    await history.add(partial(device_sample, 7), BEGIN)
    await history._run(lambda db: db.execute("UPDATE samples SET row = x'00' || row"))
    await history._run(lambda db: db.execute("DROP INDEX by_end"))
    await history._run(lambda db: db.execute("INSERT INTO finished VALUES ('p', 9e9, x'ff')"))

    with pytest.raises(UnavailableError, match="was damaged, and begins anew"):
        await history.finished(BEGIN)

    assert await history.finished(BEGIN) == []


async def test_without_a_directory_to_write_to_the_history_is_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    history = HistoryFile(tmp_path / "file" / "history")

    await history.add(partial(device_sample, 7), BEGIN)

    assert await memory_of(history, BEGIN) == [7]
    assert "the history does not survive a restart" in caplog.text
    assert logging.WARNING in {record.levelno for record in caplog.records}


async def test_a_second_process_does_not_write_to_the_same_file(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = HistoryFile(path), HistoryFile(path)
    await first.add(partial(device_sample, 7), BEGIN)

    await second.add(partial(device_sample, 8), BEGIN)

    assert "cannot be used: database is locked" in caplog.text
    assert await memory_of(first, BEGIN) == [7]
    assert await memory_of(second, BEGIN) == [8]


async def test_a_subject_has_no_values_of_the_one_that_had_its_place(
    history: HistoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_file, "MOST_SERIES", 2)
    await history.add(lambda: {POD: {"a": [1] * 5, "b": [2] * 5}}, BEGIN)
    await history.add(lambda: {POD: {"b": [2] * 5, "c": [3] * 5}}, BEGIN + 30)
    await history.add(lambda: {POD: {"b": [2] * 5, "c": [3] * 5, "d": [4] * 5}}, BEGIN + 60)

    now = BEGIN + 60
    assert await memory_of(history, now, kind=POD, name="a") == []
    assert await memory_of(history, now, kind=POD, name="b") == [2, 2, 2]
    assert await memory_of(history, now, kind=POD, name="c") == [None, 3, 3]
    assert await memory_of(history, now, kind=POD, name="d") == []


async def test_a_namespace_without_leases_counts_as_zero_in_means_and_a_pod_that_is_gone_does_not(
    history: HistoryFile,
) -> None:
    for number in range(20):
        held = {"a": [100.0] * 5} if number < 5 else {}
        sample = {NAMESPACE: held, POD: held, WAITING: {"NoMemory": (4,)} if held else {}}
        await history.add(partial(dict, sample), BEGIN + 30 * (number + 1))
    now = BEGIN + 630
    await history.add(dict, now)

    assert (await memory_of(history, now, "1d", NAMESPACE, "a"))[-1] == pytest.approx(25, abs=0.1)
    assert (await memory_of(history, now, "1d", POD, "a"))[-1] == pytest.approx(100, abs=0.1)
    recorded = await history.read(Subject(kind=CLUSTER), DAY, now)
    assert recorded.waiting == {"NoMemory": (1.0,)}


async def test_a_pod_that_is_gone_for_a_day_is_forgotten_and_a_device_is_not(
    history: HistoryFile,
) -> None:
    await history.add(lambda: {POD: {"p": [1] * 5}, DEVICE: {"gpu": [1] * 5}}, BEGIN)
    await history.add(lambda: {POD: {}, DEVICE: {}}, BEGIN + DAY_S + 30)
    await history.add(lambda: {POD: {}, DEVICE: {}}, BEGIN + DAY_S + 660)

    assert not history._layouts[POD].known
    assert history._layouts[DEVICE].known
    assert await history._run(lambda db: db.execute("SELECT name FROM series").fetchall()) == [
        ("gpu",)
    ]


async def test_finished_pods_have_the_means_of_their_usage_for_a_day(path: Path) -> None:
    history, held = HistoryFile(path), lease("p1", namespace="team", created_at=BEGIN)
    for number in range(120):
        amounts = [3000, 50, 1000 + number % 2 * 1000, 40, 50 if number < 60 else 0]
        await history.add(partial(dict, {POD: {"p1": amounts}}), BEGIN + 30 * (number + 1))
    ended = BEGIN + 3600

    await history.add_finished([finished_pod(held, ended, "Succeeded")], ended)

    (found,) = await history.finished(ended + 60)
    assert (found.name, found.namespace, found.node) == (held.name, "team", "n1")
    assert (found.reason, found.started, found.ended) == ("Succeeded", BEGIN, ended)
    assert (found.used_memory_mib, found.used_cores_percent) == (1500, 40)
    assert found.gpu_hours == pytest.approx(found.gpus)
    assert found.idle_gpu_hours == pytest.approx(0.25, rel=0.02)
    assert await history.finished(ended + DAY_S) == []


async def test_only_so_many_finished_pods_are_kept(
    history: HistoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_file, "MOST_SERIES", 3)
    pods = [finished_pod(lease(f"p{number}"), BEGIN + number, "") for number in range(5)]

    await history.add_finished(pods, BEGIN)

    assert [each.pod for each in await history.finished(BEGIN)] == ["p4", "p3", "p2"]


def test_a_sample_has_leased_and_measured_amounts_of_everything() -> None:
    held = lease("p1", namespace="team")
    projection = projected(node_totals(held))
    (share,) = held.shares
    half_mib = share.memory_mib // 2
    measured = build.measurement(held, memory_mib=half_mib, cores_percent=7, idle_since=1.0)
    projection.update_measured(NodeName("n1"), usage(measured), now=700.0, idle_after_s=600)
    hardware = Hardware(device=share.device, at=1.0, temperature_c=61, sm_clock_mhz=1410)

    sample = sample_of(
        projection.devices.values(), ["NoMemory", "NoMemory", "GpuQuota"], {share.device: hardware}
    )

    idle = pytest.approx(100 * projection.devices[DeviceUuid("GPU-n1-0")].shares[0].part_of_device)
    expected = [share.memory_mib, share.cores_percent, half_mib, 7, idle]
    assert sample[DEVICE] == {"GPU-n1-0": expected, "GPU-n1-1": [0] * 5}
    assert sample[POD] == {"p1": expected}
    assert sample[NAMESPACE] == {"team": expected}
    assert sample[NODE] == {"n1": expected}
    assert sample[CLUSTER] == {"": expected}
    assert sample["waiting"] == {"NoMemory": (2,), "GpuQuota": (1,)}
    assert sample["hardware"] == {"GPU-n1-0": (61, None, 1410, None)}


def test_a_history_begins_with_the_first_known_value() -> None:
    values = (None, None, 5.0)
    recorded = Recorded(at=(0.0, 30.0, 60.0), columns={"memory": values}, waiting={"a": values})

    at, columns, waiting = history_columns(recorded, HOUR)

    assert at == (60.0,)
    assert columns == dict.fromkeys(columns, (None,)) | {"memory": (5.0,)}
    assert waiting == {"a": (5.0,)}


def test_a_reason_that_no_pod_waits_for_counts_none() -> None:
    recorded = Recorded(
        at=(0.0, 30.0, 300.0),
        columns={"memory": (5.0, 5.0, 5.0)},
        waiting={"a": (None, 3.0, None)},
    )

    at, _, waiting = history_columns(recorded, HOUR)

    assert at == (0.0, 30.0, 60.0, 300.0)
    assert waiting == {"a": (0.0, 3.0, None, 0.0)}


async def test_a_step_that_nobody_waits_for_any_more_ends_before_the_file_is_closed(
    path: Path,
) -> None:
    file = HistoryFile(path)
    begun, ended = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def sample() -> Sample:
        loop.call_soon_threadsafe(begun.set)
        ended.wait(10)
        return {}

    adding = asyncio.create_task(file.add(sample, BEGIN))
    await begun.wait()
    adding.cancel()
    closing = asyncio.create_task(file.aclose())
    done, _ = await asyncio.wait([closing], timeout=0.2)
    assert not done
    ended.set()
    await closing
