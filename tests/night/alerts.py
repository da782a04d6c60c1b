"""Which alerts of the rules fire for samples of /metrics; pure.

Of PromQL, this reads what our alerts use: one metric with matchers, `rate` or `increase` of it
since the samples before, `sum` or `max`, perhaps by labels, a comparison with a number, and
`unless`. Other expressions are not evaluated.
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).parents[2] / "k8s" / "monitoring" / "rules.yaml"
_EXPRESSION = re.compile(
    r"(?:(?P<aggregation>sum|max)(?: by \((?P<by>[^)]*)\))? ?\()?"
    r"(?:(?P<change>rate|increase)\()?(?P<metric>\w+)(?:\{(?P<matchers>[^}]*)\})?(?:\[\d+m\])?\)*"
    r"(?P<left> - time\(\))? (?P<comparison>==|>|<) (?P<limit>[\d.* ]*[\d.])"
    r"(?: unless on \(\) max\((?P<unless>\w+)\) > 0)?"
)
_MATCHER = re.compile(r'(\w+)(=~|!=|=)"([^"]*)"')
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """What all processes export at one time."""

    at: float
    """Unix seconds."""
    samples: Mapping[tuple[str, Labels], float]
    """By name and sorted labels."""


def alerts() -> dict[str, dict[str, Any]]:
    """Return the alerts of the rules by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def firing(expressions: Mapping[str, str], before: Scrape, now: Scrape) -> list[str]:
    """Return the names of expressions whose value fires.

    >>> begin = Scrape(at=0, samples={("leasehold_placer_nodes", ()): 2.0})
    >>> later = Scrape(at=9, samples={("leasehold_placer_nodes", ()): 0.0})
    >>> firing({"LeaseholdPlacerWithoutNodes": "leasehold_placer_nodes == 0"}, begin, later)
    ['LeaseholdPlacerWithoutNodes']
    """
    return [
        name
        for name, expression in expressions.items()
        if (form := _EXPRESSION.fullmatch(expression)) and _fires(form, before, now)
    ]


def is_evaluated(expression: str) -> bool:
    """Return whether `firing` can read an expression."""
    return _EXPRESSION.fullmatch(expression) is not None


def _fires(form: re.Match[str], before: Scrape, now: Scrape) -> bool:
    if form["unless"] and any(
        value > 0 for (name, _), value in now.samples.items() if name == form["unless"]
    ):
        return False
    compare = _COMPARISONS[form["comparison"]]
    limit = prod(float(factor) for factor in form["limit"].split("*"))
    values = _values(form, before, now)
    return any(compare(value, limit) for value in _aggregated(form, values))


def _values(form: re.Match[str], before: Scrape, now: Scrape) -> Iterator[tuple[Labels, float]]:
    matchers = _MATCHER.findall(form["matchers"] or "")
    for (name, labels), value in now.samples.items():
        if name != form["metric"] or not _matches(dict(labels), matchers):
            continue
        if form["change"]:
            increase = max(0.0, value - before.samples.get((name, labels), 0.0))
            passed_s = max(now.at - before.at, 1.0) if form["change"] == "rate" else 1.0
            yield labels, increase / passed_s
        else:
            yield labels, value - now.at if form["left"] else value


def _matches(labels: Mapping[str, str], matchers: Sequence[tuple[str, str, str]]) -> bool:
    for label, kind, text in matchers:
        value = labels.get(label, "")
        if kind == "=~" and not re.fullmatch(text, value):
            return False
        if kind != "=~" and (value == text) is (kind == "!="):
            return False
    return True


def _aggregated(form: re.Match[str], values: Iterable[tuple[Labels, float]]) -> list[float]:
    if not form["aggregation"]:
        return [value for _, value in values]
    names = {name.strip() for name in (form["by"] or "").split(",")}
    groups: dict[Labels, list[float]] = {}
    for labels, value in values:
        key = tuple(pair for pair in labels if pair[0] in names)
        groups.setdefault(key, []).append(value)
    combine = sum if form["aggregation"] == "sum" else max
    return [combine(group) for group in groups.values()]
