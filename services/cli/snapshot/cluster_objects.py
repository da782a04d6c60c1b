"""The pods and nodes of an API server, as the commands read them."""

from datetime import datetime
from urllib.parse import quote

import msgspec

from services.cli.snapshot.snapshot import PodSummary
from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.resource_claims import CLAIMS_PATH, ApiResourceClaim, allocated_claim
from shared.kubernetes.types import PodStatus
from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedClaim
from shared.model.names import Namespace, NodeName, PodUid
from shared.pods.rejections import rejection_of

PAGE = 500
ALL_PODS = "/api/v1/pods"


class _ListedOwner(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""
    controller: bool | None = None


class _ListedMetadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    creation_timestamp: datetime | None = None
    annotations: dict[str, str] = {}
    owner_references: tuple[_ListedOwner, ...] = ()


class _Named(msgspec.Struct, frozen=True):
    name: str = ""


class _ListedSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""
    scheduler_name: str = ""
    scheduling_gates: tuple[_Named, ...] = ()
    resource_claims: tuple[_Named, ...] = ()


class _ListedPod(msgspec.Struct, frozen=True):
    metadata: _ListedMetadata = _ListedMetadata()
    spec: _ListedSpec = _ListedSpec()
    status: PodStatus = PodStatus()


class ClusterObjects:
    """Reads with the permissions of the client."""

    def __init__(self, kubernetes: KubernetesClient) -> None:
        self.kubernetes = kubernetes

    async def pods(self, namespace: str = "") -> tuple[PodSummary, ...]:
        """Return every pod of a namespace, or of the cluster."""
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods" if namespace else ALL_PODS
        pods: list[PodSummary] = []
        token = ""
        while True:
            page = await self.kubernetes.list_page(path, query={}, limit=PAGE, continue_token=token)
            pods += map(_summary, page.read(_ListedPod))
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
            names |= {NodeName(node.metadata.name) for node in page.read(_ListedPod)}
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

    async def pod(self, namespace: str, name: str) -> PodSummary | None:
        """Return one pod, or None."""
        try:
            return _summary(await self.kubernetes.read(pod_path(namespace, name), _ListedPod))
        except NotFoundError:
            return None


def _summary(pod: _ListedPod) -> PodSummary:
    created = pod.metadata.creation_timestamp
    return PodSummary(
        pod=PodUid(pod.metadata.uid),
        namespace=Namespace(pod.metadata.namespace),
        name=pod.metadata.name,
        node=pod.spec.node_name,
        phase=pod.status.phase,
        scheduler=pod.spec.scheduler_name,
        created_at=created.timestamp() if created else 0.0,
        owner=next(
            (f"{one.kind}/{one.name}" for one in pod.metadata.owner_references if one.controller),
            "",
        ),
        gates=tuple(gate.name for gate in pod.spec.scheduling_gates),
        claims=tuple(claim.name for claim in pod.spec.resource_claims),
        annotations=pod.metadata.annotations,
        rejection=rejection_of(pod.status),
        unschedulable_message=next(
            (
                condition.message
                for condition in pod.status.conditions
                if condition.type == "PodScheduled" and condition.status == "False"
            ),
            "",
        ),
    )
