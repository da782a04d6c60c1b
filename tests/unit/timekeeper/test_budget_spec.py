"""How GPUBudget objects are read, and that what cannot be read is named."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.timekeeper.accounts.accrual import advance, apply_update
from services.timekeeper.config.budget_sources import BudgetFile, ConfiguredBudgets, load_file
from services.timekeeper.config.budget_spec import parse_factors, parse_spec, parse_status
from services.timekeeper.report.budget_reports import budget_status
from shared.model.balance import balance
from shared.model.budget import (
    Budget,
    BudgetPolicy,
    OnExhausted,
    Period,
    PolicyType,
    WeightMode,
    minutes,
)
from shared.model.errors import RequestError
from shared.model.names import Namespace
from tests.support.timekeeper.accounts import T0, account, budget, units

TEAM = Namespace("team-a")
WHOLE = """
apiVersion: leasehold.dev/v1alpha1
kind: GPUBudget
metadata: {name: team-a}
spec:
  limitGPUMinutes: 1200
  policy: {type: fixed, window: week, timeZone: Europe/Berlin,
           rollover: {percent: 25, maxGPUMinutes: 200}}
  weightMode: sum
  warnAt: [95, 80]
  debtLimitGPUMinutes: 120
  onExhausted: deny
  onDebt: {action: evict, graceMinutes: 5}
  share: 2
