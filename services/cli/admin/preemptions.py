"""The command `preemptions`: those in progress and recent evictions, or a dry run for a pod."""

from services.cli import terminal
from services.cli.api_client import ApiClient, NothingFoundError, RefusedError
from services.cli.commands import PreemptionsArguments
from services.cli.terminal import program
from shared.model.preemption import DryRunView, PreemptionsView, PreemptionView
from shared.model.quantity import timestamp


def preemptions(flags: PreemptionsArguments) -> int:
    """Show the plan for a pod, or the preemptions in progress and the evictions of the last day."""
    api = ApiClient(flags)
    if flags.dry_run:
        return _dry_run(api, flags)
    return terminal.present(flags, lambda: api.get("/api/v1/preemptions", PreemptionsView), text)


def _dry_run(api: ApiClient, flags: PreemptionsArguments) -> int:
    name = f"{flags.namespace}/{flags.dry_run}"
    pod = api.server.pod(flags.namespace, flags.dry_run)
    runtime = "" if flags.min_runtime_s is None else f"{flags.min_runtime_s:g}"
    try:
        found = api.get(f"/api/v1/preemptions/{pod.pod}", DryRunView, min_runtime_s=runtime)
    except RefusedError as error:
        if error.status != 404:
            raise
        raise NothingFoundError(
            f"pod {name} does not wait for devices; `{program()} explain` shows its state"
        ) from error
    terminal.show(flags.output, found, dry_run_text)
    return 0 if found.plan or found.in_progress else 1


def dry_run_text(found: DryRunView) -> str:
    """Format a dry run for people."""
    lines = [f"pod         {found.pod}"]
    if found.in_progress is not None:
        lines.append(f"in progress {_preemption_line(found.in_progress)}")
    elif found.plan is None:
        lines.append(f"plan        none: {found.reason}")
    else:
        shares = [f"{each.memory_mib} MiB of GPU {each.index}" for each in found.plan.shares]
        where = f"{', '.join(shares)} on {found.plan.node}"
        lines.append(f"plan        {where}, once these are evicted:")
        for each in found.plan.victims:
            bare = ", no controller replaces it" if each.bare else ""
            lines.append(
                f"            {each.pod}: {each.cause}, budget {each.budget}, priority "
                f"{each.priority}, {each.gpu_s_lost:.0f} GPU-seconds{bare}"
            )
    lines += [f"stays       {each.pod}: {each.reason}" for each in found.protected]
    if found.protected_left_out:
        lines.append(f"stays       {found.protected_left_out} more pods")
    return "\n".join(lines)


def text(view: PreemptionsView) -> str:
    """Format the preemptions in progress and the evictions of the last day for people."""
    lines = [f"in progress {_preemption_line(each)}" for each in view.in_progress]
    for each in view.evictions:
        budget = f", budget {each.budget}" if each.budget else ""
        lines.append(
            f"{timestamp(each.at)}  {each.outcome} {each.pod} on {each.node} "
            f"for {each.beneficiary or 'no pod'}: {each.cause}{budget}"
        )
    return "\n".join(lines) or "no preemption in progress, and no eviction in the last day"


def _preemption_line(preemption: PreemptionView) -> str:
    victims = ", ".join(each.pod for each in preemption.victims)
    not_before = f", not before {timestamp(preemption.evict_at)}" if preemption.evict_at else ""
    beneficiary = preemption.beneficiary or "no pod"
    return f"for {beneficiary}: {preemption.stage}{not_before}: {victims}"
