"""Since when shares are idle: by kernels, utilization and memory, across restarts of the agent."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from services.node_agent.isolation.region import Region, decode
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.usage.idle_shares import UNOBSERVED_S, IdleShares, LastUseFile, LastUses
from services.node_agent.usage.leased_containers import LeasedContainer
from services.node_agent.usage.measurements import MeasuredContainer, MeasuredShare
from shared.model.clock import end
from shared.model.leases.lease import share_key
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.monitor_world import MonitorWorld, computing
from tests.support.node_agent.regions import fresh
from tests.support.waiting import until

UID = "0b7a4d0e-7f0c-4d55-9f5b-2f2f0f9d7a11"
LEASED = LeasedContainer(lease=lease_of(UID), name="main", allocated_at=900.0)
KEY = share_key(LEASED.lease.pod, share(0))
REGION = decode(V1_2, fresh())


def measured(
    percent: int | None = 0, *, mib: int = 0, region: Region | None = None
) -> MeasuredContainer:
    (leased,) = LEASED.shares
    one = MeasuredShare(
        share=leased, position=0, driver_percent=percent, driver_bytes=mib << 20, processes=1
    )
    return MeasuredContainer(container=LEASED, region=region, shares=(one,))


def observed(*scans: tuple[float, MeasuredContainer]) -> IdleShares:
    shares = IdleShares()
    for at, container in scans:
        shares.observe([container], at)
    return shares


HELD = measured(mib=500)
GROWN = measured(mib=600)
KERNEL, FORGED = (replace(REGION, last_kernel_at=at) for at in (1_003, 9_999))
SCANS: list[tuple[str, list[MeasuredContainer], float | None]] = [
    (
        "idle from the last scan that saw use",
        [measured(30), measured(), measured()],
        1_000,
    ),
    ("in use", [measured(), measured(1)], None),
    ("a process only holds memory", [HELD, HELD, HELD], 1_000),
    ("a change of memory is use", [HELD, GROWN, GROWN], 1_005),
    (
        "a kernel that the driver rounds to zero is use",
        [measured(region=REGION), measured(region=KERNEL)],
        1_003,
    ),
    ("no kernel is in the future", [measured(region=FORGED)], None),
    ("what is not reported counts as use", [measured(None), measured(None)], None),
    ("the region shows kernels", 2 * [measured(None, region=REGION)], 1_000),
]


@pytest.mark.parametrize(("_", "scans", "since"), SCANS)
def test_a_share_is_idle_since_its_last_use(
    _: str, scans: list[MeasuredContainer], since: float | None
) -> None:
    found = observed(*zip(range(1_000, 2_000, 5), scans, strict=False)).since

    assert found == ({} if since is None else {KEY: since})


def test_a_share_that_was_never_used_is_idle_since_its_allocation() -> None:
    shares = IdleShares()
    shares.observe([], 800)
    shares.observe([measured(0)], 1_000)

    assert shares.since == {KEY: 900}


def test_after_a_long_absence_only_the_region_shows_that_nothing_ran() -> None:
    before = observed((1_000, measured(30, region=REGION)))
    late = 1_000 + UNOBSERVED_S + 1
    with_region = IdleShares()
    without = IdleShares()

    for one in (with_region, without):
        one.restore(before.record, late)
    with_region.observe([measured(0, region=REGION)], late)
    without.observe([measured(0)], late)

    assert with_region.since == {KEY: 1_000}
    assert without.since == {}


def test_a_record_of_the_future_is_not_believed() -> None:
    after = IdleShares()

    after.restore(LastUses(observed_at=5_000), 1_000)
    after.observe([measured(0)], 1_000)

    assert after.since == {}


def test_a_share_that_ended_is_forgotten() -> None:
    shares = observed((1_000, measured(30)))

    shares.observe([], 1_005)

    assert shares.record.shares == ()


async def test_the_file_is_read_back_and_a_damaged_one_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = observed((1_000, measured(30))).record
    file = LastUseFile(tmp_path / "last-used.json", save_s=15)

    missing = await file.load()
    await file.save(record)
    await file.save(replace(record, observed_at=1_005, shares=()))
    saved = await file.load()
    await file.save(replace(record, observed_at=1_015, shares=()))
    later = await file.load()
    file.path.write_bytes(b"{")

    assert missing is None
    assert saved == record, "it is written once in 15 s"
    assert later == LastUses(observed_at=1_015)
    assert await file.load() is None
    assert "last-used.json" in caplog.text


async def test_a_restarted_agent_reports_the_same_time_of_the_last_use(world: MonitorWorld) -> None:
    file = world.root / "last-used.json"
    computing(world)
    used_at = world.clock.now()
    await run_once(world, file)
    (sample,) = world.driver.samples
    (process,) = sample.processes
    world.driver.samples = (replace(sample, processes=(replace(process, busy_percent=0),)),)
    world.clock.advance(20)
    await world.monitor.scan()
    before = world.monitor.report({})
    world.clock.advance(30)
    await run_once(world, file)

    for report in (before, world.monitor.report({})):
        assert [one.idle_since for one in report.shares] == [used_at]


async def run_once(world: MonitorWorld, file: Path) -> None:
    """Start an agent's monitor on the node, and stop it after its first scan."""
    monitor = world.restart(LastUseFile(file))
    asleep = len(world.clock.sleepers)
    running = asyncio.create_task(monitor.run())
    await until(lambda: len(world.clock.sleepers) > asleep)
    await end(running)
