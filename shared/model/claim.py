"""ResourceClaims: the names that our DRA driver, its slices and the binder agree on; pure.

The API is `resource.k8s.io/v1`
(https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/resource-claim-v1/).
"""

from collections.abc import Iterable
from enum import StrEnum

from shared.model.lease import MigPlacement
from shared.model.names import DeviceUuid

DRIVER = "gpu.leasehold.dev"
"""`driver` of our ResourceSlices and allocation results. The pool is the name of the node."""
LEASED = "leasehold.dev/Leased"
"""Binding condition of the devices: True once the ledger has the claim's lease."""
REFUSED = "leasehold.dev/Refused"
"""Binding failure condition of the devices: True if the ledger refuses the lease."""

EXTENDED_RESOURCES = ("leasehold.dev/whole-gpu", "deviceclass.resource.kubernetes.io/")
"""Prefixes of extended resources for which schedulers create claims: that of our class, and of any
class by its name."""

MEMORY = "memory"
"""Capacity of a device in bytes."""
CORES = "cores"
"""Capacity of a device in percent of its compute."""
SLOTS = "slots"
"""Capacity of a device in shares; every share consumes 1."""


class DraMode(StrEnum):
    """The setting `dra`: whether ResourceClaims are served, and how a lease precedes its pod."""

    OFF = "off"
    CONDITIONS = "conditions"
    """Binding conditions: with any scheduler, 5 s more until the pod is bound."""


def device_name(uuid: DeviceUuid, mig: MigPlacement | None = None) -> str:
    """Return the name of a device, or of a MIG instance of it, in ResourceSlices: a DNS label.

    Made from the UUID, since indices may change while a claim is allocated.
    """
    name = uuid.lower()
    if mig is None:
        return name
    return f"{name}-mig-{mig.profile.replace('.', '')}-{mig.position}"


def generation_of(allocated_at: str, devices: Iterable[tuple[str, str, str]]) -> str:
    """Identify an allocation of a claim by its `allocationTimestamp` and its results.

    `devices`: request, device name and share ID ("" without one) of each result.
    """
    return " ".join([allocated_at, *sorted("/".join(each) for each in devices)])
