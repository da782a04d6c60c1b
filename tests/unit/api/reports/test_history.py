"""The history: what is sampled, kept for an hour, bounded and forgotten; pods that finished."""

import pytest

from services.api.projection.lease_views import finished_pod
from services.api.reports import recent_history
from services.api.reports.history import (
    CLUSTER,
    DEVICE,
    HARDWARE,
    NAMESPACE,
    NODE,
    POD,
    RANGES,
    UNUSED,
    WAITING,
    RecordedValues,
    Sample,
    Subject,
    history_columns,
    sample_of,
)
from services.api.reports.recent_history import RecentHistory
from shared.model.devices.device import Hardware
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.quantity import DAY_S
from tests.support import build
from tests.support.api.board import lease, node_totals, projected, usage

HOUR = RANGES[0]
GPU = Subject(kind=DEVICE, name="gpu")
BEGIN = 1_800_000_000.0


@pytest.fixture
def history() -> RecentHistory:
    return RecentHistory()


def device_sample(memory: float, name: str = "gpu") -> Sample:
    return {DEVICE: {name: [memory, 20, 10, None, 0]}, CLUSTER: {"": [memory] * 5}}


async def memory_of(
    history: RecentHistory, now: float, kind: str = DEVICE, name: str = "gpu"
) -> list[float | None]:
    recorded = await history.read(Subject(kind=kind, name=name), HOUR, now)
    return list(recorded.columns.get("memory", ()))


async def test_the_last_hour_is_kept(history: RecentHistory) -> None:
    for number in range(240):
        history.add(device_sample(number), BEGIN + 30 * number)

    recorded = await history.read(GPU, HOUR, BEGIN + 30 * 239)

    assert recorded.columns["memory"] == [float(number) for number in range(120, 240)]
    assert recorded.columns["used_cores"] == [None] * 120
    assert recorded.at == [BEGIN + 30 * number for number in range(120, 240)]
    assert await memory_of(history, BEGIN + 30 * 239 + 1800) == list(range(180, 240))


async def test_amounts_of_large_clusters_are_exact_to_a_millionth(history: RecentHistory) -> None:
    largest_mib = 700_000_123.0

    history.add(device_sample(largest_mib), BEGIN)

    assert await memory_of(history, BEGIN) == [pytest.approx(largest_mib, rel=1e-6)]


async def test_a_device_has_what_its_sensors_read_beside_its_amounts(
    history: RecentHistory,
) -> None:
    history.add({**device_sample(7), HARDWARE: {"gpu": [61, None, 1410, 5]}}, BEGIN)

    recorded = await history.read(GPU, HOUR, BEGIN)

    assert recorded.columns["temperature"] == [61]
    assert recorded.columns["power"] == [None]


async def test_a_subject_that_no_sample_had_for_an_hour_is_forgotten_and_gives_its_place(
    history: RecentHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_history, "MOST_SERIES", 2)
    history.add({POD: {"a": [1] * 5, "b": [2] * 5}}, BEGIN)
    history.add({POD: {"b": [2] * 5, "c": [3] * 5}}, BEGIN + 30)
    assert await memory_of(history, BEGIN + 30, POD, "c") == []

    now = BEGIN + HOUR.span_s
    history.add({POD: {"b": [2] * 5}}, now)
    history.add({POD: {"b": [2] * 5, "c": [3] * 5}}, now + 30)

    assert await memory_of(history, now + 30, POD, "a") == []
    assert await memory_of(history, now + 30, POD, "b") == [2, 2]
    assert await memory_of(history, now + 30, POD, "c") == [None, 3]


async def test_a_namespace_without_leases_counts_as_zero_and_of_a_pod_that_is_gone_nothing_is_known(
    history: RecentHistory,
) -> None:
    held = {"a": [100.0] * 5}
    history.add({NAMESPACE: held, POD: held, WAITING: {"NoMemory": (4,)}}, BEGIN)
    history.add({}, BEGIN + 30)

    now = BEGIN + 30
    assert await memory_of(history, now, NAMESPACE, "a") == [100, 0]
    assert await memory_of(history, now, POD, "a") == [100, None]
    recorded = await history.read(Subject(kind=CLUSTER), HOUR, now)
    assert recorded.waiting == {"NoMemory": [4, 0]}


