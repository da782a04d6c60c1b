"""The ResourceClaims of a manifest, and the templates of such; pure."""

from dataclasses import dataclass
from typing import Any

import msgspec

from shared.kubernetes.manifests import documents_of
from shared.kubernetes.resource_claims import ClaimedDevices, ClaimSpec
from shared.model.errors import UNDECODABLE, RequestError

CLAIM = "ResourceClaim"
TEMPLATE = "ResourceClaimTemplate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestClaim:
    origin: str
    """Such as `ResourceClaim gpu`."""
    devices: ClaimedDevices


def claims_in(text: str, source: str) -> list[ManifestClaim]:
    """Raises RequestError, naming the claim, for one that is malformed."""
    left = documents_of(text, source)
    claims: list[ManifestClaim] = []
    while left:
        document = left.pop(0)
        kind = document.get("kind") if isinstance(document, dict) else None
        if not isinstance(kind, str):
            continue
        if kind.endswith("List"):
            items = document.get("items")
            left += items if isinstance(items, list) else ()
        elif kind in {CLAIM, TEMPLATE}:
            claims.append(_claim(kind, document))
    return claims


def _claim(kind: str, document: dict[str, Any]) -> ManifestClaim:
    metadata = document.get("metadata")
    origin = f"{kind} {metadata.get('name', '?') if isinstance(metadata, dict) else '?'}"
    spec = document.get("spec")
    if kind == TEMPLATE:
        spec = spec.get("spec") if isinstance(spec, dict) else None
    try:
        encoded = msgspec.json.encode({} if spec is None else spec)
        read = msgspec.json.decode(encoded, type=ClaimSpec)
    except (TypeError, *UNDECODABLE) as error:
        raise RequestError(f"{origin} is malformed: {error}") from error
    return ManifestClaim(origin=origin, devices=read.devices)
