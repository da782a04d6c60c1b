"""Budgets and reports of GPU time, and idle leases, marked and added up."""

from dataclasses import replace

from msgspec import structs

from services.api.projection.lease_views import budget_view, uncharged_minutes
from services.api.projection.visible_cluster import VisibleCluster
from services.api.reports.showback import ShowbackRow
from services.cli.admin import budget, reports
from services.cli.inspect import render
from shared.model.budgets.budget import UNITS_PER_GPU_MINUTE, Balance, BudgetState, BudgetWindow
from shared.model.names import Namespace, PodUid
from shared.model.views.budgets import IdleView, ReportView
from tests.support.snapshots import LEASE, MEASURED, NODE, POD, cluster_of, drawn, explained


def used(minutes: int, *, charged: int, window: str = "2026-11") -> Balance:
    return Balance(
        namespace=Namespace("team-a"),
        at_ms=0,
        window=BudgetWindow(
            id=window,
            start_ms=0,
            end_ms=1_796_000_000_000,
            used_units=charged * UNITS_PER_GPU_MINUTE,
        ),
        state=BudgetState.EXHAUSTED,
        warned_percent=100,
        used_units=minutes * UNITS_PER_GPU_MINUTE,
        window_used_units=minutes * UNITS_PER_GPU_MINUTE,
        allowed_units=2 * UNITS_PER_GPU_MINUTE,
        remaining_units=(2 - minutes) * UNITS_PER_GPU_MINUTE,
        current_rate_milli_gpu=7_814,
        leases=2,
    )


def test_a_report_says_what_a_budget_counts_and_it_does_not_yet() -> None:
    row = ShowbackRow(
        window="2026-11+1795771128700", namespace="team-a", units=2 * UNITS_PER_GPU_MINUTE
    )

    uncharged = uncharged_minutes([used(5, charged=2)], "")

    assert uncharged == {"team-a": "3.000"}
    shown = " ".join(
        drawn(reports.report_table(ReportView(rows=(row.view(),), not_charged=uncharged))).split()
    )
    assert "2026-11 from 2026-11-27T09:18:48Z team-a" in shown
    assert "not charged yet are team-a 3.000 GPU-minutes" in shown
    assert uncharged_minutes([used(5, charged=5)], "") == {}
    assert uncharged_minutes([used(5, charged=2)], "2026-10") == {}


def test_amounts_of_budgets_are_not_shortened_on_a_narrow_terminal() -> None:
    shown = drawn(budget.budget_table([budget_view(used(123_456, charged=0))], 0.0), 110)

    assert all(text in shown for text in ("team-a", "exhausted", "123456.000", "-123454.000"))
    assert all(len(line) <= 110 for line in shown.splitlines())


NOW = 8_000.0
"""Two hours after the last use, at 800."""
IDLE = replace(MEASURED, idle_since=800.0)


def idle_cluster(idle_after_s: float = 600.0) -> VisibleCluster:
    return cluster_of(NODE, measured=[IDLE], now=NOW, idle_after_s=idle_after_s)


def test_an_idle_lease_is_marked_everywhere_with_how_long() -> None:
    cluster = idle_cluster()
    view = cluster.leases()

    lines = "\n".join(explained(POD, cluster).lines)

    assert "in use: 1200 MiB, 0%, idle 2h" in drawn(render.gpus(cluster.gpus(), 160), 160)
    assert "active, idle 2h" in drawn(render.ps(view), 160)
    assert "idle        for 2h, since 1970-01-01T00:13:20Z" in lines
    assert "2h idle" in drawn(render.top_table(render.top_rows(view, sort="idle"), view))
    measured = view.leases[0].shares[0].measured
    assert measured is not None
    assert (measured.idle, measured.idle_since) == (True, 800.0)


def test_a_lease_is_not_marked_before_the_time_has_passed() -> None:
    cluster = idle_cluster(3 * 3600)

    assert "idle" not in drawn(render.gpus(cluster.gpus(), 160), 160)
    assert "idle" not in drawn(render.ps(cluster.leases()), 160)
    assert not any(line.startswith("idle") for line in explained(POD, cluster).lines)


