"""The timekeeper's Prometheus metrics."""

from prometheus_client import Counter, Gauge, Histogram

from shared.model.budgets.budget import UNITS_PER_GPU_MINUTE, Balance, BudgetState
from shared.model.names import Namespace

UNITS_PER_GPU_SECOND = UNITS_PER_GPU_MINUTE // 60

REMAINING = Gauge(
    "leasehold_budget_remaining_gpu_seconds",
    "GPU-seconds left in the budget; no sample without a limit.",
    ["namespace"],
)
USED = Gauge("leasehold_budget_used_gpu_seconds", "GPU-seconds used.", ["namespace"])
CURRENT_RATE = Gauge(
    "leasehold_budget_current_rate_gpus",
    "The rate at which GPU time is used now: GPU-seconds per second.",
    ["namespace"],
)
STATE = Gauge(
    "leasehold_budget_state", "1 for the budget's state, 0 for others.", ["namespace", "state"]
)
INVALID = Gauge(
    "leasehold_budget_invalid",
    "1 while the configured budget is invalid, and its last valid version, or none, is in force.",
    ["namespace"],
)
CHARGE_DELAY = Histogram(
    "leasehold_budget_charge_delay_seconds",
    "How much later than due GPU time was charged.",
    buckets=(1, 5, 15, 60, 300, 900, 3600),
)
RUN_TIME_RATIO = Histogram(
    "leasehold_run_time_ratio",
    "How long pods ran, divided by how long they were expected to, by their author or as learned.",
    ["source"],
    buckets=(0.1, 0.25, 0.5, 0.8, 1, 1.25, 2, 4, 10),
)
VIOLATIONS = Counter(
    "leasehold_ledger_invariant_violations", "Violated invariants of the accounts.", ["kind"]
)
for _kind in ("account-damaged", "clock-ahead", "ended-before-charged", "journal-cut"):
    VIOLATIONS.labels(_kind)  # 0 from the start: Prometheus sees no increase in a new series
IGNORED_REPORTS = Counter(
    "leasehold_budget_ignored_reports", "Usage reports of GPUSharing's sidecars, which are ignored."
)


def set_balance(balance: Balance) -> None:
    name = balance.namespace
    USED.labels(name).set(balance.used_units / UNITS_PER_GPU_SECOND)
    INVALID.labels(name).set(int(bool(balance.problem)))
    CURRENT_RATE.labels(name).set(balance.current_rate_milli_gpu / 1000)
    if balance.remaining_units is not None:
        REMAINING.labels(name).set(balance.remaining_units / UNITS_PER_GPU_SECOND)
    else:
        REMAINING.remove_by_labels({"namespace": name})
    for state in BudgetState:
        STATE.labels(name, state).set(int(state is balance.state))


def remove_balance(namespace: Namespace) -> None:
    for gauge in (REMAINING, USED, CURRENT_RATE, STATE, INVALID):
        gauge.remove_by_labels({"namespace": namespace})
