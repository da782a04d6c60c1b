"""What an operator does against a fault, as docs/troubleshooting.md says it."""

from collections.abc import Awaitable, Callable

from shared.kubernetes.paths import node_path
from tests.night.stack import RUNS, Night
from tests.support.stack import running

Act = Callable[[Night], Awaitable[None]]
AUDIT_S = 90.0
RUN_S = 60.0


async def restart_program(night: Night) -> None:
    """Create the pod again, on the same GPU, which is not reset."""
    await night.sim("heal")
    await night.delete_pod(RUNS)
    await night.create_pod(RUNS)
    await night.up.until(RUNS, running, limit_s=RUN_S * night.patience)


async def reset_gpu(night: Night) -> None:
    """Cordon the GPU, delete its pod, reset it, and uncordon it."""
    await night.command("cordon", night.gpu, "--reason", "it is reset")
    await night.delete_pod(RUNS)
    await night.sim("heal")
    shown = await night.command("uncordon", night.gpu, codes=(0, 1))
    assert "gets new pods" in shown or "its agent opens it" in shown, shown


async def restart_node(night: Night) -> None:
    """Drain the node, of which the agent alone is a process here, and start it again."""
    await night.up.kube.patch_merge(node_path(night.node), {"spec": {"unschedulable": True}})
    await night.delete_pod(RUNS)
    await night.sim("heal")
    night.up.kill(f"agent-{night.node}")
    await night.up.kube.patch_merge(node_path(night.node), {"spec": {"unschedulable": False}})


def restart(*parts: str) -> Act:
    """Return the end of processes, also of those that hang: they are started again."""

    async def kill(night: Night) -> None:
        for part in parts:
            night.up.kill(part)

    return kill


async def audit(night: Night) -> None:
    """Wait until the audit finds no difference."""
    await night.up.audit(AUDIT_S * night.patience)