async def test_finished_pods_have_the_means_of_their_usage_for_a_day(
    history: RecentHistory,
) -> None:
    held = lease("p1", namespace="team", created_at=BEGIN)
    for number in range(240):
        idle = 50 if 20 <= number < 60 else 0
        unused = 50 if number < 60 else 0
        amounts = [3000, 50, 1000 + number % 2 * 1000, None, idle]
        sample: Sample = {POD: {"p1": amounts}, UNUSED: {"p1": (unused,)}}
        history.add(sample, BEGIN + 30 * (number + 1))
    ended = BEGIN + 7200

    history.add_finished([finished_pod(held, ended, "Succeeded")], ended)

    (found,) = history.finished(ended + 60)
    assert (found.name, found.namespace, found.node) == (held.name, "team", "n1")
    assert (found.reason, found.started, found.ended) == ("Succeeded", BEGIN, ended)
    assert (found.used_memory_mib, found.used_cores_percent) == (1500, None)
    assert found.gpu_hours == pytest.approx(2 * found.gpus)
    assert found.idle_gpu_hours == pytest.approx(0.25)
    assert history.finished_pod(held.pod, ended + 60) == found
    assert history.finished_pod(PodUid("p2"), ended + 60) is None
    assert history.finished_pod(held.pod, ended + DAY_S) is None
    assert history.finished(ended + DAY_S) == []


def test_only_so_many_finished_pods_are_kept(
    history: RecentHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_history, "MOST_SERIES", 3)
    pods = [finished_pod(lease(f"p{number}"), BEGIN + number, "") for number in range(5)]

    history.add_finished(pods, BEGIN)

    assert [pod.pod for pod in history.finished(BEGIN)] == ["p4", "p3", "p2"]


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

    idle = projection.devices[DeviceUuid("GPU-n1-0")].milli_gpu / 10
    expected = [share.memory_mib, share.cores_percent, half_mib, 7, idle]
    assert sample[DEVICE] == {"GPU-n1-0": expected, "GPU-n1-1": [0] * 5}
    assert sample[POD] == {"p1": expected}
    assert sample[NAMESPACE] == {"team": expected}
    assert sample[NODE] == {"n1": expected}
    assert sample[CLUSTER] == {"": expected}
    assert sample["waiting"] == {"NoMemory": (2,), "GpuQuota": (1,)}
    assert sample["hardware"] == {"GPU-n1-0": (61, None, 1410, None)}
    assert sample[UNUSED] == {"p1": [idle]}
    projection.update_measured(NodeName("n1"), usage(measured), now=700.0, idle_after_s=6_000)
    early = sample_of(projection.devices.values(), [], {})
    assert (early[POD]["p1"][-1], early[UNUSED]["p1"]) == (0, [idle])


def test_a_history_begins_with_the_first_known_value() -> None:
    values = (None, None, 5.0)
    recorded = RecordedValues(
        at=(0.0, 30.0, 60.0), columns={"memory": values}, waiting={"a": values}
    )

    at, columns, waiting = history_columns(recorded, HOUR)

    assert at == (60.0,)
    assert columns == dict.fromkeys(columns, (None,)) | {"memory": (5.0,)}
    assert waiting == {"a": (5.0,)}


def test_a_reason_that_no_pod_waits_for_counts_none() -> None:
    recorded = RecordedValues(
        at=(0.0, 30.0, 300.0),
        columns={"memory": (5.0, 5.0, 5.0)},
        waiting={"a": (None, 3.0, None)},
    )

    at, _, waiting = history_columns(recorded, HOUR)

    assert at == (0.0, 30.0, 60.0, 300.0)
    assert waiting == {"a": (0.0, 3.0, None, 0.0)}
