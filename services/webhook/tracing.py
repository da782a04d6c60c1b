"""A span for each review of a pod that asks for a GPU."""

from dataclasses import dataclass

from services.webhook.pods import PodSeen
from shared.runtime.telemetry import Tracing


@dataclass(slots=True)
class ReviewSpans:
    """Spans in traces of their own: a new pod has no uid yet, which its own trace is named by."""

    tracing: Tracing

    def keep(self, pod: PodSeen, began_ns: int, denied: str) -> str:
        """Keep the span of a review that ends now; return its context, empty if nobody traces."""
        facts = {"k8s.namespace.name": pod.namespace, "k8s.pod.name": pod.name}
        return self.tracing.over("webhook review", began_ns, facts, fault=denied)
