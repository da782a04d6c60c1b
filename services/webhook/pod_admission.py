"""What a stage of admission gets, and what it returns; pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from shared.dialects.dialect import Rules
from shared.dialects.protected_paths import HOST_PATHS
from shared.dialects.vocabulary import LEFT_ALONE
from shared.model.bounds import cut
from shared.model.budgets.quota import Quota
from shared.model.change import Hint
from shared.model.denial import Denial
from shared.model.errors import RequestError
from shared.model.events.pod_events import BudgetChanged
from shared.model.names import DEFAULT_SCHEDULER
from shared.model.requests.claim import EXTENDED_RESOURCES
from shared.model.requests.request import LEAST_SHARE_MIB
from shared.pods.manifest_patches import PatchOperation
from shared.pods.pod_view import PodContainer, PodView

FORBIDDEN = "Forbidden"
BAD_REQUEST = "BadRequest"
INVALID = "Invalid"
TOO_MANY = "TooManyRequests"
STATUSES = {BAD_REQUEST: 400, FORBIDDEN: 403, INVALID: 422, TOO_MANY: 429}
"""A denial's code is the reason of a Kubernetes Status."""
MAX_SHOWN = 10
"""A pod may have thousands of reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    patches: tuple[PatchOperation, ...] = ()
    warnings: tuple[Hint, ...] = ()
    pod: PodView | None = None
    """As later stages see it; None changes nothing."""


Outcome = Denial | Changes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerChoice:
    """By `schedulerName`."""

    placer: str = "leasehold"
    served: frozenset[str] = frozenset({"leasehold"})
    handover: str = ""
    """The kube-scheduler with the extender, or empty."""
    all_pods: bool = False
    """All pods are handed over."""

    def has(self, pod: PodView) -> bool:
        return pod.scheduler in self.served

    def serves(self, pod: PodView) -> bool:
        return self.has(pod) or (
            pod.scheduler in {"", DEFAULT_SCHEDULER} and LEFT_ALONE not in pod.labels.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    schedulers: SchedulerChoice = field(default_factory=SchedulerChoice)
    resource_names: Mapping[str, str] = field(default_factory=dict)
    """Other names of resources, and the name that each stands for."""
    rules: Rules = field(default_factory=Rules)
    vendor_messages: frozenset[str] = frozenset()
    """These dialects deny a pod in the words of their own webhooks."""
    runtime_class: str = ""
    """Of GPU pods without one."""
    in_budget_class: str = ""
    """Of GPU pods while their namespace has budget left; empty sets none."""
    out_of_budget_class: str = ""
    allow_privileged: bool = False
    """Privileged containers see every device whatever they lease."""
    allow_env_from: bool = False
    """With CDI, `envFrom` of containers with GPUs needs no prefix."""
    host_paths: tuple[str, ...] = HOST_PATHS
    """GPU pods may mount these directories of nodes."""
    claims: bool = False
    """ResourceClaims may be for GPUs: `pod_policy` applies to the containers that use them."""
    allow_larger_requests: bool = False
    """A pod may wait for a larger device."""
    least_share_mib: int = LEAST_SHARE_MIB
    """Smaller requests cause a warning."""
    quota: Quota | None = None
    isolation: str = ""
    """What the namespace demands to hold shares."""


@dataclass(frozen=True, slots=True)
class DeviceMaximum:
    memory_mib: int
    memory_units: int


@dataclass(frozen=True, kw_only=True)
class PodAdmission:
    """For example, `PodAdmission(pod=pod, policy=AdmissionPolicy())`, where no device is known."""

    pod: PodView
    policy: AdmissionPolicy
    old: PodView | None = None
    """Before an update."""
    budget: BudgetChanged | None = None
    largest: DeviceMaximum | None = None
    default_class: str = ""
    """The API server sets the cluster's default before it calls webhooks: the pod has probably not
    chosen it."""
    exempt: bool = False
    """Administrators have exempted the namespace from `pod_policy`."""

    @cached_property
    def containers(self) -> Sequence[PodContainer]:
        if self.old is None:
            return self.pod.containers
        before = {container.name for container in self.old.containers}
        return [
            container
            for container in self.pod.containers
            if container.ephemeral and container.name not in before
        ]

    @cached_property
    def gpu_containers(self) -> Sequence[PodContainer]:
        return [container for container in self.containers if self.holds_gpu(container)]

    @cached_property
    def gpu_containers_of_pod(self) -> Sequence[PodContainer]:
        return [container for container in self.pod.containers if self.holds_gpu(container)]

    @cached_property
    def leased_containers(self) -> Sequence[PodContainer]:
        if not self.policy.schedulers.serves(self.pod):
            return ()
        return [container for container in self.pod.containers if container.requests_gpu]

    @property
    def is_leased(self) -> bool:
        return bool(self.leased_containers)

    def uses_claims(self, container: PodContainer) -> bool:
        """By a ResourceClaim, its own or a scheduler's."""
        return self.policy.claims and (
            container.has_claims
            or any(name.startswith(EXTENDED_RESOURCES) for name in container.amounts)
        )

    def holds_gpu(self, container: PodContainer) -> bool:
        return container.requests_gpu or self.uses_claims(container)


def denial_of(reasons: Iterable[Hint]) -> Denial | None:
    shown = tuple(islice(reasons, MAX_SHOWN))
    text = cut("; ".join(reason.text for reason in shown))
    changes = tuple(change for reason in shown for change in reason.changes)
    return Denial(FORBIDDEN, text, changes) if text else None


def denial_by(error: RequestError, code: str) -> Denial:
    return Denial(code, str(error), error.changes)
