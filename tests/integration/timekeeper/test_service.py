"""The timekeeper as a service, and what it charges for nodes and devices that are gone."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from shared.ledger.leases import RedisLeases
from shared.model.events.pod_events import BudgetChanged
from shared.model.leases.lease import Lease, LeaseState
from shared.model.names import Namespace, NodeName
from shared.nats.bus import Bus
from shared.runtime.runner import Runner
from shared.runtime.telemetry import Tracing
from tests.support.placer.ledger import facts, rebuild, report, reservation, reserve, share
from tests.support.servers.nats import nats_server
from tests.support.servers.valkey import ValkeyServer
from tests.support.timekeeper.accounts import TEAM, AccountLedger, units
from tests.support.waiting import until

DEFAULT = Namespace("default")
NODE = NodeName("a")
KIND = {"apiVersion": "leasehold.dev/v1beta1", "kind": "GPUBudget"}
QUARTER = 250


async def bound_for_a_moment(found: AccountLedger) -> Lease:
    """Bind a pod to a quarter of a device; return when its lease has lasted some milliseconds."""
    [reserved] = await reserve(found.leases, reservation("p", share("a", 0)))
    await found.leases.bind([reserved])
    bound_ms = await found.store.now_ms()
    await until(found.store.now_ms, lambda now_ms: now_ms > bound_ms + 1)
    return structs.replace(reserved, state=LeaseState.BOUND)


async def assert_charged_as_a_quarter(found: AccountLedger) -> None:
    """Count with a replica that has read nothing before, and compare what it charges."""
    keeper = found.timekeeper(charge_every_s=0, store=found.store)
    await keeper.count()
    charges = await found.charges(DEFAULT)
    assert {(each.weight, each.model) for each in charges} == {(QUARTER, "Tesla T4")}


@pytest.mark.parametrize("gone", ["node", "node and lease", "device"])
async def test_a_lease_counts_by_its_device_although_that_is_gone(
    opened: AccountLedger, gone: str
) -> None:
    """With the last lease, the ledger also deletes what it knew of the devices."""
    bound = await bound_for_a_moment(opened)
    if gone == "device":
        await opened.leases.save_devices([report("a", [])])
    else:
        await opened.leases.remove_node(NODE)
    if gone == "node and lease":
        await opened.leases.release([bound.pod], reason="a test")

    await assert_charged_as_a_quarter(opened)


async def test_a_lease_of_a_rebuilt_ledger_counts_by_its_device_before_that_is_reported(
    opened: AccountLedger,
) -> None:
    bound = await bound_for_a_moment(opened)
    token = await opened.leases.begin_rebuild(now=bound.created_at, force=True)
    assert token
    await opened.leases.save_nodes([facts("a")])
    assert not await opened.leases.restore([bound], now=bound.created_at, token=token)
    assert await opened.leases.finish_rebuild(token)
    await opened.leases.release([bound.pod], reason="a test")

    await assert_charged_as_a_quarter(opened)


async def test_the_running_service_publishes_changes_on_the_bus(opened: AccountLedger) -> None:
    async with nats_server() as nats, Bus.connect(nats.url, name="timekeeper") as bus:
        inbox = await bus.subscribe([BudgetChanged], group="test")
        timekeeper = opened.timekeeper()
        started = asyncio.Event()
        running = asyncio.create_task(
            Runner("timekeeper", timekeeper, bus, Tracing("timekeeper", None)).run(started)
        )
        try:
            async with asyncio.timeout(20):
                (delivered,) = await inbox.batch()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    (event,) = delivered.events
    assert isinstance(event, BudgetChanged)
    assert (event.namespace, event.state, event.remaining_units) == (TEAM, "ok", units(10))


async def test_a_killed_timekeeper_process_continues_without_losing_time(
    server: ValkeyServer, tmp_path: Path
) -> None:
    file = tmp_path / "budgets.yaml"
    run_file = tmp_path / "run.json"
    manifest = {**KIND, "metadata": {"name": "*"}, "spec": {"limitGPUMinutes": 100}}
    file.write_text(json.dumps(manifest))

    @asynccontextmanager
    async def started(nats: str) -> AsyncIterator[asyncio.subprocess.Process]:
        run_file.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.timekeeper", "--no-objects", "--nats-url", nats),
            *("--redis-url", server.url, "--budgets", str(file), "--run-file", str(run_file)),
            *("--tick-s", "0.1", "--charge-every-s", "0.5", "--log-level", "warning"),
        )
        try:
            await until(run_file.exists, limit_s=40)
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async with nats_server() as nats, RedisLeases.connect(server.url) as leases:
        await rebuild(leases, {"a": 1}, now=0.0)
        async with started(nats.url) as first:
            (bound,) = await reserve(leases, reservation("p", share("a", 0, mib=16_000)))
            await leases.bind([bound])
            held_ms = int((await leases._connection._redis.time())[0]) * 1000
            first.send_signal(signal.SIGKILL)
            await first.wait()
        await leases.release([bound.pod], reason="a test")
        async with started(nats.url) as second:

            async def charges() -> list[Any]:
                rows = await leases._connection._redis.xrange("lh-budget:entries:default")
                entries = [json.loads(fields[b"e"]) for _, fields in rows]
                return [each for each in entries if each["kind"] == "charge"]

            entries = await until(charges)
            second.terminate()
            assert await second.wait() == 0

    assert {each["weight"] for each in entries} == {1000}
    assert all(each["units"] == 1000 * (each["to_ms"] - each["from_ms"]) for each in entries)
    assert all(each["from_ms"] >= held_ms - 1000 for each in entries)
