"""What policies made of a trace, as text and as JSON; pure.

`replay --json`: {"policies": [{"policy", "gpus", "idle_gpus", "idle_gpus_while_waiting", "started",
"waited", "wait_s": {"mean", "p50", "p99", "max"}, "never", "impossible", "intervals": [{"from_s",
"idle_gpus", "idle_gpus_while_waiting", "waiting"}]}]}. Amounts are means from the first to the last
arrival, and in each of the equal intervals of that time; `waiting` counts pods without GPUs, too.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.formats import age, new_table
from services.cli.plan.replay import Replay

INTERVALS = 12


def replay_shape(results: Sequence[Replay]) -> dict[str, Any]:
    """Return the JSON form of replays."""
    return {"policies": [_policy_shape(result) for result in results]}


def _policy_shape(result: Replay) -> dict[str, Any]:
    waits = sorted(result.waits_s)
    means = result.means(*result.arrivals_s)
    return {
        "policy": result.policy.value,
        "gpus": result.gpus,
        "idle_gpus": round(means.idle_gpus, 2),
        "idle_gpus_while_waiting": round(means.idle_while_waiting, 2),
        "started": len(waits),
        "waited": sum(wait > 0 for wait in waits) + result.never,
        "wait_s": {
            "mean": round(fmean(waits or [0.0]), 1),
            "p50": _quantile(waits, 0.5),
            "p99": _quantile(waits, 0.99),
            "max": _quantile(waits, 1),
        },
        "never": result.never,
        "impossible": result.impossible,
        "intervals": _intervals(result),
    }


def _quantile(ordered: Sequence[float], part: float) -> float:
    return round(ordered[int(part * (len(ordered) - 1))], 1) if ordered else 0.0


def _intervals(result: Replay) -> list[dict[str, float]]:
    begin_s, end_s = result.arrivals_s
    length_s = (end_s - begin_s) / INTERVALS
    found = []
    for number in range(INTERVALS):
        from_s = begin_s + number * length_s
        means = result.means(from_s, from_s + length_s)
        found.append(
            {
                "from_s": round(from_s - begin_s, 1),
                "idle_gpus": round(means.idle_gpus, 2),
                "idle_gpus_while_waiting": round(means.idle_while_waiting, 2),
                "waiting": round(means.waiting, 2),
            }
        )
    return found


def replay_text(results: Sequence[Replay]) -> RenderableType:
    """Format replays for people."""
    shapes = [_policy_shape(result) for result in results]
    begin_s, end_s = results[0].arrivals_s
    title = f"{shapes[0]['gpus']} GPUs, pods arrive for {age(end_s - begin_s)}"
    table = new_table(
        *("POLICY", "GPUS IDLE", "WHILE PODS WAIT", "STARTED", "WAITED", "MEAN", "P50", "P99"),
        *("MAX", "NEVER"),
    )
    for shape in shapes:
        waits = shape["wait_s"]
        table.add_row(
            shape["policy"],
            f"{shape['idle_gpus']:.1f}",
            f"{shape['idle_gpus_while_waiting']:.1f}",
            *(str(shape[name]) for name in ("started", "waited")),
            *(age(waits[name]) for name in ("mean", "p50", "p99", "max")),
            str(shape["never"]),
        )
    lines = [Text(title, style="bold"), table, Text(), _timeline(shapes)]
    if shapes[0]["impossible"]:
        text = f"left out, as no node fits them even when idle: {shapes[0]['impossible']} pods"
        lines.append(Text(text, style="red"))
    return Group(*lines)


def _timeline(shapes: Sequence[dict[str, Any]]) -> RenderableType:
    titles = (
        title
        for shape in shapes
        for title in (f"IDLE, {shape['policy']}", f"PODS WAITING, {shape['policy']}")
    )
    table = new_table("FROM", *titles)
    for rows in zip(*(shape["intervals"] for shape in shapes), strict=True):
        figures = (
            text for row in rows for text in (f"{row['idle_gpus']:.1f}", f"{row['waiting']:.1f}")
        )
        table.add_row(age(rows[0]["from_s"]), *figures)
    return table
