"""The binder's settings."""

from dataclasses import dataclass
from pathlib import Path

from services.binder.preempt.rules import PreemptionRules, violations_of
from shared.runtime.settings import LedgerSettings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class BinderSettings(LedgerSettings):
    """What the binder is told."""

    kubeconfig: Path | None = setting(
        None, "kubeconfig; default: $KUBECONFIG, in-cluster, ~/.kube/config"
    )
    api_concurrency: int = setting(32, "Bindings under way at once")
    api_timeout_s: float = setting(
        5.0, "seconds after which a request to the API server is given up"
    )
    events_per_s: float = setting(50.0, "core/v1 Events written per second in the long run")
    preemption: bool = setting(True, "take leases back: over budget, or of lower priority")
    preemption_notice_s: float = setting(30.0, "seconds between telling a pod and evicting it")
    preemption_min_runtime_s: float = setting(600.0, "seconds that every lease may last at least")
    preemption_cooldown_s: float = setting(
        600.0, "seconds for which the owner of an evicted pod is left alone; doubles each time"
    )
    preemption_per_namespace_hour: int = setting(6, "evictions of one namespace's pods in an hour")
    preemption_per_minute: int = setting(30, "evictions in a minute, all namespaces together")

    evict_violators: tuple[str, ...] = setting(
        (), "violations for which a pod is evicted, with commas, of GpuUsedWithoutLease, "
        "GpuMemoryOverLease, GpuLimitTampered, GpuIsolationLost; default: none"
    )  # fmt: skip
    evict_violators_spare: tuple[str, ...] = setting(
        ("kube-system", "leasehold-system"), "namespaces whose pods are not evicted for that"
    )

    @property
    def rules(self) -> PreemptionRules:
        """The limits of preemption."""
        return PreemptionRules(
            notice_s=self.preemption_notice_s,
            min_runtime_s=self.preemption_min_runtime_s,
            cooldown_s=self.preemption_cooldown_s,
            per_namespace_hour=self.preemption_per_namespace_hour,
            per_minute=self.preemption_per_minute,
            violations=violations_of(self.evict_violators),
            spared=frozenset(self.evict_violators_spare),
        )