def test_a_lease_with_one_share_in_use_is_not_idle_but_its_other_share_is() -> None:
    second = structs.replace(LEASE.shares[0], container="side", slot=2)
    lease = structs.replace(LEASE, shares=(*LEASE.shares, second))
    measured = [IDLE, replace(IDLE, container="side", idle_since=None)]
    cluster = cluster_of(replace(NODE, leases=(lease,)), measured=measured, now=NOW)

    assert "idle 2h" in drawn(render.gpus(cluster.gpus(), 160), 160)
    assert "idle" not in drawn(render.ps(cluster.leases()), 160)


OWNERS = {PodUid("job-1"): "Job/train", PodUid("job-2"): "Job/train"}


def two_owners() -> tuple[reports.IdleReport, IdleView]:
    """Return a job with two idle pods, one of two hours, and a pod of its own of one hour."""
    names = ("job-1", "job-2", "alone")
    leases = tuple(structs.replace(LEASE, pod=PodUid(name), name=name) for name in names)
    leases = (*leases[:2], structs.replace(leases[2], namespace=Namespace("other")))
    since = {"job-1": NOW - 7_200, "job-2": NOW - 60, "alone": NOW - 3_600}
    measured = [replace(IDLE, pod=PodUid(name), idle_since=at) for name, at in since.items()]
    cluster = cluster_of(replace(NODE, leases=leases), measured=measured, now=NOW)
    first = cluster.idle(1)
    assert [(pod.pod, pod.name, pod.owner) for pod in first.pods] == [
        ("job-1", "job-1", "Pod/job-1")
    ]
    assert first.total.shares == 2
    view = cluster.idle(None)
    return reports.by_owner(view, OWNERS), view


def test_the_report_adds_up_idle_gpu_hours_and_mib_hours_by_owner() -> None:
    view, _ = two_owners()

    assert [(one.namespace, one.owner) for one in view.holders] == [
        ("team", "Job/train"),
        ("other", "Pod/alone"),
    ]
    job, alone = view.holders
    assert (job.shares, job.gpus, job.gpu_hours, job.mib_hours) == (1, 0.3, 0.6, 6_000)
    assert (alone.gpu_hours, alone.mib_hours) == (0.3, 3_000)
    assert (view.total.gpu_hours, view.total.idle_since) == (0.9, NOW - 7_200)


def test_the_report_as_a_table_ends_with_the_sum() -> None:
    lines = drawn(reports.idle_table(*two_owners()), 160).splitlines()

    assert lines[0].split() == [
        "NAMESPACE", "OWNER", "SHARES", "GPUS", "MIB", "GPU-HOURS", "MIB-HOURS", "SINCE"
    ]  # fmt: skip
    assert lines[1].split()[:7] == ["team", "Job/train", "1", "0.30", "3000", "0.60", "6000"]
    assert lines[-1].split()[:6] == ["total", "2", "0.60", "6000", "0.90", "9000"]


def test_a_share_counts_by_the_larger_part_of_its_device() -> None:
    large = structs.replace(LEASE.shares[0], memory_mib=7_500)
    whole = structs.replace(LEASE.shares[0], whole=True)

    def gpus(share: object) -> float:
        node = replace(NODE, leases=(structs.replace(LEASE, shares=(share,)),))
        (found,) = cluster_of(node, measured=[IDLE], now=NOW).idle(None).pods
        return found.gpus

    assert [gpus(large), gpus(whole)] == [0.5, 1.0]


def test_without_idle_shares_the_report_says_so_and_names_nodes_that_did_not_reply() -> None:
    view = cluster_of(NODE, measured=None, now=NOW).idle(None)

    text = drawn(reports.idle_table(reports.by_owner(view, {}), view))

    assert "no share has been idle for 10m" in text
    assert "no reply from the agents of: node-0" in text
