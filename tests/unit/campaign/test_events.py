"""A violation's story has its own pods and devices, the faults of its time, and nothing else."""

from collections import Counter
from dataclasses import replace

from tests.campaign.events import CampaignEvent, changes, stories, story_of
from tests.campaign.history import Violation
from tests.campaign.observations import Resources
from tests.campaign.report import CampaignResult, median, table
from tests.support.campaign import AT, grant, lease, ledger, pod, sample, waiting


def event(at: float, text: str, pod_uid: str = "", *, fault: bool = False) -> CampaignEvent:
    return CampaignEvent(at=at, text=text, pods=frozenset({pod_uid} - {""}), fault=fault)


VIOLATION = Violation(check="S1", subject="device d", text="t", at=100.0, pods=frozenset({"a"}))


def test_a_story_has_the_events_of_its_pods_and_the_faults_around_them() -> None:
    events = [
        event(10, "an old fault", fault=True),
        event(60, "of another", "b"),
        event(75, "a fault", fault=True),
        event(30, "of the pod", "a"),
        event(110, "afterwards", "a"),
    ]

    assert [one.text for one in story_of(VIOLATION, events)] == ["of the pod", "a fault"]


def test_a_report_contains_faults_from_before_the_violation_although_it_was_found_later() -> None:
    violation = Violation(check="P3", subject="binder", text="t", at=100.0, since=60.0)
    events = [event(1, "early", fault=True), event(50, "late", fault=True), event(60, "x", "a")]

    assert [one.text for one in story_of(violation, events)] == ["late"]


def test_violations_of_one_invariant_and_time_are_reported_together() -> None:
    later = replace(VIOLATION, subject="device e", at=120.0)
    other = replace(VIOLATION, check="S2")
    much_later = replace(VIOLATION, subject="device f", at=300.0)

    found = list(stories([VIOLATION, other, later, much_later], [event(90, "x", "a")], 0.0))

    assert len(found) == 3
    assert "device d" in found[0]
    assert "device e" in found[0]
    assert "90.00 s  x" in found[0]


def test_changes_of_pods_containers_and_leases_become_events() -> None:
    before = sample(waiting(), ledger=ledger())
    after = sample(pod(), grants=(grant(),), ledger=ledger(lease()), at=AT + 1)

    texts = [one.text for one in changes(before, after)]

    assert len(texts) == 3
    assert "is bound to node-0" in texts[0]
    assert "runs with 1000 MiB" in texts[1]
    assert "active on node-0" in texts[2]
    assert [one.text for one in changes(after, sample(ledger=ledger(), at=AT + 2))] == [
        "pod pod-a (a) is gone",
        "lease of a is gone",
    ]


def test_an_unchanged_state_has_no_events() -> None:
    state = sample(pod(), grants=(grant(),))

    assert list(changes(state, state)) == []


def test_a_rebuild_of_the_ledger_is_in_every_story() -> None:
    before, after = (sample(ledger=ledger(generation=name)) for name in "gh")

    [rebuilt] = changes(before, after)

    assert rebuilt.fault


def test_the_table_shows_faults_times_and_violations() -> None:
    result = CampaignResult(
        seed=3,
        rounds=2,
        pods=9,
        faults=Counter(kill=2),
        quiet_s={"kill": [1.0, 12.5]},
        violations=[VIOLATION],
        begin=Resources(memory_mib={"nats": 20}, keys=5),
        end=Resources(memory_mib={"nats": 21}, keys=6),
        coverage="5 samples",
    )

    shown = table(result)

    assert "judged: 5 samples" in shown
    assert "2 rounds, 9 pods, 2 faults, 1 violations" in shown
    assert "kill                   2     1.0    12.5  above the aim of 10 s" in shown
    assert "nats                          20      21" in shown


def test_the_median_is_the_lower_of_two() -> None:
    assert median([3.0, 1.0, 2.0, 9.0]) == 2.0
