"""Quantities, bookings and the life of a lease."""

import time
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.model.bounds import MOST_RUN_S, Seconds
from shared.model.errors import RequestError
from shared.model.leases.lease import LIVE, TRANSITIONS, LeaseState, Share, bookings, ends_by
from shared.model.names import DeviceUuid
from shared.model.quantity import (
    amount_text,
    parse_count,
    parse_cpu_m,
    parse_duration_s,
    parse_resources,
    timestamp,
)
from shared.model.requests.request import Term
from tests.support.build import device
from tests.support.lifecycle import most_at_once
from tests.support.node_agent.agent import lease_of


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1024", 1024),
        ("2Ki", 2048),
        ("1k", 1000),
        ("1.5Gi", 1610612736),
        ("12e6", 12_000_000),
        ("100m", 1),
        (".5", 1),
        ("1E", 10**18),
        (7, 7),
    ],
)
def test_quantities_are_read_as_kubernetes_writes_them(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "thousandths"), [("500m", 500), ("2", 2000), ("0.0001", 1), (2, 2000)]
)
def test_cpu_is_read_in_millicores_rounded_up(text: str | int, thousandths: int) -> None:
    assert parse_cpu_m(text) == thousandths


@pytest.mark.parametrize("text", ["", "x", "1x", "1 Gi", "--1", "1e", "Ki", "1KiB"])
def test_an_invalid_quantity_is_named_in_the_error(text: str) -> None:
    with pytest.raises(RequestError, match="quantity"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("2h30m", 9000), ("48h", 172_800), ("1h1m1s", 3661)]
)
def test_durations_are_read_as_kubernetes_writes_them(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "0s", "2", "2d", "-2h", "30m2h", "1.5h", "2H", "9999999h", "1" * 65 + "h", "٢h"]
)
def test_an_invalid_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(RequestError, match="such as 90m"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("name", "amount", "text"),
    [
        ("cpu", 64_000, "64"),
        ("cpu", 1500, "1500m"),
        ("memory", 400 * 2**30, "400Gi"),
        ("ephemeral-storage", 1536 * 2**20, "1.5Gi"),
        ("memory", 10, "10"),
        ("pods", 110, "110"),
    ],
)
def test_amounts_are_written_with_the_units_of_kubernetes(
    name: str, amount: int, text: str
) -> None:
    assert amount_text(name, amount) == text


def test_a_resource_list_is_parsed_with_cpu_in_millicores() -> None:
    assert parse_resources({"cpu": "1", "memory": "1Ki", "x/y": "3"}) == {
        "cpu": 1000,
        "memory": 1024,
        "x/y": 3,
    }


def test_the_latest_instant_of_a_message_has_a_date_with_the_longest_run_time_added() -> None:
    [most] = [each.le for each in get_args(Seconds)[1:]]
    term = Term(max_run_s=MOST_RUN_S, grace_s=MOST_RUN_S)
    lease = lease_of("u", created_at=most, activated_at=most, term=term)

    assert timestamp(ends_by(lease) or 0).startswith("97")


def share(memory: int, cores: int, *, init: bool, device: str = "GPU-a") -> Share:
    return Share(
        container="c",
        device=DeviceUuid(device),
        index=0,
        device_mib=16_000,
        memory_mib=memory,
        cores_percent=cores,
        init=init,
    )


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9), st.booleans()), min_size=1))
def test_a_booking_holds_what_any_moment_of_the_pod_needs(
    parts: list[tuple[int, int, bool]],
) -> None:
    shares = [share(memory, cores, init=init) for memory, cores, init in parts]

    (booking,) = bookings(shares)

    def most(amount: Callable[[Share], int]) -> int:
        return most_at_once(shares, lambda share: share.init, amount)

    assert booking.memory_mib == most(lambda share: share.memory_mib)
    assert booking.cores_percent == most(lambda share: share.cores_percent)
    assert booking.shares == booking.slots == most(lambda _: 1)


def test_each_device_is_booked_separately() -> None:
    both = [share(5, 1, init=False), share(7, 2, init=False, device="GPU-b")]

    assert [(b.device, b.memory_mib) for b in bookings(both)] == [("GPU-a", 5), ("GPU-b", 7)]


def test_an_ended_lease_never_changes_its_state() -> None:
    assert LeaseState.BOUND in TRANSITIONS[LeaseState.RESERVED]
    for state in set(LeaseState) - LIVE:
        assert not TRANSITIONS[state]


def test_a_bound_lease_never_expires() -> None:
    assert LeaseState.EXPIRED not in TRANSITIONS[LeaseState.BOUND]


@pytest.mark.parametrize(
    ("fault", "is_public"),
    [("XID 79 on PCI 0000:3b", True), ("used by secret/train", False), ("x secret/a, b/c", False)],
)
def test_a_fault_that_names_a_pod_is_not_for_all_namespaces(fault: str, is_public: bool) -> None:
    assert device(fault=fault).public_fault == (fault if is_public else "")


def test_a_long_word_in_a_fault_is_searched_for_pods_in_linear_time() -> None:
    fault = "x" * 30_000
    began = time.process_time()

    assert device(fault=fault).public_fault == fault

    assert time.process_time() - began < 1
