"""What the judge finds of evictions."""

from typing import Any

from tests.campaign.observations import Sample, SeenPod
from tests.campaign.workload import DEVICE_MIB
from tests.support.campaign import AT, found, lease, ledger, pod, sample, waiting

URGENT = waiting("u", priority=1000)
FULL = ledger(lease())


def story(*, for_s: float = 3.0, urgent: Any = URGENT, **victim: Any) -> tuple[Sample, ...]:
    """A pod is announced and evicted after some seconds."""
    pods = (pod(), urgent) if urgent else (pod(),)
    announced = (pod(announced=True, **victim), *pods[1:])
    return (
        sample(*pods, ledger=FULL),
        sample(*announced, ledger=FULL, at=AT + 0.2),
        sample(*announced, ledger=FULL, at=AT + for_s + 0.1, evicted={"a": AT + for_s}),
    )


def m2(*samples: Sample) -> bool:
    return "M2" in found(*samples)


def test_an_eviction_after_notice_for_an_urgent_pod_is_right() -> None:
    assert not m2(*story())


def test_an_eviction_for_no_pod_is_found() -> None:
    assert m2(*story(urgent=None))
    assert m2(*story(urgent=waiting("u", priority=0)))


def test_an_eviction_of_a_protected_pod_is_found() -> None:
    assert m2(*story(spared=True))


def test_an_eviction_without_notice_is_found_unless_a_clock_is_off() -> None:
    first, *others = story(for_s=1.0)

    assert m2(first, *others)
    assert not m2(sample(pod(), URGENT, ledger=FULL, faults=("clock",)), *others)


def test_an_eviction_that_was_not_announced_is_found() -> None:
    assert m2(*story()[:1], sample(pod(), URGENT, ledger=FULL, evicted={"a": AT}))


def test_an_urgent_pod_that_nothing_is_evicted_for_is_found() -> None:
    urgent = waiting("u", DEVICE_MIB, priority=1000)

    def m3(*holders: SeenPod) -> bool:
        leases = ledger(*(lease(each.uid, device=each.devices[0]) for each in holders))
        states = (sample(urgent, *holders, ledger=leases, at=AT + second) for second in range(50))
        return "M3" in found(*states)

    holders = pod("a"), pod("b", devices=("gpu-1",))
    spared = pod("a", spared=True), pod("b", devices=("gpu-1",), priority=1000)

    assert m3(*holders)
    assert not m3(*spared)
