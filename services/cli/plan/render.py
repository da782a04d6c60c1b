"""Forecasts and plans of moves as text; pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.formats import FittedTable, age
from services.cli.plan.moves import DefragView, Move
from services.cli.plan.replay import Replay
from shared.model.views import PlannedShare
from shared.placing.what_if import AddedNodes, Forecast, TriedOutcome

INTERVALS = 12


def replay_shape(results: Sequence[Replay]) -> dict[str, Any]:
    """Return the JSON form of replays."""
    return {"policies": [_policy_shape(result) for result in results]}


def _policy_shape(result: Replay) -> dict[str, Any]:
    waits, gang_waits = sorted(result.waits_s), sorted(result.gang_waits_s)
    promises = [each for each in result.promises if each.enforced]
    errors = sorted(abs(each.late_s) for each in result.promises)
    means = result.means(*result.arrivals_s)
    return {
        "policy": result.policy.value,
        "terms": result.terms.value,
        "gpus": result.gpus,
        "idle_gpus": round(means.idle_gpus, 2),
        "idle_gpus_while_waiting": round(means.idle_while_waiting, 2),
        "started": len(waits),
        "waited": sum(wait > 0 for wait in waits) + result.never,
        "wait_s": {
            "mean": round(fmean(waits or [0.0]), 1),
            "p50": _quantile(waits, 0.5),
            "p95": _quantile(waits, 0.95),
            "p99": _quantile(waits, 0.99),
            "max": _quantile(waits, 1),
        },
        "gang_wait_s": {
            "started": len(gang_waits),
            "mean": round(fmean(gang_waits or [0.0]), 1),
            "p95": _quantile(gang_waits, 0.95),
        },
        "starts": {
            "promised": len(promises),
            "promises_kept": sum(each.late_s <= 0 for each in promises),
            "expected": len(errors) - len(promises),
            "error_s_p50": _quantile(errors, 0.5),
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
    table = FittedTable(
        *("POLICY", "TERMS", "GPUS IDLE", "WHILE PODS WAIT", "STARTED", "WAITED", "MEAN", "P50"),
        *("P99", "MAX", "GANGS", "GANG P95", "KEPT", "NEVER"),
        least=("MAX", "P50", "WAITED", "STARTED", "GANGS", "KEPT", "GANG P95", "TERMS"),
    )
    for shape in shapes:
        waits = shape["wait_s"]
        table.add_row(
            *(shape["policy"], shape["terms"]),
            f"{shape['idle_gpus']:.1f}",
            f"{shape['idle_gpus_while_waiting']:.1f}",
            *(str(shape[name]) for name in ("started", "waited")),
            *(age(waits[name]) for name in ("mean", "p50", "p99", "max")),
            *(str(shape["gang_wait_s"]["started"]), age(shape["gang_wait_s"]["p95"])),
            f"{shape['starts']['promises_kept']}/{shape['starts']['promised']}",
            str(shape["never"]),
        )
    lines: list[RenderableType] = [Text(title, style="bold"), table, Text(), _timeline(shapes)]
    if shapes[0]["impossible"]:
        text = f"left out, as no node fits them even when idle: {shapes[0]['impossible']} pods"
        lines.append(Text(text, style="red"))
    return Group(*lines)


def _timeline(shapes: Sequence[dict[str, Any]]) -> RenderableType:
    titles = (
        f"{title}, {shape['policy']}" + f", {shape['terms']}" * (shape["terms"] != "none")
        for shape in shapes
        for title in ("IDLE", "PODS WAITING")
    )
    table = FittedTable("FROM", *titles)
    for rows in zip(*(shape["intervals"] for shape in shapes), strict=True):
        figures = (
            text for row in rows for text in (f"{row['idle_gpus']:.1f}", f"{row['waiting']:.1f}")
        )
        table.add_row(age(rows[0]["from_s"]), *figures)
    return table


SHOWN = 10
"""Places, and pods that are not moved, that the text lists."""


def forecast_text(found: Forecast) -> RenderableType:
    """Format a forecast for people."""
    lines: list[Text] = []
    for origin, members in groupby(found.pods, key=lambda each: each.origin):
        lines += _origin_lines(origin, list(members))
    if found.waiting:
        lines += [_addition_line(added, len(found.waiting)) for added in found.add_nodes[:3]]
        if not found.add_nodes:
            lines.append(Text("more nodes of the kinds that the cluster has would not help"))
    lines.append(Text("Budgets, quotas and pods that wait already are not counted.", style="dim"))
    return Group(*lines)


def _origin_lines(origin: str, members: Sequence[TriedOutcome]) -> list[Text]:
    places = [f"{each.node}: {shares_text(each.shares)}" for each in members if each.node]
    lines = [Text(f"{origin}: {len(places)} of {len(members)} would run", style="bold")]
    lines += [Text(f"  {place}") for place in places[:SHOWN]]
    if len(places) > SHOWN:
        lines.append(Text(f"  and {len(places) - SHOWN} more; -o json lists all"))
    refusals = Counter(each.refusal for each in members if not each.node)
    lines += [
        Text(f"  {count} would wait: {text}", style="red") for text, count in refusals.items()
    ]
    whose = "" if len(members) == 1 else "the last of them: "
    lines += [Text(f"  {whose}{each.when}") for each in members if each.when]
    room = next((each.room for each in members if each.room), None)
    if room is not None:
        names = ", ".join(room.leases)
        lines.append(Text(f"  one more would run on {room.node} without {names}"))
    return lines


def _addition_line(added: AddedNodes, waiting: int) -> Text:
    nodes = "node" if added.count == 1 else "nodes"
    whom = "all" if added.pods == waiting else f"{added.pods}"
    kinds = Counter(zip(added.gpus, added.memory_mib, strict=True))
    devices = ", ".join(f"{n}x {model} of {mib} MiB" for (model, mib), n in kinds.items())
    return Text(
        f"{added.count} more {nodes} like {added.like} ({devices or 'no GPUs'}) would run "
        f"{whom} of the {waiting} that would wait"
    )


def shares_text(shares: Iterable[PlannedShare]) -> str:
    """Format what a pod would get."""
    return ", ".join(f"{share.memory_mib} MiB of GPU {share.index}" for share in shares)


def moves_text(found: DefragView) -> RenderableType:
    """Format a plan of moves for people."""
    lines, plan = [f"pod         {found.pod}"], found.plan
    if plan is None:
        lines.append("plan        none: no move of up to four pods makes room for it")
    elif not plan.moves:
        lines.append(
            f"plan        none: {plan.node} has room for it; `leasehold explain` says why it waits"
        )
    else:
        lines.append(f"plan        {shares_text(plan.shares)} on {plan.node}, after these moves:")
        lines += [f"            {_move_text(move)}" for move in plan.moves]
        lines.append(
            "cost        each restarts, and loses what it has not saved of its part of "
            f"{plan.gpu_s_used:.0f} GPU-seconds"
        )
    lines += [f"stays       {each.pod}: {each.reason}" for each in found.stays[:SHOWN]]
    if len(found.stays) > SHOWN:
        lines.append(f"            and {len(found.stays) - SHOWN} more; -o json lists all")
    return Text("\n".join(lines))


def _move_text(move: Move) -> str:
    return (
        f"{move.pod}, which has run for {age(move.running_s)}, from {move.from_} "
        f"to {move.to}: {shares_text(move.shares)}"
    )
