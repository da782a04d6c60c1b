"""The pods of a manifest that a viewer wants to try; pure."""

from shared.dialects.dialect import Rules
from shared.kubernetes.manifests import ManifestPod, pods_in
from shared.model.errors import RequestError
from shared.placing.what_if import TriedPod
from shared.pods.pod_parser import parse_manifest

MOST_TRIED = 500


def tried_pods(manifest: str, rules: Rules) -> list[TriedPod]:
    """Raises RequestError."""
    written = pods_in(manifest, "the manifest")
    count = sum(manifest_pod.replicas for manifest_pod in written)
    if count > MOST_TRIED:
        raise RequestError(f"the manifest has {count} pods; at most {MOST_TRIED} can be tried")
    return [
        pod
        for manifest_pod in written
        for pod in [_tried_pod(manifest_pod, rules)] * manifest_pod.replicas
    ]


def _tried_pod(written: ManifestPod, rules: Rules) -> TriedPod:
    parsed = parse_manifest(written.pod, rules)
    if parsed.request_error:
        raise RequestError(f"{written.origin}: {parsed.request_error}")
    if parsed.request is None or not parsed.request.containers:
        raise RequestError(
            f"{written.origin} requests no GPU by a resource name that Leasehold knows"
        )
    name = f"{parsed.namespace}/{parsed.name}"
    return TriedPod(origin=written.origin, name=name, request=parsed.request)
