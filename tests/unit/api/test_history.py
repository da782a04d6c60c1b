"""Samples of the last day: bounded, with gaps, and without names that are gone for a day."""

from services.api.history import (
    INTERVAL_S,
    MOST_ABSENT,
    SAMPLES,
    HistoryPoint,
    Samples,
    UsageHistory,
    history_of,
)
from shared.model.lease import ShareMeasurement
from shared.model.names import DeviceUuid, Namespace, NodeName
from tests.support.api.board import lease, node_totals, projected

POINT = HistoryPoint(memory=50, cores=20, used_memory=10, used_cores=None)


def test_a_day_of_samples_is_stored() -> None:
    samples = Samples("B")
    for number in range(SAMPLES + 10):
        samples.add({"gpu": HistoryPoint(memory=number % 100, cores=0)}, number * INTERVAL_S)

    assert len(samples.times) == SAMPLES == 24 * 3600 / INTERVAL_S
    stored = samples.of("gpu")
    assert len(stored) == SAMPLES
    assert stored[-1] == HistoryPoint(memory=(SAMPLES + 9) % 100, cores=0)


def test_a_name_has_no_points_before_it_appeared_and_while_it_was_gone() -> None:
    samples = Samples("B")
    for now, names in enumerate(([], ["gpu"], [], ["gpu"])):
        samples.add(dict.fromkeys(names, POINT), float(now))

    assert samples.of("gpu") == [None, POINT, None, POINT]
    assert samples.of("other") == [None] * 4


def test_a_name_that_is_gone_for_a_day_is_forgotten() -> None:
    samples = Samples("I")
    samples.add({"team": POINT}, 0.0)
    for number in range(SAMPLES - 1):
        samples.add({}, float(number))
    assert POINT in samples.of("team")

    samples.add({}, 0.0)

    assert not samples._points
    assert not samples._latest


def test_of_names_that_are_gone_only_the_latest_are_kept() -> None:
    samples = Samples("B")
    for number in range(6):
        names = [f"gpu-{number}-{each}" for each in range(MOST_ABSENT // 2)]
        samples.add(dict.fromkeys(names, POINT), float(number))

    assert len(samples._points) == MOST_ABSENT * 3 // 2
    assert POINT not in samples.of("gpu-2-0")
    assert POINT in samples.of("gpu-3-0")


def test_amounts_beyond_the_range_are_its_end() -> None:
    samples = Samples("B")
    samples.add({"gpu": HistoryPoint(memory=900, cores=-1)}, 0.0)

    assert samples.of("gpu") == [HistoryPoint(memory=254, cores=0)]


def test_a_sample_has_leased_and_measured_amounts_of_devices_and_namespaces() -> None:
    held = lease("p1", namespace="team")
    projection = projected(node_totals(held))
    (share,) = held.shares
    measured = ShareMeasurement(
        pod=held.pod,
        namespace=held.namespace,
        name=held.name,
        container=share.container,
        device=share.device,
        memory_mib=share.memory_mib // 2,
        cores_percent=7,
    )
    projection.update_measured(NodeName("n1"), [measured], now=1.0, idle_after_s=600)
    history = UsageHistory()

    history.sample(projection.devices.values(), projection.namespaces(), 1.0)

    whole = projection.devices[DeviceUuid("GPU-n1-0")].memory_mib
    (device,) = history.devices.of("GPU-n1-0")
    assert device is not None
    assert device.memory == round(100 * share.memory_mib / whole)
    assert device.used_memory == round(50 * share.memory_mib / whole)
    assert device.used_cores == 7
    (team,) = history.namespaces.of("team")
    assert team is not None
    assert (team.memory, team.used_memory) == (share.memory_mib, share.memory_mib // 2)
    assert history.devices.of("GPU-n1-1") == [HistoryPoint(memory=0, cores=0)]


def test_a_history_begins_with_the_first_sample_of_its_name_and_ends_now() -> None:
    samples = Samples("B")
    samples.add({}, 0.0)
    samples.add({"team": POINT}, 120.0)

    assert history_of(samples, Namespace("team"), POINT, 130.0) == [(120.0, POINT), (130.0, POINT)]
    assert history_of(samples, Namespace("new"), POINT, 130.0) == [(130.0, POINT)]
