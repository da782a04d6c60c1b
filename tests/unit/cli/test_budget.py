"""What the commands about GPU time show."""

from services.api.read_api import budget_view, uncharged_minutes
from services.cli.admin import budget
from shared.ledger.showback import ShowbackRow
from shared.model.budget import UNITS_PER_GPU_MINUTE, Balance, BudgetState, BudgetWindow, ReportView
from shared.model.names import Namespace
from tests.support.snapshots import drawn


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
    row = ShowbackRow(window="2026-11", namespace="team-a", units=2 * UNITS_PER_GPU_MINUTE)

    uncharged = uncharged_minutes([used(5, charged=2)], "")

    assert uncharged == {"team-a": "3.000"}
    shown = " ".join(
        drawn(budget.report_table(ReportView(rows=(row.view(),), not_charged=uncharged))).split()
    )
    assert "not charged yet are team-a 3.000 GPU-minutes" in shown
    assert uncharged_minutes([used(5, charged=5)], "") == {}
    assert uncharged_minutes([used(5, charged=2)], "2026-10") == {}


def test_amounts_of_budgets_are_not_shortened_on_a_narrow_terminal() -> None:
    shown = drawn(budget.budget_table([budget_view(used(123_456, charged=0))], 0.0), 110)

    assert all(text in shown for text in ("team-a", "exhausted", "123456.000", "-123454.000"))
    assert all(len(line) <= 110 for line in shown.splitlines())
