"""Preemptions, evictions and dry runs, as text and as JSON; pure.

`preemptions --json`: {"in_progress": [PREEMPTION], "evictions": [{"at", "pod", "uid", "node",
"devices", "cause", "budget", "outcome", "beneficiary", "event"}]}; PREEMPTION is {"id",
"beneficiary", "stage", "evict_at", "victims": [{"pod", "outcome"}]}.
`preemptions --dry-run --json`: {"pod", "plan": null or {"node", "shares": [{"device", "index",
"memory_mib"}], "victims": [{"pod", "cause", "budget", "priority", "bare", "overdraft_permille",
"gpu_s_lost", "devices"}]}, "reason", "in_progress": null or PREEMPTION, "protected": [{"pod",
"reason"}]}.
"""

from dataclasses import dataclass
from typing import Any

from services.binder.preempt.plan import NoPlan, PreemptionPlan
from services.cli.formats import timestamp
from shared.model.preemption import EvictionRecord, Preemption, PreemptionState


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The preemption that a binder would plan for one pod."""

    pod: str
    found: PreemptionPlan | NoPlan
    in_progress: Preemption | None = None
    protected: tuple[tuple[str, str], ...] = ()
    """Pods that rank below this one and are not evicted, each with the reason."""


def dry_run_shape(dry_run: DryRun) -> dict[str, Any]:
    """Return the JSON form of a dry run."""
    found, in_progress = dry_run.found, dry_run.in_progress
    return {
        "pod": dry_run.pod,
        "plan": _plan_shape(found) if isinstance(found, PreemptionPlan) else None,
        "reason": found.reason if isinstance(found, NoPlan) else "",
        "in_progress": None if in_progress is None else _preemption_shape(in_progress),
        "protected": [{"pod": pod, "reason": reason} for pod, reason in dry_run.protected],
    }


def _plan_shape(found: PreemptionPlan) -> dict[str, Any]:
    return {
        "node": found.node,
        "shares": [
            {"device": each.device, "index": each.index, "memory_mib": each.memory_mib}
            for each in found.shares
        ],
        "victims": [
            {
                "pod": f"{each.lease.namespace}/{each.lease.name}",
                "cause": str(each.victim.cause),
                "budget": each.victim.budget,
                "priority": each.victim.priority,
                "bare": each.tier.unowned,
                "overdraft_permille": -each.tier.overdraft,
                "gpu_s_lost": round(each.used_gpu_s, 3),
                "devices": list(each.victim.devices),
            }
            for each in found.victims
        ],
    }


def dry_run_text(dry_run: DryRun) -> str:
    """Format a dry run for people."""
    found, lines = dry_run.found, [f"pod         {dry_run.pod}"]
    if dry_run.in_progress is not None:
        lines.append(f"in progress {_preemption_line(dry_run.in_progress)}")
    elif isinstance(found, NoPlan):
        lines.append(f"plan        none: {found.reason}")
    else:
        shares = ", ".join(f"{each.memory_mib} MiB of GPU {each.index}" for each in found.shares)
        lines.append(f"plan        {shares} on {found.node}, once these are evicted:")
        for each in found.victims:
            bare = ", no controller replaces it" if each.tier.unowned else ""
            lines.append(
                f"            {each.lease.namespace}/{each.lease.name}: {each.victim.cause}, "
                f"budget {each.victim.budget}, priority {each.victim.priority}, "
                f"{each.used_gpu_s:.0f} GPU-seconds{bare}"
            )
    lines += [f"stays       {pod}: {reason}" for pod, reason in dry_run.protected]
    return "\n".join(lines)


def shape(state: PreemptionState) -> dict[str, Any]:
    """Return the JSON form of the preemptions in progress and the evictions."""
    return {
        "in_progress": [_preemption_shape(each.preemption) for each in state.open],
        "evictions": [_eviction_shape(each) for each in state.evictions],
    }


def _preemption_shape(preemption: Preemption) -> dict[str, Any]:
    return {
        "id": preemption.id,
        "beneficiary": _beneficiary(preemption),
        "stage": str(preemption.stage),
        "evict_at": timestamp(preemption.evict_at) if preemption.evict_at else None,
        "victims": [
            {"pod": f"{each.namespace}/{each.name}", "outcome": each.outcome}
            for each in preemption.victims
        ],
    }


def _eviction_shape(record: EvictionRecord) -> dict[str, Any]:
    return {
        "at": timestamp(record.at),
        "pod": f"{record.namespace}/{record.name}",
        "uid": record.pod,
        "node": record.node,
        "devices": list(record.devices),
        "cause": str(record.cause),
        "budget": record.budget,
        "outcome": str(record.outcome),
        "beneficiary": f"{record.for_namespace}/{record.for_name}" if record.for_pod else "",
        "event": record.event,
    }


def text(state: PreemptionState) -> str:
    """Format the preemptions in progress and the evictions of the last day for people."""
    lines = [f"in progress {_preemption_line(each.preemption)}" for each in state.open]
    for each in state.evictions:
        beneficiary = f"{each.for_namespace}/{each.for_name}" if each.for_pod else "no pod"
        budget = f", budget {each.budget}" if each.budget else ""
        lines.append(
            f"{timestamp(each.at)}  {each.outcome} {each.namespace}/{each.name} on {each.node} "
            f"for {beneficiary}: {each.cause}{budget}"
        )
    return "\n".join(lines) or "no preemption in progress, and no eviction in the last day"


def _preemption_line(preemption: Preemption) -> str:
    victims = ", ".join(f"{each.namespace}/{each.name}" for each in preemption.victims)
    not_before = f", not before {timestamp(preemption.evict_at)}" if preemption.evict_at else ""
    beneficiary = _beneficiary(preemption) or "no pod"
    return f"for {beneficiary}: {preemption.stage}{not_before}: {victims}"


def _beneficiary(preemption: Preemption) -> str:
    return f"{preemption.wanted.namespace}/{preemption.wanted.name}" if preemption.wanted else ""
