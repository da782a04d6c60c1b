"""The webhook: reviews in over TLS, decisions out; budgets as the timekeeper tells of them."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from services.webhook.admission import FORBIDDEN, UNREADABLE, Decision, Policy, decide
from services.webhook.largest_device import LargestHeard
from services.webhook.patches import add_gate, annotated
from services.webhook.pods import PodSeen, Source, read_pod
from services.webhook.reviews import answered, is_new_pod, request_of
from shared.model.clock import Clock
from shared.model.errors import RequestError
from shared.model.events.pod_events import BudgetChanged, LargestDeviceReported
from shared.model.names import BUDGET_GATE, Namespace
from shared.model.trace_context import ADMISSION
from shared.runtime.service import handles, loops

logger = logging.getLogger(__name__)

STALE_S = 120.0
"""A budget of which nothing was heard for so long counts as not spent."""
CLASSES_S = 60.0
"""Between two looks at the priority classes."""
ALLOWED = Decision(allowed=True)


class Keys(Protocol):
    """Config maps and secrets of the cluster."""

    async def keys(self, namespace: str, source: Source) -> frozenset[str] | None:
        """Return the keys of one, none if it does not exist; None if it may not be read."""
        ...


class Classes(Protocol):
    """Priority classes of the cluster."""

    async def usual(self) -> str:
        """Return the class of pods that name none; empty: there is none."""
        ...


class ServingCertificateRunner(Protocol):
    """The certificate."""

    def unready_reason(self) -> str | None:
        """Say what keeps the webhook from being called, or None."""
        ...

    async def run(self, pause: Any) -> None:
        """Keep it valid."""
        ...


class Reviews(Protocol):
    """Spans of reviews."""

    def keep(self, pod: PodSeen, began_ns: int, denied: str) -> str:
        """Keep the span of one that ends now; return its context, empty if nobody traces."""
        ...


class Tally(Protocol):
    """Counts decisions."""

    def count(self, outcome: str, seconds: float) -> None:
        """Note one decision and how long it took."""
        ...


class Webhook:
    """Stateless but for what it heard of budgets and devices: any number of replicas may run."""

    def __init__(  # noqa: PLR0917 - its ports
        self,
        policy: Policy,
        keys: Keys,
        classes: Classes,
        showing: ServingCertificateRunner,
        tally: Tally,
        clock: Clock,
        reviews: Reviews,
    ) -> None:
        self.policy = policy
        self.keys = keys
        self.classes = classes
        self.showing = showing
        self.tally = tally
        self.clock = clock
        self.reviews = reviews
        self.budgets: dict[Namespace, tuple[BudgetChanged, float]] = {}
        """As last heard, and when by our own ticks: clocks of several hosts may differ."""
        self.largest = LargestHeard()
        self.usual_class = ""

    @handles
    async def note_budgets(self, events: Sequence[BudgetChanged]) -> None:
        """Remember how namespaces stand."""
        for event in events:
            self.budgets[event.namespace] = event, self.clock.ticks()

    @handles
    async def note_largest(self, events: Sequence[LargestDeviceReported]) -> None:
        """Remember how large the largest device is."""
        for event in events:
            self.largest.note(event, self.clock.ticks())

    @loops
    async def keep_certificate(self) -> None:
        """Keep the certificate valid and trusted."""
        await self.showing.run(self.clock.sleep)

    @loops
    async def know_usual_class(self) -> None:
        """Know which priority class pods have that name none."""
        while True:
            try:
                self.usual_class = await self.classes.usual()
            except RequestError as error:
                logger.warning("which priority class is the usual one is not known: %s", error)
            await self.clock.sleep(CLASSES_S)

    async def review(self, body: Any) -> dict[str, Any]:
        """Answer one AdmissionReview. Raises RequestError for a body that is none."""
        began = time.perf_counter()
        request = request_of(body)
        decision = await self._reviewed(request) if is_new_pod(request) else ALLOWED
        outcome = "allowed" if decision.allowed else "denied"
        self.tally.count(outcome, time.perf_counter() - began)
        return answered(request["uid"], decision)

    async def _reviewed(self, request: Any) -> Decision:
        """Decide, and have the pod name the span of that, so that its own trace leads there."""
        began_ns = time.time_ns()
        namespace = Namespace(str(request.get("namespace") or "default"))
        try:
            pod = read_pod(request.get("object") or {}, namespace)
        except RequestError as error:
            return Decision(allowed=False, message=str(error), code=UNREADABLE)
        decision = await self._decision(pod, namespace)
        if request.get("dryRun") or (decision.allowed and not decision.asks):
            return decision
        span = self.reviews.keep(pod, began_ns, decision.message)
        if not span or not decision.allowed:
            return decision
        return replace(decision, patches=annotated(pod, decision.patches, ADMISSION, span))

    async def _decision(self, pod: PodSeen, namespace: Namespace) -> Decision:
        known = await self._known_keys(pod)
        budget = self._budget(namespace)
        decision = decide(
            pod,
            self.policy,
            known.get,
            has_budget=budget is None or budget.lease_class == "guaranteed",
            largest=self.largest.now(self.clock.ticks()),
            usual_class=self.usual_class,
        )
        if decision.allowed and decision.asks and budget is not None and budget.new_pods == "deny":
            text = (
                f"namespace {namespace} has used up its GPU time: its budget is {budget.state}, "
                "and denies new GPU pods until it is refilled; `leasehold budget` shows when"
            )
            return Decision(allowed=False, message=text, code=FORBIDDEN)
        if decision.allowed and decision.asks and budget is not None and budget.new_pods == "queue":
            text = (
                f"namespace {namespace} has used up its GPU time: the pod waits at its scheduling "
                f"gate {BUDGET_GATE} until the budget is refilled; `leasehold budget` shows when"
            )
            return replace(
                decision,
                patches=(*decision.patches, *add_gate(pod, BUDGET_GATE)),
                warnings=(*decision.warnings, text),
            )
        return decision

    async def _known_keys(self, pod: PodSeen) -> dict[Source, frozenset[str]]:
        sources = {source for container in pod.containers for source in container.sources}
        if not sources:
            return {}
        found = await asyncio.gather(*(self.keys.keys(pod.namespace, one) for one in sources))
        return {
            source: keys for source, keys in zip(sources, found, strict=True) if keys is not None
        }

    def _budget(self, namespace: Namespace) -> BudgetChanged | None:
        budget, heard_at = self.budgets.get(namespace, (None, 0.0))
        return budget if self.clock.ticks() - heard_at <= STALE_S else None
