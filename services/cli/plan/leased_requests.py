"""The requests of pods that hold leases, as their manifests in the API server have them."""

from collections.abc import Collection

from services.cli.snapshot.snapshot_reader import SnapshotReader
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiPod
from shared.model.names import PodUid
from shared.model.request import PodRequest
from shared.pods.pod_parser import PodParser

PAGE = 500


async def read_requests(
    reader: SnapshotReader, pods: Collection[PodUid], rules: Rules
) -> dict[PodUid, PodRequest]:
    """Return the requests of these pods; those that are gone or cannot be parsed are left out."""
    found: dict[PodUid, PodRequest] = {}
    token = ""
    while True:
        page = await reader.kubernetes.list_page(
            "/api/v1/pods", query={}, limit=PAGE, continue_token=token
        )
        for pod in page.read(ApiPod):
            if pod.metadata.uid in pods:
                parser = PodParser(frozenset({pod.spec.scheduler_name}), rules)
                parsed = parser.parse(pod)
                if parsed.request is not None and not parsed.request_error:
                    found[parsed.pod] = parsed.request
        token = page.metadata.continue_
        if not token:
            return found
