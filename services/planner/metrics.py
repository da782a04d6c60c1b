"""The planner's Prometheus metrics."""

from prometheus_client import Counter, Histogram

PLANS = Counter(
    "leasehold_planner_preemptions",
    "Preemptions planned, by outcome: stored, or outdated (the devices were taken meanwhile).",
    ["outcome"],
)
PLANNING = Histogram(
    "leasehold_planner_round_seconds",
    "Duration of a round of plans of preemptions, with reading the cluster.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
for _outcome in ("stored", "outdated"):
    PLANS.labels(_outcome)  # starts at 0, so that the first one is an increase


def count_plan(outcome: str) -> None:
    PLANS.labels(outcome).inc()
