"""The webhook: decides on AdmissionReviews, by the timekeeper's last report of each budget."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opentelemetry.trace import SpanKind
from prometheus_client import Counter, Gauge, Histogram

from services.webhook.admission import (
    ALL_PODS_STAGES,
    UPDATE_STAGES,
    AdmissionDecision,
    decide,
    denied,
)
from services.webhook.admission_review import (
    ReviewRequest,
    decode_request,
    encode_response,
    new_allocation,
)
from services.webhook.largest_device import LargestDevice
from services.webhook.patches import add_annotation
from services.webhook.pod_admission import INVALID, AdmissionPolicy, PodAdmission, denial_by
from shared.model.budgets.quota import ALL_NAMESPACES, Quota
from shared.model.clock import Clock, ExpiringMap
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.event import ADMISSION
from shared.model.events.pod_events import BudgetChanged, LargestDeviceReported
from shared.model.events.request_reply import ClaimLeaseReply, ClaimLeaseRequest
from shared.model.names import Namespace
from shared.pods.pod_view import decode_view
from shared.runtime import telemetry
from shared.runtime.service import handles, loops, publishes
from shared.runtime.span_attributes import NAMESPACE, POD_NAME
from shared.runtime.telemetry import REVIEW, Tracing

REVIEWS = Counter("leasehold_admission_reviews", "Admission reviews, by outcome.", ["outcome"])
REVIEW_DURATION = Histogram(
    "leasehold_admission_review_duration_seconds",
    "Time to decide on one admission review.",
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
)
CERTIFICATE_EXPIRATION = Gauge(
    "leasehold_webhook_certificate_expiration_timestamp_seconds",
    "When the certificate that the webhook serves expires.",
)
logger = logging.getLogger(__name__)

MOST_BUDGETS = 100_000
STALE_S = 120.0
"""A budget that was not reported for this long counts as not exhausted."""
PRIORITY_CLASSES_S = 60.0
"""Interval of readings of the default priority class."""
QUOTAS_S = 10.0
"""Interval of readings of GPUQuotas."""
NAMESPACES_S = 10.0
"""Interval of readings of the annotations of namespaces."""
ALLOWED = AdmissionDecision(allowed=True)

Sleep = Callable[[float], Awaitable[None]]
Review = Callable[[], AdmissionDecision]
ReadDefaultClass = Callable[[], Awaitable[str]]
ReadQuotas = Callable[[], Awaitable[Mapping[Namespace, Quota]]]
ReadIsolation = Callable[[], Awaitable[Mapping[Namespace, str]]]
LeaseClaim = Callable[[ClaimLeaseRequest], Awaitable[ClaimLeaseReply]]
"""Raises UnavailableError if no binder replies in time."""


@publishes(ClaimLeaseRequest)
@dataclass(eq=False, kw_only=True)
class Webhook:
    """Any number of replicas may run."""

    policy: AdmissionPolicy
    default_priority_class: ReadDefaultClass
    lease_claim: LeaseClaim
    read_quotas: ReadQuotas
    read_isolation: ReadIsolation
    rotate_certificate: Callable[[Sleep], Awaitable[None]]
    clock: Clock
    tracing: Tracing
    knows_callers: bool = False
    """Otherwise a review is no proof that an API server sent it, and nothing is leased because of
    it."""
    budgets: ExpiringMap[Namespace, BudgetChanged] = field(init=False)
    largest: LargestDevice = field(default_factory=LargestDevice)
    default_class: str = ""
    quotas: Mapping[Namespace, Quota] = field(default_factory=dict)
    isolation: Mapping[Namespace, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budgets = ExpiringMap(self.clock.ticks, expires_s=STALE_S, most=MOST_BUDGETS)

    @handles
    async def note_budgets(self, events: Sequence[BudgetChanged]) -> None:
        for event in events:
            self.budgets.set(event.namespace, event)

    @handles
    async def note_largest(self, events: Sequence[LargestDeviceReported]) -> None:
        for event in events:
            self.largest.note(event, self.clock.ticks())

    @loops
    async def maintain_certificate(self) -> None:
        await self.rotate_certificate(self.clock.sleep)

    @loops(every_s=PRIORITY_CLASSES_S)
    async def read_default_class(self) -> None:
        try:
            self.default_class = await self.default_priority_class()
        except RequestError as error:
            logger.warning("the default priority class is unknown: %s", error)

    @loops(every_s=QUOTAS_S)
    async def follow_quotas(self) -> None:
        try:
            self.quotas = await self.read_quotas()
        except RequestError as error:
            logger.warning("GPUQuotas cannot be read: %s", error)

    @loops(every_s=NAMESPACES_S)
    async def follow_namespaces(self) -> None:
        try:
            self.isolation = await self.read_isolation()
        except RequestError as error:
            logger.warning("namespaces cannot be read: %s", error)

    async def review(
        self,
        body: bytes,
        *,
        exempt: bool = False,
        all_pods: bool = False,
        claims: bool = False,
    ) -> bytes:
        """Raises RequestError for a body that is no AdmissionReview.

        `exempt`: administrators have exempted the namespace from `pod_policy`; `all_pods`: they
        have Leasehold place its pods without GPUs; `claims`: ResourceClaims may be for GPUs.
        """
        started = time.perf_counter()
        request = decode_request(body)
        namespace = Namespace(request.namespace or "default")
        quota = self.quotas.get(namespace) or self.quotas.get(ALL_NAMESPACES)
        isolation = self.isolation.get(namespace, "")
        policy = replace(self.policy, claims=claims, quota=quota, isolation=isolation)
        decision = ALLOWED
        review = self._review_of(request, policy, all_pods=all_pods, exempt=exempt)
        try:
            if review is not None:
                decision = review()
            elif request.is_claim_status:
                decision = await self._review_claim(request)
        except RequestError as error:
            decision = denied(denial_by(error, INVALID))
        REVIEWS.labels("allowed" if decision.allowed else "denied").inc()
        REVIEW_DURATION.observe(time.perf_counter() - started)
        return encode_response(request.uid, decision)

    def _review_of(
        self, request: ReviewRequest, policy: AdmissionPolicy, *, all_pods: bool, exempt: bool
    ) -> Review | None:
        if request.is_changed_pod:
            return lambda: _review_change(request, policy)
        if not request.is_new_pod:
            return None
        if all_pods:
            return lambda: decide(_admission(request, policy), ALL_PODS_STAGES)
        return lambda: self._review_new_pod(request, policy, exempt=exempt)

    async def _review_claim(self, request: ReviewRequest) -> AdmissionDecision:
        """The claim is not read again, which would make schedulers wait."""
        if not self.knows_callers:
            return ALLOWED
        try:
            allocation = None if request.dry_run else new_allocation(request)
        except RequestError as error:
            logger.warning("an allocation is not answered: %s", error)
            allocation = None
        if allocation is None:
            return ALLOWED
        (asked,), spans = self.tracing.start(
            "lease claim", [ClaimLeaseRequest(claim=allocation.claim)], kind=SpanKind.SERVER
        )
        fault: LeaseholdError | None = None
        try:
            decision = allocation.decide(await self.lease_claim(asked))
        except UnavailableError as error:
            decision = ALLOWED
            fault = error
        finally:
            telemetry.end(spans, fault)
        return decision

    def _review_new_pod(
        self, request: ReviewRequest, policy: AdmissionPolicy, *, exempt: bool
    ) -> AdmissionDecision:
        """Annotate the pod with the times of the review: it has no UID yet, and thus no trace."""
        started_ns = time.time_ns()
        admission = _admission(request, policy)
        pod = admission.pod
        decision = decide(
            replace(
                admission,
                budget=self.budgets.get(pod.namespace),
                largest=self.largest.now(self.clock.ticks()),
                default_class=self.default_class,
                exempt=exempt,
            )
        )
        if request.dry_run or (decision.allowed and not decision.requests_gpu):
            return decision
        if self.tracing.tracer is None:
            return decision
        ended_ns = time.time_ns()
        if not decision.allowed:
            facts = {NAMESPACE: pod.namespace, POD_NAME: pod.name}
            self.tracing.record(REVIEW, facts, started_ns, ended_ns, fault=decision.message)
            return decision
        times = f"{started_ns}-{ended_ns}"
        annotation = add_annotation(pod, decision.patches, ADMISSION, times)
        return replace(decision, patches=(*decision.patches, annotation))


def _admission(request: ReviewRequest, policy: AdmissionPolicy) -> PodAdmission:
    return PodAdmission(pod=decode_view(request.raw_object, request.namespace), policy=policy)


def _review_change(request: ReviewRequest, policy: AdmissionPolicy) -> AdmissionDecision:
    old = decode_view(request.raw_old_object, request.namespace)
    return decide(replace(_admission(request, policy), old=old), UPDATE_STAGES)
