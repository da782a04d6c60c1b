"""The pods and nodes of an API server, as the commands read them."""

from services.cli.pod_summary import PodSummary, summary_of
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.resource_claims import CLAIMS_PATH, ApiResourceClaim, allocated_claim
from shared.kubernetes.types import ApiObject, ApiPod
from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.names import NodeName

ALL_PODS = "/api/v1/pods"


class ClusterObjects:
    """Reads with the permissions of the client."""

    def __init__(self, kubernetes: KubernetesClient) -> None:
        self.kubernetes = kubernetes

    async def pods(self) -> tuple[PodSummary, ...]:
        """Return every pod of the cluster."""
        pages = self.kubernetes.pages(ALL_PODS)
        return tuple([summary_of(pod) async for page in pages for pod in page.read(ApiPod)])

    async def node_names(self) -> frozenset[NodeName]:
        """Return the names of the nodes that the API server has."""
        pages = self.kubernetes.pages("/api/v1/nodes")
        return frozenset(
            {NodeName(each.metadata.name) async for page in pages for each in page.read(ApiObject)}
        )

    async def claims(self) -> tuple[AllocatedClaim, ...] | None:
        """Return the ResourceClaims with devices of our driver; None: they cannot be read."""
        try:
            pages = [page async for page in self.kubernetes.pages(CLAIMS_PATH)]
        except RequestError:
            return None
        claims = (claim for page in pages for claim in page.read(ApiResourceClaim))
        return tuple(filter(None, map(allocated_claim, claims)))
