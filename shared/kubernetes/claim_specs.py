"""What ResourceClaims request, and DeviceClasses select, where that can be understood; pure.

Selectors, constraints, tolerations, prioritized lists, parameters and administrative access are not
understood, nor whatever later versions of Kubernetes add.
"""

import msgspec
from msgspec import Raw, Struct

from shared.kubernetes.resource_claims import ResourceClaimStatus
from shared.kubernetes.types import ObjectMeta, Quantities
from shared.model.errors import UNDECODABLE


class PlainCapacity(Struct, frozen=True, forbid_unknown_fields=True):
    requests: Quantities = {}


class PlainRequest(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    device_class_name: str
    allocation_mode: str = "ExactCount"
    count: int = 1
    capacity: PlainCapacity = PlainCapacity()


class NamedRequest(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    exactly: PlainRequest


class _Devices(Struct, frozen=True, forbid_unknown_fields=True):
    requests: tuple[NamedRequest, ...]


class _ClaimSpec(Struct, frozen=True, forbid_unknown_fields=True):
    devices: _Devices


class _Expression(Struct, frozen=True, forbid_unknown_fields=True):
    expression: str


class _Selector(Struct, frozen=True, forbid_unknown_fields=True):
    cel: _Expression


class _ClassSpec(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    selectors: tuple[_Selector, ...]
    extended_resource_name: str = ""


class ClaimWithSpec(Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: Raw = Raw(b"{}")
    status: ResourceClaimStatus = ResourceClaimStatus()

    @property
    def requests(self) -> tuple[NamedRequest, ...]:
        """Empty if anything in it is not understood."""
        try:
            return msgspec.json.decode(self.spec, type=_ClaimSpec).devices.requests
        except UNDECODABLE:
            return ()

    @property
    def is_of_one_pod(self) -> bool:
        owners = self.metadata.owner_references
        return any(owner.controller and owner.kind == "Pod" for owner in owners)


class ClassWithSpec(Struct, frozen=True):
    spec: Raw = Raw(b"{}")

    @property
    def selectors(self) -> tuple[str, ...]:
        """Empty if anything in it is not understood."""
        try:
            selectors = msgspec.json.decode(self.spec, type=_ClassSpec).selectors
        except UNDECODABLE:
            return ()
        return tuple(selector.cel.expression for selector in selectors)
