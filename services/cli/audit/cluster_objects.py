"""The pods and nodes of an API server, as the commands read them."""

from services.cli.pod_summary import PodSummary, summary_of
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.resource_claims import CLAIMS_PATH, ApiResourceClaim, allocated_claim
from shared.kubernetes.types import ApiObject, ApiPod
from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.names import NodeName

PAGE = 500
ALL_PODS = "/api/v1/pods"


class ClusterObjects:
    """Reads with the permissions of the client."""

    def __init__(self, kubernetes: KubernetesClient) -> None:
        self.kubernetes = kubernetes

    async def pods(self) -> tuple[PodSummary, ...]:
        """Return every pod of the cluster."""
        pods: list[PodSummary] = []
        token = ""
        while True:
            page = await self.kubernetes.list_page(
                ALL_PODS, query={}, limit=PAGE, continue_token=token
            )
            pods += map(summary_of, page.read(ApiPod))
            token = page.metadata.continue_
            if not token:
                return tuple(pods)

    async def node_names(self) -> frozenset[NodeName]:
        """Return the names of the nodes that the API server has."""
        names: set[NodeName] = set()
        token = ""
        while True:
            page = await self.kubernetes.list_page(
                "/api/v1/nodes", query={}, limit=PAGE, continue_token=token
            )
            names |= {NodeName(node.metadata.name) for node in page.read(ApiObject)}
            token = page.metadata.continue_
            if not token:
                return frozenset(names)

    async def claims(self) -> tuple[AllocatedClaim, ...] | None:
        """Return the ResourceClaims with devices of our driver; None: they cannot be read."""
        found: list[AllocatedClaim | None] = []
        token = ""
        while True:
            try:
                page = await self.kubernetes.list_page(
                    CLAIMS_PATH, query={}, limit=PAGE, continue_token=token
                )
            except RequestError:
                return None
            found += map(allocated_claim, page.read(ApiResourceClaim))
            token = page.metadata.continue_
            if not token:
                return tuple(filter(None, found))