"""


def item(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "leasehold.dev/v1alpha1",
        "kind": "GPUBudget",
        "metadata": {"name": "team-a"},
        "spec": spec,
    }


def test_every_field_is_read() -> None:
    assert parse_spec(TEAM, yaml.safe_load(WHOLE)["spec"]) == Budget(
        namespace=Namespace("team-a"),
        limit_units=units(1200),
        policy=BudgetPolicy(
            period=Period.WEEK,
            time_zone="Europe/Berlin",
            rollover_percent=25,
            rollover_max_units=units(200),
        ),
        weight_mode=WeightMode.SUM,
        warn_at=(80, 95),
        debt_limit_units=units(120),
        on_exhausted=OnExhausted.DENY,
        evict_on_debt=True,
        debt_grace_minutes=5,
        share=2,
    )


def test_omitted_fields_have_their_defaults() -> None:
    assert parse_spec(TEAM, {"limitGPUMinutes": 0}).limit_units == 0
    assert parse_spec(TEAM, {}) == Budget(namespace=Namespace("team-a"))
    filled = {"type": "bucket", "refillGPUMinutesPerHour": 10}
    bucket = parse_spec(TEAM, {"limitGPUMinutes": 60, "policy": filled})
    assert bucket.policy.type is PolicyType.BUCKET
    assert bucket.policy.refill_units_per_hour == units(10)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"limitGPUMinutes": -1}, "spec.limitGPUMinutes"),
        ({"limitGPUMinutes": "many"}, "'many'"),
        ({"limit": 5}, "unknown field `limit`; known fields are limitGPUMinutes, policy"),
        ({"policy": {"type": "lunar"}}, "fixed, sliding, bucket, none"),
        ({"policy": {"timeZone": "Europe/Atlantis"}}, "Europe/Atlantis"),
        ({"policy": {"timeZone": 7}}, "timeZone"),
        ({"policy": {"type": "bucket"}}, "refillGPUMinutesPerHour"),
        ({"policy": {"type": "bucket", "refillGPUMinutesPerHour": 1}}, "limitGPUMinutes"),
        ({"policy": {"refillGPUMinutesPerHour": 5}}, "go together"),
        ({"policy": {"rollover": {"percent": 101}}}, "rollover.percent"),
        ({"policy": {"type": "sliding", "lengthHours": 1, "bucketMinutes": 90}}, "lengthHours"),
        ({"policy": "fixed"}, "spec.policy: Expected `object`"),
        ({"warnAt": [0]}, "spec.warnAt"),
        ({"onDebt": {"action": "shout"}}, "onDebt.action"),
        ({"share": True}, "spec.share"),
        ({"share": 10**30}, "spec.share: Expected `int` <= 1000000"),
        ({"graceMinutes": 10**30}, "spec.graceMinutes: Expected `int` <= 525600"),
        *(
            ({"limitGPUMinutes": amount}, "spec.limitGPUMinutes")
            for amount in ("1e1000000000", "1e308", "NaN", float("inf"))
        ),
        ({"debtLimitGPUMinutes": -5}, "spec.debtLimitGPUMinutes"),
        ({"share": 0}, "spec.share"),
        ({"warnAt": [50] * 10_000}, "spec.warnAt"),
        ({"policy": {"window": "fortnight"}}, "spec.policy.window"),
        ({"policy": {"timeZone": "x" * 1_000_000}}, "spec.policy.timeZone"),
    ],
)
def test_an_invalid_field_is_refused_with_its_path(spec: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parse_spec(TEAM, spec)


def test_a_file_has_budgets_of_namespaces_and_one_for_all_others(tmp_path: Path) -> None:
    path = tmp_path / "budgets.yaml"
    everybody = item(limitGPUMinutes=5) | {"metadata": {"name": "*"}}
    path.write_text(f"{WHOLE}---\n{yaml.safe_dump(everybody)}")
    file = BudgetFile(path)
    file.load()
    configured = ConfiguredBudgets(file=file)

    assert configured.budget_of(Namespace("team-a")).share == 2
    assert configured.budget_of(Namespace("else")) == budget(5, "else")
    assert set(configured.namespaces()) == {"team-a"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is not valid YAML"),
        (f"{WHOLE}kind: Pod", "the key 'kind' is there twice"),
        ("kind: Pod", "GPUBudget"),
        (f"{WHOLE}---{WHOLE}", "defined twice"),
        (WHOLE.replace("1200", "x"), "limitGPUMinutes"),
        (WHOLE.replace("v1alpha1", "v9"), "v9"),
    ],
)
def test_an_invalid_file_is_refused_with_its_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "budgets.yaml"
    path.write_text(text)

    with pytest.raises(RequestError, match=named) as refused:
        load_file(path)

    assert str(path) in str(refused.value)


def test_a_file_that_became_unreadable_leaves_the_last_good_budgets(tmp_path: Path) -> None:
    path = tmp_path / "budgets.yaml"
    path.write_text(WHOLE)
    file = BudgetFile(path)
    file.load()
    path.write_text("{")

    with pytest.raises(RequestError):
        file.load()

    assert set(file.budgets) == {"team-a"}


@pytest.mark.parametrize("text", ["A100", "A100=x", "=2", "A100=0.0001", "A100=-1"])
def test_factors_have_three_decimals_at_most(text: str) -> None:
    assert parse_factors(("A100=2.5", "T4=0.125")) == {
        "A100": Fraction(5, 2),
        "T4": Fraction(1, 8),
    }
    with pytest.raises(RequestError, match="FACTOR"):
        parse_factors((text,))


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0.000"), (59_999, "0.000"), (60_000, "0.001"), (-90_000_000, "-1.500")],
)
def test_minutes_are_rounded_towards_zero(amount: int, text: str) -> None:
    assert minutes(amount) == text


def test_a_malformed_status_is_ignored() -> None:
    wanted = budget(10)

    strange: list[Any] = [None, [], {}, {"checkpointAt": 1}, {"checkpointAt": "x", "window": {}}]
    for status in strange:
        assert parse_status(status, wanted) is None


def test_a_written_status_is_parsed_with_the_same_window() -> None:
    wanted = budget(10)
    step = advance(account(), wanted, T0, charge_every_ms=0)
    assert step is not None
    after = apply_update(account(), step)
    copy = parse_status(budget_status(after, balance(after, wanted, T0)), wanted)

    assert copy is not None
    assert (copy.window, copy.at_ms) == (after.windows[-1], T0)
