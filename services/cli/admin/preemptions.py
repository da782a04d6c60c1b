"""The command `preemptions`: those in progress and recent evictions, or a dry run for a pod."""

from services.cli import terminal
from services.cli.api_client import ApiClient, NothingFoundError, RefusedError
from services.cli.commands import PreemptionsArguments
from services.cli.listing import present_list
from services.cli.terminal import program
from shared.model.quantity import timestamp
from shared.model.views.preemptions import DryRunView, PreemptionsView, PreemptionView


def preemptions(flags: PreemptionsArguments) -> int:
    api = ApiClient(flags)
    if flags.dry_run:
        return _dry_run(api, flags)
    return present_list(
        flags,
        ("in_progress", "evictions"),
        lambda: api.get("/api/v1/preemptions", PreemptionsView),
        text,
    )


def _dry_run(api: ApiClient, flags: PreemptionsArguments) -> int:
    name = f"{flags.namespace}/{flags.dry_run}"
    pod = api.server.pod(flags.namespace, flags.dry_run)
    runtime = "" if flags.min_runtime_s is None else f"{flags.min_runtime_s:g}"
    try:
        view = api.get(f"/api/v1/preemptions/{pod.pod}", DryRunView, min_runtime_s=runtime)
    except RefusedError as error:
        if error.status != 404:
            raise
        raise NothingFoundError(
            f"pod {name} does not wait for devices; `{program()} explain` shows its state"
        ) from error
    terminal.show(flags.output, view, dry_run_text)
    return 0 if view.plan or view.in_progress else 1


def dry_run_text(view: DryRunView) -> str:
    lines = [f"pod         {view.pod}"]
    if view.in_progress is not None:
        lines.append(f"in progress {_preemption_line(view.in_progress)}")
    elif view.plan is None:
        lines.append(f"plan        none: {view.reason}")
    else:
        shares = [f"{share.memory_mib} MiB of GPU {share.index}" for share in view.plan.shares]
        others = f", with {view.plan.pods - 1} pods of its gang" if view.plan.pods > 1 else ""
        where = f"{', '.join(shares)} on {view.plan.node}{others}"
        lines.append(f"plan        {where}, once these are evicted:")
        for victim in view.plan.victims:
            bare = ", no controller replaces it" if victim.bare else ""
            lines.append(
                f"            {victim.pod}: {victim.cause}, budget {victim.budget}, priority "
                f"{victim.priority}, {victim.gpu_s_lost:.0f} GPU-seconds{bare}"
            )
    lines += [f"stays       {pod.pod}: {pod.reason}" for pod in view.protected]
    if view.protected_left_out:
        lines.append(f"stays       {view.protected_left_out} more pods")
    return "\n".join(lines)


def text(view: PreemptionsView) -> str:
    lines = [f"in progress {_preemption_line(preemption)}" for preemption in view.in_progress]
    for eviction in view.evictions:
        budget = f", budget {eviction.budget}" if eviction.budget else ""
        lines.append(
            f"{timestamp(eviction.at)}  {eviction.outcome} {eviction.pod} on {eviction.node} "
            f"for {eviction.beneficiary or 'no pod'}: {eviction.cause}{budget}"
        )
    return "\n".join(lines) or "no preemption in progress, and no eviction in the last day"


def _preemption_line(preemption: PreemptionView) -> str:
    victims = ", ".join(victim.pod for victim in preemption.victims)
    not_before = f", not before {timestamp(preemption.evict_at)}" if preemption.evict_at else ""
    beneficiary = preemption.beneficiary or "no pod"
    return f"for {beneficiary}: {preemption.stage}{not_before}: {victims}"
