"""The same amounts at the same moment on the page, in commands, objects, reports and metrics."""

import io
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from msgspec import structs
from playwright.async_api import Browser, expect
from prometheus_client import REGISTRY, Metric
from rich.console import Console

from services.api.aggregated.objects import KINDS
from services.api.reports.history import (
    AMOUNTS,
    CLUSTER,
    DEVICE,
    NAMESPACE,
    NODE,
    POD,
    Subject,
    range_of,
)
from services.api.reports.prometheus import Prometheus
from services.cli.admin.budget import budget_table
from services.cli.admin.reports import by_owner, idle_table, starts_table
from services.cli.inspect import render
from services.node_agent.usage.leased_containers import LeasedContainer
from services.node_agent.usage.measurements import MeasuredContainer, MeasuredShare
from services.node_agent.usage.snapshot import UsageSnapshot
from services.node_agent.usage.usage_metrics import usage_metrics
from services.timekeeper.cost_recorder import CostRecorder
from services.timekeeper.report.budget_reports import budget_status
from shared.kubernetes.types import RawObject
from shared.model.budgets.cost_records import IDLE, USED
from shared.model.clock import SystemClock
from shared.model.events.request_reply import UsageReply
from shared.model.leases.lease import MIB, Lease, Share, ShareKey, share_key
from shared.model.leases.ledger import reservation_for
from shared.model.leases.preemption import (
    EndingLease,
    PromiseOutcome,
    StoredStart,
)
from shared.model.names import Namespace, NodeName
from shared.model.requests.placement import Placement
from shared.model.views.budgets import BudgetsView, IdleView
from shared.model.views.gpus import GpusView
from shared.model.views.leases import LeasesView
from shared.model.views.promises import PromisesView
from tests.support.api.browser import needed, opened
from tests.support.api.running import RunningApi
from tests.support.build import measurement
from tests.support.placer.ledger import device, facts, queued, report, reservation, reserve, share
from tests.support.servers.prometheus import (
    MISSING,
    PROGRAM,
    PROMTOOL,
    prometheus,
    sample_lines,
)
from tests.support.timekeeper.accounts import (
    MINUTE_MS,
    AccountLedger,
    FixedBudgets,
    budget,
)
from tests.support.timekeeper.accounts import lease as half_a_gpu
from tests.support.waiting import until

pytestmark = [*needed, pytest.mark.asyncio(loop_scope="module")]

HOUR_S = 3600.0
BUSY = 0.98 + 0.25
"""GPUs: 98 % of the memory of one, and a quarter of another."""
UNUSED = 0.5
LEASED = BUSY + UNUSED
PHASES = {"Unhealthy": 1, "Closed": 1, "Reserved": 1, "Leased": 3, "Free": 1}
TEAM = Namespace("team")
FIRST: dict[str, Any] = {"container": "first", "init": True}
"""An init container, which has more than the container after it."""
LIMIT_MINUTES = 600
USED_MINUTES = 25
"""By half a GPU, before the day's pods."""
PROMISES = (
    *((PromiseOutcome.KEPT, HOUR_S * hours) for hours in (1, 3, 5)),
    (PromiseOutcome.WITHDRAWN, 60.0),
    (PromiseOutcome.NOT_NEEDED, 60.0),
)
"""How promised starts ended, and how long before that they were made."""


@dataclass(frozen=True)
class Day:
    shown: RunningApi
    gpus: GpusView
    recorder: CostRecorder
    leases: tuple[Lease, ...]


async def lease_of(shown: RunningApi, pod: str, node: str, *shares: Share) -> Lease:
    wanted = reservation(pod, *shares, node=node)
    (lease,) = await reserve(shown.ledger, structs.replace(wanted, namespace=TEAM, name=pod))
    await shown.ledger.bind([lease])
    return lease


async def gpus_of(shown: RunningApi) -> GpusView:
    _, view = await shown.get("/api/v1/gpus")
    return msgspec.convert(view, GpusView)


def has_all(view: GpusView) -> bool:
    devices = [gpu for node in view.nodes for gpu in node.devices]
    shares = [held for gpu in devices for held in gpu.shares]
    measured = [bool(held.measured) for held in shares if not held.init]
    return Counter(gpu.phase.value for gpu in devices) == PHASES and measured == [True] * 3


