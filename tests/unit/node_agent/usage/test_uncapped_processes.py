"""Processes with a limit of cores whose PID on the node HAMi-core does not find."""

from pathlib import Path

from services.node_agent.usage.monitor import UNCAPPED_S
from shared.model.events.node_events import ViolationReason
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.monitor_world import MIB, UID, MonitorWorld, computing
from tests.support.node_agent.regions import process, use_memory


async def test_a_capped_process_whose_pid_hami_core_does_not_find_is_reported_once_it_stays_so(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    assert tenant.region_path is not None
    world.add_process(tenant, 71, inner=8, mib=200)
    image = bytearray(Path(tenant.region_path).read_bytes())
    process(image, 1, 8, totals=(200 * MIB,), host_pid=0)
    Path(tenant.region_path).write_bytes(bytes(image))

    await world.monitor.scan()
    early = world.monitor.snapshot.violations
    world.clock.advance(UNCAPPED_S)
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
    assert tenant.region_path is not None
    use_memory(tenant.region_path, 200)
    world.add_process(tenant, 70, inner=7)

    for _ in range(2):
        await world.monitor.scan()
        world.clock.advance(UNCAPPED_S)

    assert world.monitor.snapshot.violations == ()
