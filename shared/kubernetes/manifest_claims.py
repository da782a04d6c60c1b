"""The ResourceClaims of a manifest, and the templates of such; pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct, field

from shared.kubernetes.resource_claims import DeviceAllocationConfiguration
from shared.kubernetes.strict_yaml import load_documents
from shared.kubernetes.types import Quantities
from shared.model.errors import UNDECODABLE, RequestError

CLAIM = "ResourceClaim"
TEMPLATE = "ResourceClaimTemplate"


class RequestedCapacity(Struct, frozen=True):
    requests: Quantities = field(default_factory=dict)


class RequestedDevice(Struct, frozen=True, rename="camel"):
    """A request, or one of the choices of a prioritized list."""

    name: str = ""
    device_class_name: str = ""
    capacity: RequestedCapacity | None = None


class ClaimedRequest(Struct, frozen=True, rename="camel"):
    name: str = ""
    exactly: RequestedDevice | None = None
    first_available: tuple[RequestedDevice, ...] = ()


class ClaimedDevices(Struct, frozen=True):
    requests: tuple[ClaimedRequest, ...] = ()
    config: tuple[DeviceAllocationConfiguration, ...] = ()

    def __iter__(self) -> Iterator[tuple[str, RequestedDevice]]:
        """Yield each device with the name of its request, as an allocation has it."""
        for request in self.requests:
            if request.exactly is not None:
                yield request.name, request.exactly
            for choice in request.first_available:
                yield f"{request.name}/{choice.name}", choice


class _ClaimSpec(Struct, frozen=True):
    devices: ClaimedDevices = ClaimedDevices()


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestClaim:
    origin: str
    """Such as `ResourceClaim gpu`."""
    devices: ClaimedDevices


def claims_in(text: str, source: str) -> list[ManifestClaim]:
    """Return the claims of a manifest of any number of YAML or JSON documents.

    Raises RequestError, naming the claim, for one that is malformed.
    """
    try:
        documents = load_documents(text)
    except ValueError as error:
        raise RequestError(f"{source} is not YAML: {error}") from error
    left = [*documents]
    claims: list[ManifestClaim] = []
    while left:
        document = left.pop(0)
        if not isinstance(document, dict):
            continue
        kind = document.get("kind")
        if isinstance(kind, str) and kind.endswith("List"):
            items = document.get("items")
            left += items if isinstance(items, list) else ()
        elif kind in {CLAIM, TEMPLATE}:
            claims.append(_claim(str(kind), document))
    return claims


def _claim(kind: str, document: dict[str, Any]) -> ManifestClaim:
    metadata = document.get("metadata")
    origin = f"{kind} {metadata.get('name', '?') if isinstance(metadata, dict) else '?'}"
    spec = document.get("spec")
    if kind == TEMPLATE:
        spec = spec.get("spec") if isinstance(spec, dict) else None
    try:
        encoded = msgspec.json.encode({} if spec is None else spec)
        read = msgspec.json.decode(encoded, type=_ClaimSpec)
    except (TypeError, *UNDECODABLE) as error:
        raise RequestError(f"{origin} is malformed: {error}") from error
    return ManifestClaim(origin=origin, devices=read.devices)
