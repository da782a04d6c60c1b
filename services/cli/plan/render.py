"""Forecasts and plans of moves, as text and as JSON; pure.

`what-if --json`: {"pods": [{"origin", "pod", "node", "shares": [SHARE], "refusal", "room": null or
{"node", "leases": [{"pod", "gpu_s_used"}]}}], "add_nodes": [{"like", "gpus", "count", "pods"}]}.
`defrag --json`: {"pod", "plan": null or {"node", "shares": [SHARE], "moves": [{"pod", "from", "to",
"shares": [SHARE], "running_s"}], "gpu_s_used"}, "stays": [{"pod", "reason"}]}.
SHARE: {"device", "index", "memory_mib", "cores_percent"}.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.formats import age
from services.cli.plan.moves import Move, MovePlan
from services.cli.plan.what_if import AddedNodes, Forecast, TriedOutcome
from shared.model.device import Device
from shared.model.lease import Lease, Share
from shared.model.placement import Placement, Refusal

SHOWN = 10
"""Places, and pods that are not moved, that the text lists."""
Kept = Sequence[tuple[str, str]]
"""Pods that are not moved, each with the reason."""


def forecast_text(found: Forecast) -> RenderableType:
    """Format a forecast for people."""
    lines: list[Text] = []
    for origin, members in groupby(found.outcomes, key=lambda each: each.pod.origin):
        lines += _origin_lines(origin, list(members))
    if found.waiting:
        lines += [_addition_line(added, len(found.waiting)) for added in found.added[:3]]
        if not found.added:
            lines.append(Text("more nodes of the kinds that the cluster has would not help"))
    lines.append(Text("Budgets, quotas and pods that wait already are not counted.", style="dim"))
    return Group(*lines)


def _origin_lines(origin: str, members: Sequence[TriedOutcome]) -> list[Text]:
    places = [_place(each.found) for each in members if isinstance(each.found, Placement)]
    lines = [Text(f"{origin}: {len(places)} of {len(members)} would run", style="bold")]
    lines += [Text(f"  {place}") for place in places[:SHOWN]]
    if len(places) > SHOWN:
        lines.append(Text(f"  and {len(places) - SHOWN} more; -o json lists all"))
    refusals = Counter(each.found.text for each in members if isinstance(each.found, Refusal))
    lines += [
        Text(f"  {count} would wait: {text}", style="red") for text, count in refusals.items()
    ]
    room = next((each.room for each in members if each.room), None)
    if room is not None:
        names = ", ".join(_name(lease) for lease in room.leases)
        lines.append(Text(f"  one more would run on {room.node} without {names}"))
    return lines


def _addition_line(added: AddedNodes, waiting: int) -> Text:
    nodes = "node" if added.count == 1 else "nodes"
    whom = "all" if added.pods == waiting else f"{added.pods}"
    return Text(
        f"{added.count} more {nodes} like {added.like} ({_devices_text(added.devices)}) would run "
        f"{whom} of the {waiting} that would wait"
    )


def _devices_text(devices: Iterable[Device]) -> str:
    kinds = Counter((device.model, device.memory_mib) for device in devices)
    listed = ", ".join(f"{n}x {model} of {mib} MiB" for (model, mib), n in kinds.items())
    return listed or "no GPUs"


def _place(placement: Placement) -> str:
    return f"{placement.node}: {_shares_text(placement.shares)}"


def _shares_text(shares: Iterable[Share]) -> str:
    return ", ".join(f"{share.memory_mib} MiB of GPU {share.index}" for share in shares)


def _name(lease: Lease) -> str:
    return f"{lease.namespace}/{lease.name}"


def forecast_shape(found: Forecast) -> dict[str, Any]:
    """Return the JSON form of a forecast."""
    return {
        "pods": [_outcome_shape(each) for each in found.outcomes],
        "add_nodes": [
            {
                "like": added.like,
                "gpus": [device.model for device in added.devices],
                "count": added.count,
                "pods": added.pods,
            }
            for added in found.added
        ],
    }


def _outcome_shape(each: TriedOutcome) -> dict[str, Any]:
    placement = each.found if isinstance(each.found, Placement) else None
    room = each.room
    return {
        "origin": each.pod.origin,
        "pod": each.pod.name,
        "node": placement.node if placement else "",
        "shares": _shares_shape(placement.shares if placement else ()),
        "refusal": each.found.text if isinstance(each.found, Refusal) else "",
        "room": room
        and {
            "node": room.node,
            "leases": [_name(lease) for lease in room.leases],
            "gpu_s_used": round(room.used_gpu_s, 3),
        },
    }


def _shares_shape(shares: Iterable[Share]) -> list[dict[str, Any]]:
    return [
        {
            "device": share.device,
            "index": share.index,
            "memory_mib": share.memory_mib,
            "cores_percent": share.cores_percent,
        }
        for share in shares
    ]


def moves_text(name: str, plan: MovePlan | None, kept: Kept, now: float) -> RenderableType:
    """Format a plan of moves for people."""
    lines = [f"pod         {name}"]
    if plan is None:
        lines.append("plan        none: no move of up to four pods makes room for it")
    elif not plan.moves:
        lines.append(f"plan        it fits on {plan.node} as it is")
    else:
        lines.append(f"plan        {_shares_text(plan.shares)} on {plan.node}, after these moves:")
        lines += [f"            {_move_text(move, now)}" for move in plan.moves]
        lines.append(
            "cost        each restarts, and loses what it has not saved of its part of "
            f"{plan.used_gpu_s:.0f} GPU-seconds"
        )
    lines += [f"stays       {pod}: {reason}" for pod, reason in kept[:SHOWN]]
    if len(kept) > SHOWN:
        lines.append(f"            and {len(kept) - SHOWN} more; -o json lists all")
    return Text("\n".join(lines))


def _move_text(move: Move, now: float) -> str:
    lease = move.lease
    return (
        f"{_name(lease)}, which has run for {age(now - lease.created_at)}, from {lease.node} "
        f"to {_place(move.to)}"
    )


def moves_shape(name: str, plan: MovePlan | None, kept: Kept, now: float) -> dict[str, Any]:
    """Return the JSON form of a plan of moves."""
    return {
        "pod": name,
        "plan": plan
        and {
            "node": plan.node,
            "shares": _shares_shape(plan.shares),
            "moves": [
                {
                    "pod": _name(move.lease),
                    "from": move.lease.node,
                    "to": move.to.node,
                    "shares": _shares_shape(move.to.shares),
                    "running_s": round(now - move.lease.created_at),
                }
                for move in plan.moves
            ],
            "gpu_s_used": round(plan.used_gpu_s, 3),
        },
        "stays": [{"pod": pod, "reason": reason} for pod, reason in kept],
    }
