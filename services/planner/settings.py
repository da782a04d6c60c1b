"""The planner's settings."""

from dataclasses import dataclass, fields

from services.planner.rules import PreemptionRules
from shared.model.errors import RequestError
from shared.model.events.node_events import ViolationReason
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from shared.runtime.settings import ApiServerSettings, LedgerSettings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings(ApiServerSettings, LedgerSettings):
    api_timeout_s: float = setting(
        5.0, "timeout of a request to the API server, in seconds", at_least=0.01
    )
    plan_starts_after_s: float = setting(
        60.0,
        "seconds for which a pod waits until its start is planned and GPUs are reserved for it; "
        "the start of a gang is planned at once; 0 turns planning off",
        at_least=0,
    )
    planned_starts: int = setting(
        1,
        "pods and gangs whose starts are planned at once: so many are promised when they start, "
        "and the more there are, the longer do small pods wait",
        at_least=1,
    )
    preemption: bool = setting(
        True, "preempt pods of namespaces over budget, and pods of lower priority"
    )
    preemption_notice_s: float = setting(
        30.0, "seconds between the announcement of an eviction and the eviction"
    )
    preemption_min_runtime_s: float = setting(
        600.0, "seconds after its start in which a pod is not preempted"
    )
    preemption_cooldown_s: float = setting(
        600.0,
        "seconds in which no other pod of an evicted pod's owner is evicted; doubles each time",
    )
    preemption_per_namespace_hour: int = setting(
        6, "highest number of evictions in one namespace in an hour"
    )
    preemption_per_minute: int = setting(
        30, "highest number of evictions in all namespaces in a minute"
    )

    evict_violators: tuple[str, ...] = setting(
        (), "violations for which a pod is evicted, separated by commas, of GpuUsedWithoutLease, "
        "GpuVisibleWithoutLease, GpuVisibleToPrivileged, "
        "GpuMemoryOverLease, GpuLimitTampered, GpuIsolationLost, GpuRegionStuck, "
        "GpuCoresNotLimited, GpuLimitMissing, GpuLimitDiffers; default: none"
    )  # fmt: skip
    evict_violators_spare: tuple[str, ...] = setting(
        ("kube-system", SYSTEM_NAMESPACE, AGENTS_NAMESPACE),
        "namespaces whose pods are not evicted for violations",
    )

    def check(self) -> None:
        for reason in self.evict_violators:
            if reason not in set(ViolationReason):
                reasons = ", ".join(ViolationReason)
                raise RequestError(f"--evict-violators must be among {reasons}, got {reason!r}")

    @property
    def rules(self) -> PreemptionRules:
        limits = {rule.name: getattr(self, rule.name) for rule in fields(PreemptionRules)}
        return PreemptionRules(**limits)
