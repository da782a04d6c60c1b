"""Forecasts and plans of moves as text; pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.formats import age
from services.cli.plan.moves import DefragView, Move
from shared.model.views.plans import PlannedShare
from shared.placing.what_if import AddedNodes, Forecast, TriedOutcome

SHOWN = 10


def forecast_text(forecast: Forecast) -> RenderableType:
    lines: list[Text] = []
    for origin, members in groupby(forecast.pods, key=lambda pod: pod.origin):
        lines += _origin_lines(origin, list(members))
    if forecast.waiting:
        lines += [_addition_line(added, len(forecast.waiting)) for added in forecast.add_nodes[:3]]
        if not forecast.add_nodes:
            lines.append(Text("more nodes of the kinds that the cluster has would not help"))
    lines.append(Text("Budgets, quotas and pods that wait already are not counted.", style="dim"))
    return Group(*lines)


def _origin_lines(origin: str, members: Sequence[TriedOutcome]) -> list[Text]:
    places = [f"{pod.node}: {shares_text(pod.shares)}" for pod in members if pod.node]
    lines = [Text(f"{origin}: {len(places)} of {len(members)} would run", style="bold")]
    lines += [Text(f"  {place}") for place in places[:SHOWN]]
    if len(places) > SHOWN:
        lines.append(Text(f"  and {len(places) - SHOWN} more; -o json lists all"))
    refusals = Counter(pod.refusal for pod in members if not pod.node)
    lines += [
        Text(f"  {count} would wait: {text}", style="red") for text, count in refusals.items()
    ]
    whose = "" if len(members) == 1 else "the last of them: "
    lines += [Text(f"  {whose}{pod.when}") for pod in members if pod.when]
    room = next((pod.room for pod in members if pod.room), None)
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
    return ", ".join(f"{share.memory_mib} MiB of GPU {share.index}" for share in shares)


def moves_text(view: DefragView) -> RenderableType:
    lines = [f"pod         {view.pod}"]
    plan = view.plan
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
    lines += [f"stays       {pod.pod}: {pod.reason}" for pod in view.stays[:SHOWN]]
    if len(view.stays) > SHOWN:
        lines.append(f"            and {len(view.stays) - SHOWN} more; -o json lists all")
    return Text("\n".join(lines))


def _move_text(move: Move) -> str:
    return (
        f"{move.pod}, which has run for {age(move.running_s)}, from {move.from_} "
        f"to {move.to}: {shares_text(move.shares)}"
    )
