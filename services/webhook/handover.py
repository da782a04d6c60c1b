"""Which scheduler gets a pod with GPUs: the placer, or kube-scheduler behind the extender; pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.webhook.patches import PatchOperation, add, add_label
from shared.model.names import DEFAULT_SCHEDULER, HANDED_OVER
from shared.pods.pod_view import PodView

SCHEDULER = "/spec/schedulerName"
"""Its path in patches."""
ALL_PODS = "all-pods"
"""The label's value where kube-scheduler gets all pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerChoice:
    """The operator's schedulers, by `schedulerName`."""

    placer: str = "leasehold"
    """Set on GPU pods that do not choose a scheduler."""
    served: frozenset[str] = frozenset({"leasehold"})
    """All that Leasehold serves."""
    handover: str = ""
    """That of kube-scheduler with the extender; empty: it is not installed."""
    all_pods: bool = False
    """All pods are handed over."""

    def has(self, pod: PodView) -> bool:
        """Return whether a pod names a scheduler that Leasehold serves."""
        return pod.scheduler in self.served

    def serves(self, pod: PodView) -> bool:
        """Return whether a pod has no scheduler yet, or one that Leasehold serves."""
        return self.has(pod) or pod.scheduler in {"", DEFAULT_SCHEDULER}

    def unsupported(self, pod: PodView) -> Iterator[str]:
        """Yield the fields that no installed scheduler of GPU pods supports, and what to do."""
        if not self.handover:
            for found in pod.handed_over:
                yield (
                    f"{found.path}: only kube-scheduler supports it, and the scheduler extender is "
                    "not installed: remove the field, or have an administrator install the extender"
                )

    def patches(self, pod: PodView) -> Iterator[PatchOperation]:
        """Yield the patches of an admitted pod: its scheduler, and a label with why it is that."""
        reasons = [found.row.reason for found in pod.handed_over] + [ALL_PODS] * self.all_pods
        if self.handover and reasons and pod.scheduler != self.handover:
            yield add(SCHEDULER, self.handover)
            yield add_label(pod, HANDED_OVER, reasons[0])
        elif pod.scheduler in {"", DEFAULT_SCHEDULER}:
            yield add(SCHEDULER, self.placer)
