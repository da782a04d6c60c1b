"""Run times, as they are learned from the pods of one controller."""

import math

import pytest

from shared.model.leases.lease import Lease
from shared.model.names import Namespace
from shared.placing.run_times import MOST_SERIES, RunTimes, series_of
from tests.support.build import lease


def named(name: str, namespace: str = "team") -> Lease:
    return lease(name=name, namespace=Namespace(namespace))


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("train-x7k2p", "team/train-*"),
        ("train-3-x7k2p", "team/train-#-*"),
        ("web-5d8f9c6b7d-x7k2p", "team/web-*-*"),
        ("worker-12", "team/worker-#"),
        ("eval-model", "team/eval-model"),
        ("run-20261127-a", "team/run-#-a"),
    ],
)
def test_pods_of_one_controller_have_one_series(name: str, series: str) -> None:
    assert series_of(Namespace("team"), name) == series


def test_a_pod_is_expected_to_run_as_long_as_those_before_it() -> None:
    learned = RunTimes()
    learned.learn([(named("train-x7k2p"), 600.0)])
    assert learned.expected_s(named("train-bbbbb")) is None, "one run says too little"

    learned.learn([(named("train-ccccc"), 600.0), (named("train-ddddd"), 0.0)])

    again = RunTimes.load(learned.dump())
    expected = again.expected_s(named("train-bbbbb"))
    assert expected is not None
    assert math.isclose(expected, 600 ** (2 / 3))
    assert again.expected_s(named("train-bbbbb", "others")) is None
    for _ in range(50):
        again.learn([(named("train-fffff"), 6.0)])
    assert 6 < (again.expected_s(named("train-bbbbb")) or 0) < 6.1, "what is new counts more"


def test_the_series_that_was_not_learned_for_longest_is_forgotten() -> None:
    learned = RunTimes()
    for number in range(MOST_SERIES):
        learned.learn([(named("a", f"n{number}"), 9.0), (named("a", f"n{number}"), 9.0)])
    learned.learn([(named("a", "n0"), 9.0), (named("a", "new"), 9.0)])

    assert len(learned.series) == MOST_SERIES
    assert "n0/a" in learned.series
    assert "n1/a" not in learned.series


def test_the_series_of_one_namespace_do_not_replace_those_of_others() -> None:
    learned = RunTimes()
    learned.learn([(named("train-1"), 9.0), (named("train-2"), 9.0)])
    names = ["".join(chr(97 + int(digit)) for digit in str(number)) for number in range(600)]
    learned.learn([(named(name, "greedy"), 9.0) for name in names])

    assert learned.expected_s(named("train-3")) is not None
    assert len(learned.series) == MOST_SERIES
    assert f"greedy/{names[-1]}" in learned.series
    assert f"greedy/{names[0]}" not in learned.series


@pytest.mark.parametrize("data", [b"", b"x", b"\x81\xa1a\x92\xff\x01", b"\x81\xa1a\x92\x01\xcb"])
def test_from_bytes_that_are_no_series_nothing_is_learned(data: bytes) -> None:
    assert RunTimes.load(data).series == {}
