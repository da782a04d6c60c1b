"""The GPUs that a ResourceClaim requests, as a pod requests them by resource names; pure.

Only of claims that any kube-scheduler allocates wherever the ledger has room.
"""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import structs

from shared.kubernetes.claim_specs import ClaimWithSpec, ClassWithSpec, NamedRequest
from shared.kubernetes.resource_claims import MIB
from shared.model.bounds import check_bounds
from shared.model.devices.enforcers import NO_DEMAND, HeldBy
from shared.model.errors import RequestError
from shared.model.names import NodeName, PodUid
from shared.model.quantity import parse_count
from shared.model.requests.claim import CORES, DRIVER, MEMORY
from shared.model.requests.request import (
    ALL_PERCENT,
    LEAST_SHARE_MIB,
    GpuRequest,
    NodeTerm,
    PodRequest,
)
from shared.placing.starts import WaitingClaim

CLASSES = (DRIVER, f"whole-{DRIVER}")
"""As the component `dra` has them."""
SELECTOR = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"
NODE_NAME = "metadata.name"
MOST_DEVICES = 32
"""Of a claim, by Kubernetes."""


class ClaimDemand(NamedTuple):
    claim: WaitingClaim
    containers: tuple[GpuRequest, ...]
    """Named after its requests."""
    unlisted: tuple[NodeName, ...] = ()
    """kube-scheduler allocates nothing there."""

    def added_to(self, request: PodRequest) -> PodRequest:
        needs = request.node_requirements
        if self.unlisted:
            listed = NodeTerm(key=NODE_NAME, operator="NotIn", values=self.unlisted, field=True)
            required = tuple((*term, listed) for term in needs.required or ((),))
            needs = structs.replace(needs, required=required)
        return structs.replace(request, containers=self.containers, node_requirements=needs)


def demand_of(claim: ClaimWithSpec, classes: Mapping[str, ClassWithSpec]) -> ClaimDemand | None:
    """Return None for a claim that has an allocation, or needs what only kube-scheduler decides."""
    requests = claim.requests
    one_pod = claim.is_of_one_pod
    try:
        containers = tuple(_gpu_request(named, is_of_one_pod=one_pod) for named in requests)
        check_bounds(PodRequest(containers=containers), f"ResourceClaim {claim.metadata.name}")
    except RequestError:
        return None
    gpus = sum(container.gpus for container in containers)
    needed = {request.exactly.device_class_name for request in requests}
    is_simple = all(name in classes and classes[name].selectors == (SELECTOR,) for name in needed)
    if claim.status.allocation is not None or not is_simple or not 0 < gpus <= MOST_DEVICES:
        return None
    waiting = WaitingClaim(claim=PodUid(claim.metadata.uid), name=claim.metadata.name)
    return ClaimDemand(waiting, containers)


def _gpu_request(named: NamedRequest, *, is_of_one_pod: bool) -> GpuRequest:
    """Raises RequestError if the request is for others.

    Slices list no device without free cores, and the driver holds no part of a claim that several
    pods may use.
    """
    request = named.exactly
    amounts = request.capacity.requests
    if (
        request.device_class_name not in CLASSES
        or request.allocation_mode != "ExactCount"
        or request.count < 1
        or not amounts.keys() <= {MEMORY, CORES}
    ):
        raise RequestError(f"request {named.name} is not for GPUs alone")
    cores_percent = parse_count(amounts.get(CORES, 0))
    if MEMORY not in amounts:
        whole = cores_percent in {0, ALL_PERCENT}
        return GpuRequest(
            container=named.name,
            gpus=request.count,
            cores_percent=ALL_PERCENT if whole else cores_percent,
            whole=whole,
        )
    memory_bytes = parse_count(amounts[MEMORY])
    if memory_bytes < 0:
        raise RequestError(f"request {named.name} has {memory_bytes} bytes of memory")
    return GpuRequest(
        container=named.name,
        gpus=request.count,
        memory_bytes=max(memory_bytes, LEAST_SHARE_MIB * MIB),
        cores_percent=cores_percent,
        held_by=NO_DEMAND if is_of_one_pod else HeldBy(memory="hami-core"),
    )
