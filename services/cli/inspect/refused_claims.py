"""Why Leasehold refuses the ResourceClaims of a pod that waits."""

from collections.abc import Iterator

from services.cli.api_client import KubernetesApi
from services.cli.pod_summary import PodSummary
from shared.kubernetes.resource_claims import ApiResourceClaim, claim_path
from shared.model.bounds import cut
from shared.model.errors import LeaseholdError
from shared.model.requests.claim import DRIVER, REFUSED

MOST_CLAIMS = 8


def refused_claim_lines(server: KubernetesApi, pod: PodSummary) -> Iterator[str]:
    """Yield nothing for a claim that cannot be read, as by this user."""
    for name in pod.claim_objects[:MOST_CLAIMS]:
        try:
            claim = server.read(claim_path(pod.namespace, name), ApiResourceClaim)
        except LeaseholdError:
            continue
        conditions = (
            condition
            for device in claim.status.devices
            for condition in device.conditions
            if device.driver == DRIVER and (condition.type, condition.status) == (REFUSED, "True")
        )
        for text in dict.fromkeys(f"{it.message} ({it.reason})" for it in conditions):
            yield f"claim       {name} was allocated, and Leasehold refuses it: {cut(text)}"