@pytest_asyncio.fixture(loop_scope="module")
async def day(shown: RunningApi) -> AsyncIterator[Day]:
    """A cluster in which GPUs are busy, idle from the start, sick, closed, reserved and free."""
    gpus = [device("b", number) for number in range(5)]
    gpus[1] = replace(gpus[1], healthy=False, fault="XidError: Xid 79")
    closed = replace(facts("b"), excluded_devices=(2,), exclusions=("fan is loud",))
    await shown.ledger.save_nodes([closed])
    await shown.ledger.save_devices([report("b", gpus)])
    busy = [
        await lease_of(shown, "busy", "a", share("a", 0, 15_680)),
        await lease_of(shown, "half", "a", share("a", 1, 4_000, **FIRST), share("a", 1, 1_000)),
    ]
    idle = await lease_of(shown, "idle", "b", share("b", 0, 8_000))
    waiting = queued("later")
    place = Placement(node=NodeName("b"), shares=(share("b", 3),))
    at = time.time() + HOUR_S
    ending = EndingLease(pod=idle.pod, namespace=TEAM, name=idle.name, ends_at=at, enforced=True)
    planned = StoredStart(
        id=waiting.pod,
        wanted=(reservation_for(waiting, (place,)),),
        at_once=({},),
        waits_for=(ending,),
        at=at,
        enforced=True,
    )
    for outcome, known_s in PROMISES:
        now = time.time()
        earlier = replace(planned, opened_at=now - known_s)
        ended = earlier.ended(outcome, now)
        assert await shown.preemptions.open_start(earlier)
        assert await shown.preemptions.close_start(earlier, ended)
    assert await shown.preemptions.open_start(planned)
    main = [structs.replace(lease, shares=lease.shares[-1:]) for lease in busy]
    used = tuple(measurement(lease, memory_mib=1_000, cores_percent=40) for lease in main)
    unused = measurement(idle, memory_mib=0, cores_percent=0, idle_since=time.time() - HOUR_S)
    shown.usage.nodes[NodeName("a")] = UsageReply(measured_at=0.0, shares=used)
    shown.usage.nodes[NodeName("b")] = UsageReply(measured_at=0.0, shares=(unused,))
    recorder = CostRecorder(
        store=shown.budgets,
        ledger=shown.ledger,
        read_usage=shown.usage,
        clock=SystemClock(),
        keep_days=1,
    )
    await recorder.record()
    view = await until(lambda: gpus_of(shown), has_all)
    await recorder.record()
    yield Day(shown, view, recorder, (*busy, idle))


