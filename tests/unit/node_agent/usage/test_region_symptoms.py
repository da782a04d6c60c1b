"""Regions that stay locked or half-written, or that lack the PID of a process."""

from dataclasses import replace

import pytest

from services.node_agent.isolation.region import Region, decode
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.usage.monitor import LASTING_S, RegionSymptoms
from shared.model.events.node_events import ViolationReason
from shared.model.names import PodUid
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.monitor_world import MIB, UID, MonitorWorld, computing
from tests.support.node_agent.regions import fresh, process, rewritten, use_memory

KEY = (PodUid("u1"), "main")


def region(owner: int | None = None, *, torn: frozenset[int] = frozenset()) -> Region:
    image = fresh()
    process(image, 0, 7)
    if owner is not None:
        image[V1_2.semaphore], image[V1_2.owner] = 0, owner
    return decode(V1_2, image, torn=torn)


FREE = region()
TORN = region(torn=frozenset({0}))
SYMPTOMS: list[tuple[Region, Region, str]] = [
    (region(owner=7), FREE, "held for more than 30 s by PID 7"),
    (region(owner=0), FREE, "a process that was killed"),
    (TORN, replace(TORN, slots=()), "record 0 of its region"),
]


@pytest.mark.parametrize(("ill", "well", "why"), SYMPTOMS)
def test_what_lasts_for_30_s_is_stuck_until_it_ends(ill: Region, well: Region, why: str) -> None:
    symptoms = RegionSymptoms()

    def stuck(now: float, found: Region) -> str:
        hangs, _ = symptoms.observe({KEY: found}, None, now)
        return hangs.get(KEY, "")

    assert (stuck(100.0, ill), stuck(129.0, ill)) == ("", "")
    assert why in stuck(130.0, ill)
    assert (stuck(131.0, well), stuck(132.0, ill)) == ("", "")


def test_a_lock_that_changes_hands_is_not_stuck() -> None:
    symptoms = RegionSymptoms()

    for number in range(20):
        assert not symptoms.observe({KEY: region(7 + number % 2)}, None, 5.0 * number)[0]


async def test_a_capped_process_whose_pid_hami_core_does_not_find_is_reported_once_it_stays_so(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    world.add_process(tenant, 71, inner=8, mib=200)
    with rewritten(tenant.region_path) as image:
        process(image, 1, 8, totals=(200 * MIB,), host_pid=0)

    await world.monitor.scan()
    early = world.monitor.snapshot.violations
    world.clock.advance(LASTING_S)
    await world.monitor.scan()
    (violation,) = await world.monitor.violations()
    world.end_process(71)
    await world.monitor.scan()

    assert early == ()
    assert violation.reason is ViolationReason.CORES_NOT_LIMITED
    assert "8" not in violation.message, "an Event with a PID would be one per process"
    assert world.monitor.snapshot.violations == ()


async def test_a_process_without_a_limit_of_cores_needs_no_pid(world: MonitorWorld) -> None:
    tenant = world.add_container(lease_of(UID, share(0, 1000, cores_percent=0)))
    use_memory(tenant.region_path, 200)
    world.add_process(tenant, 70, inner=7)

    for _ in range(2):
        await world.monitor.scan()
        world.clock.advance(LASTING_S)

    assert world.monitor.snapshot.violations == ()
