"""Regions that a killed process left locked or half-written."""

from dataclasses import replace

from services.node_agent.isolation.region import decode
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.usage.monitor import StuckRegions
from shared.model.names import PodUid
from tests.support.node_agent.regions import fresh, process

KEY = (PodUid("u1"), "main")


def free() -> bytearray:
    image = fresh()
    process(image, 0, 7)
    return image


def locked_by(pid: int) -> bytearray:
    image = free()
    image[V1_2.semaphore] = 0
    image[V1_2.owner] = pid
    return image


def test_a_lock_that_one_process_holds_for_30_s_is_stuck() -> None:
    stuck = StuckRegions()
    held = {KEY: decode(V1_2, locked_by(7))}

    assert not stuck.observe(held, 100.0)
    assert not stuck.observe(held, 129.0)
    assert "held for more than 30 s by PID 7" in stuck.observe(held, 130.0)[KEY]
    assert not stuck.observe({KEY: decode(V1_2, free())}, 131.0)
    assert not stuck.observe(held, 132.0)


def test_a_lock_that_changes_hands_is_not_stuck() -> None:
    stuck = StuckRegions()

    for number in range(20):
        assert not stuck.observe({KEY: decode(V1_2, locked_by(7 + number % 2))}, 5.0 * number)


def test_a_lock_without_a_holder_is_stuck_too() -> None:
    stuck = StuckRegions()
    held = {KEY: decode(V1_2, locked_by(0))}
    stuck.observe(held, 0.0)

    assert "a process that was killed" in stuck.observe(held, 30.0)[KEY]


def test_a_record_that_stays_half_written_is_stuck() -> None:
    stuck = StuckRegions()
    torn = decode(V1_2, free(), torn={0})
    stuck.observe({KEY: torn}, 0.0)

    assert "record 0 of its region" in stuck.observe({KEY: torn}, 30.0)[KEY]
    assert not stuck.observe({KEY: replace(torn, slots=())}, 31.0)