def printed(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


async def test_all_screens_count_gpus_and_what_is_leased_alike(browser: Browser, day: Day) -> None:
    page = await opened(browser, day.shown)

    tile = page.locator("#totals .tile").first
    await expect(tile).to_contain_text(f"7on 2 nodes, 1 free, {LEASED:.2f} leased")
    await expect(tile).to_contain_text("1 unhealthy, 1 closed")
    totals = printed(render.gpus(day.gpus, 120)).splitlines()[-1]
    assert totals == (
        "7 GPUs: 1 Unhealthy, 1 Closed, 1 Reserved, 3 Leased, 1 Free; "
        f"{LEASED:.2f} GPUs leased, {UNUSED:.2f} of them idle"
    )
    cluster = day.shown.service.cluster(lambda _: True)
    (of_devices,) = (kind for kind in KINDS if kind.plural == "gpudevices")
    phases = Counter(listed.status.phase for listed in of_devices.read(cluster))
    assert phases == {"Unhealthy": 1, "Closed": 1, "Reserved": 1, "Ready": 4}
    await page.goto(f"{day.shown.url}/#/namespaces")
    await expect(page.get_by_role("main")).to_contain_text(f"{LEASED:.2f}".rstrip("0"))
    await page.goto(f"{day.shown.url}/#/node/a")
    await expect(page.get_by_role("main")).to_contain_text(f"Leased{BUSY:.2f} of 2 GPUs")
    await day.shown.service.export_metrics()
    assert value("leasehold_leased_gpus") == pytest.approx(LEASED, abs=0.001)
    assert {phase: value("leasehold_device_phases", phase=phase) for phase in PHASES} == PHASES


async def test_a_pod_has_as_much_memory_as_its_larger_init_container_on_every_screen(
    browser: Browser, day: Day
) -> None:
    page = await opened(browser, day.shown, "#/pods")

    row = page.get_by_role("row").filter(has_text="team/half")
    await expect(row).to_contain_text(f"3.91 GiB25 %{BUSY - 0.98:.2f}")
    _, leases = await day.shown.get("/api/v1/leases")
    listed = printed(render.ps(msgspec.convert(leases, LeasesView)))
    assert re.search(r"team/half +a +1 +4000 +1000 ", listed)
    (of_leases,) = (kind for kind in KINDS if kind.plural == "gpuleases")
    cluster = day.shown.service.cluster(lambda _: True)
    (half,) = (lease for lease in of_leases.read(cluster) if lease.metadata.name == "half")
    assert of_leases.cells(half.status, time.time())[2:5] == ("1", 4_000, 1_000)
    await page.goto(f"{day.shown.url}/#/gpu/GPU-a-1")
    await expect(page.get_by_role("main")).to_contain_text("3.91 GiB of 15.6 GiB leased")
    shares = page.get_by_role("main").locator(".shares li")
    await expect(shares.first).to_contain_text("(init)3.91 GiB")
    await expect(shares).to_have_count(2)


async def test_a_reserved_gpu_says_for_whom_and_is_not_free(browser: Browser, day: Day) -> None:
    page = await opened(browser, day.shown, "#/gpus")

    reserved = page.locator(".dev[data-uuid=GPU-b-3]")

    await expect(reserved).to_have_attribute(
        "aria-description", re.compile(r"reserved for default/later until \d")
    )
    await page.goto(f"{day.shown.url}/#/gpu/GPU-b-3")
    await expect(page.get_by_role("main")).to_contain_text("reserved for default/later until")


async def test_what_is_idle_is_the_same_in_tile_list_report_costs_and_metrics(
    browser: Browser, day: Day
) -> None:
    page = await opened(browser, day.shown)

    await expect(page.locator("#totals")).to_contain_text("1 pod now")
    listed = page.locator("#idle .bar-row")
    await expect(listed).to_have_count(1)
    await expect(listed).to_have_text(re.compile(r"team/idle3\d(\.\d)? GPU-min"))
    _, answer = await day.shown.get("/api/v1/reports/idle")
    view = msgspec.convert(answer, IdleView)
    assert view.total.gpus == UNUSED
    assert view.total.gpu_hours == pytest.approx(UNUSED, abs=0.02)
    report_text = printed(idle_table(by_owner(view, {}), view))
    assert re.search(rf"total .* {UNUSED:.2f} .* {UNUSED:.2f} ", report_text)
    assert sum(gpu.idle_milli_gpu for node in day.gpus.nodes for gpu in node.devices) == 500
    (of_leases,) = (kind for kind in KINDS if kind.plural == "gpuleases")
    objects = of_leases.read(day.shown.service.cluster(lambda _: True))
    assert [of.metadata.name for of in objects if of.status.idle_since] == ["idle"]
    _, leases = await day.shown.get("/api/v1/leases")
    lines = printed(render.ps(msgspec.convert(leases, LeasesView))).splitlines()
    assert [line.split()[0] for line in lines if ", idle " in line] == ["team/idle"]
    await day.shown.service.export_metrics()
    assert value("leasehold_idle_gpus") == UNUSED
    await day.shown.service.sample_history()
    _, history = await day.shown.get("/api/v1/history?range=1h")
    assert history["idle"][-1] == 100 * UNUSED
    now_ms = await day.shown.budgets.now_ms()
    hours = [*(await day.shown.budgets.costs(now_ms - 3_600_000, now_ms + 1)).hours.values()]
    sums = [row for hour in hours for name, _, row in hour.rows() if name == TEAM]
    recorded_ms = sum(hour.recorded_ms for hour in hours)
    used, unused = (sum(row[use] for row in sums) for use in (USED, IDLE))
    assert (used, unused) == (round(1000 * BUSY) * recorded_ms, 1000 * UNUSED * recorded_ms)


async def test_the_budget_is_the_same_in_command_object_page_report_and_metrics(
    browser: Browser, day: Day
) -> None:
    store = day.shown.budgets
    limit = {TEAM: budget(LIMIT_MINUTES, TEAM)}
    accounts = AccountLedger("", day.shown.ledger, store, FixedBudgets(given=limit))
    now_ms = await store.now_ms()
    half = half_a_gpu("earlier", created_ms=now_ms - 50 * MINUTE_MS, namespace=TEAM)
    await accounts.journal("restored", now_ms, half)
    await accounts.journal("ended", now_ms, half)
    keeper = accounts.timekeeper(store=store)
    reported = {event.namespace: event for event in await keeper.count()}
    before: dict[str, Any] = {
        "used_units": 0,
        "current_rate_milli_gpu": 0,
        "reported_at": time.time() - 60,
    }
    await day.shown.preemptions.save_budget(replace(reported[TEAM], **before))
    balance = keeper.balance_of(TEAM)

    _, answer = await day.shown.get("/api/v1/budgets")
    view = msgspec.convert(answer, BudgetsView)
    text = printed(budget_table(view.budgets, view.read_at, wide=True))
    row = re.search(rf"team +ok +\[#\.+\] +(\S+) +(\S+) +(\S+) +{LEASED:.3f} GPU +3 ", text)
    assert row is not None, text
    used, allowed, left = map(float, row.groups())
    assert (used, allowed, left) == near(USED_MINUTES, LIMIT_MINUTES, LIMIT_MINUTES - USED_MINUTES)
    status = budget_status(keeper.accounts[TEAM], balance, RawObject(), {})
    assert (float(status.used_minutes), float(status.remaining_minutes or 0)) == near(used, left)
    assert (status.state, status.current_rate, status.leases) == ("ok", 1000 * LEASED, 3)
    _, report = await day.shown.get("/api/v1/reports/showback")
    charged = sum(float(row["gpu_minutes"]) for row in report["rows"] if row["namespace"] == TEAM)
    assert (charged + float(report["not_charged"][TEAM]),) == near(used)
    of_team: dict[str, str] = {"namespace": TEAM}
    exported = [
        REGISTRY.get_sample_value(f"leasehold_budget_{name}", of_team)
        for name in ("used_gpu_seconds", "remaining_gpu_seconds", "current_rate_gpus")
    ]
    assert exported == near(60 * used, 60 * left, LEASED, by=60)
    page = await opened(browser, day.shown, f"#/namespace/{TEAM}")
    main = page.get_by_role("main")
    await expect(main.locator(".tag").first).to_have_text("budget ok")
    await expect(main).to_contain_text(f"Current rate{LEASED:.2f} GPUs")
    drawn = await main.text_content() or ""
    shown = re.search(r"Used([\d.]+) GPU-minutesRemaining([\d.]+) GPU-minutes", drawn)
    assert shown is not None, drawn
    assert [float(amount) for amount in shown.groups()] == near(used, left)


def near(*amounts: float, by: float = 1.0) -> Any:
    """These amounts, which change meanwhile."""
    return pytest.approx(amounts, abs=by * 0.5)


async def test_promises_kept_are_the_same_in_api_report_page_and_metrics(
    browser: Browser, day: Day
) -> None:
    _, answer = await until(
        lambda: day.shown.get("/api/v1/reports/starts"),
        lambda reply: reply[1]["total"]["not_needed"] == 1,
    )
    view = msgspec.convert(answer, PromisesView)
    assert (view.total.kept, view.total.withdrawn, view.total.kept_percent) == (3, 1, 75.0)
    assert (view.total.half_known_s, view.total.most_known_s) == pytest.approx((3 * HOUR_S, HOUR_S))
    report_text = printed(starts_table(view))
    assert re.search(r"default +3 +1 +1 +75\.0 +3h +60m", report_text)
    assert re.search(r"total +3 +1 +1 +75\.0 +3h +60m", report_text)
    page = await opened(browser, day.shown)
    text = re.compile("Kept3 of 4, 75.0 %Known beforehalf 3 h, 9 of 10 1 hNot needed1$")
    for path in ("", "#/namespace/default"):
        await page.goto(f"{day.shown.url}/{path}")
        promised = page.get_by_role("region", name="Promised starts, 30 d")
        await expect(promised).to_have_text(text)
    await day.shown.service.export_metrics()
    exported = {
        outcome: REGISTRY.get_sample_value("leasehold_promised_starts", {"outcome": outcome})
        for outcome in PromiseOutcome
    }
    assert exported == {"kept": 3, "withdrawn": 1, "not_needed": 1}
    known_s = [
        REGISTRY.get_sample_value("leasehold_promised_start_known_seconds", {"quantile": part})
        for part in ("0.5", "0.1")
    ]
    assert known_s == pytest.approx([3 * HOUR_S, HOUR_S])
    assert REGISTRY.get_sample_value("leasehold_promised_starts_kept_ratio") == 0.75


OF_CLUSTER = ("leasehold_leased_memory_bytes", "leasehold_leased_cores", "leasehold_idle_gpus")
LEFT_BEHIND_MIB = 500
"""What the init container's file still counts."""


def agent_metrics(day: Day, node: NodeName, now: float) -> Iterator[Metric]:
    """What the agent of a node exports of the day's leases, as it has measured them."""
    replied = {(of.pod, of.container): of for of in day.shown.usage.nodes[node].shares}
    measured: list[MeasuredContainer] = []
    idle_since: dict[ShareKey, float] = {}
    for lease in day.leases:
        for leased_share in lease.shares if lease.node == node else ():
            usage = replied.get((lease.pod, leased_share.container))
            mib = LEFT_BEHIND_MIB if usage is None else usage.memory_mib or 0
            measured_share = MeasuredShare(
                share=leased_share,
                position=0,
                driver_bytes=mib * MIB,
                driver_percent=None if usage is None else usage.cores_percent,
            )
            container = LeasedContainer(lease=lease, name=leased_share.container)
            measured.append(
                MeasuredContainer(container=container, region=None, shares=(measured_share,))
            )
            if usage is not None and usage.idle_since is not None:
                idle_since[share_key(lease.pod, leased_share)] = usage.idle_since
    snapshot = UsageSnapshot(containers=tuple(measured))
    return usage_metrics(snapshot, node, now=now, idle_since=idle_since, read={})


def subjects_of(day: Day) -> Iterator[Subject]:
    yield Subject(kind=CLUSTER)
    yield Subject(kind=NAMESPACE, name=TEAM, namespace=TEAM)
    for node in day.gpus.nodes:
        yield Subject(kind=NODE, name=node.node, devices=tuple(gpu.uuid for gpu in node.devices))
    for lease in day.leases:
        yield Subject(kind=POD, name=lease.pod, namespace=TEAM, pod=lease.name)
        device = lease.shares[0].device
        yield Subject(kind=DEVICE, name=device, devices=(device,))


def last(values: Sequence[float | None]) -> float:
    return (values[-1] if values else None) or 0.0


@pytest.mark.skipif(not (PROGRAM and PROMTOOL), reason=MISSING)
@pytest.mark.parametrize("honored", [True, False])
async def test_a_prometheus_has_the_history_that_the_api_records_itself(
    day: Day, tmp_path: Path, honored: bool
) -> None:
    service = day.shown.service
    await service.export_metrics()
    await service.sample_history()
    now = time.time()
    of_api = [metric for metric in REGISTRY.collect() if metric.name in OF_CLUSTER]
    lines = [*sample_lines(of_api, now, {"job": "api"})]
    for node in day.gpus.nodes:
        of_agent = {"namespace": "leasehold-agents", "pod": f"agent-{node.node}"}
        lines += sample_lines(agent_metrics(day, node.node, now), now, of_agent, honored=honored)

    async with prometheus(lines, tmp_path) as url:
        source = Prometheus(url, idle_after_s=600)
        for subject in subjects_of(day):
            stored = await source.read(subject, range_of("1h"), now + 60)
            own = await service.history.read(subject, range_of("1h"), now + 60)
            for column in AMOUNTS:
                recorded, read = (last(of.columns.get(column, ())) for of in (own, stored))
                assert read == pytest.approx(recorded, abs=0.2), (subject, column)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model": "Tesla T4", **labels})
