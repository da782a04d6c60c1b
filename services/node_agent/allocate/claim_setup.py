"""What one request of a leased claim gives a container; pure."""

from collections.abc import Mapping

from msgspec.structs import replace

from services.node_agent.allocate.allocation import NodeSnapshot, check_devices, check_fences
from services.node_agent.allocate.device_list_strategies import DeviceListStrategy, name_devices
from services.node_agent.records.checkpoint_entry import CheckpointEntry, Fence, new_entry
from shared.dialects.dialect import ContainerSetup
from shared.dialects.hami_core import limited_setup, shares_by_index, whole_setup
from shared.model.claim import DRIVER, device_name
from shared.model.errors import RequestError
from shared.model.lease import Lease
from shared.model.names import DeviceUuid

Instances = Mapping[tuple[DeviceUuid, int], str]
"""UUIDs of MIG instances, by device and position."""


def requests_of(lease: Lease) -> tuple[str, ...]:
    """Return the requests of a claim's lease, in the order of its shares."""
    return tuple(dict.fromkeys(share.container for share in lease.shares))


def claim_setup(
    lease: Lease, request: str, node: NodeSnapshot, instances: Instances
) -> ContainerSetup:
    """Return the setup of a request: its devices by CDI, and the limits of its shares.

    Raises RequestError for an instance that does not exist, and for instances beside shares.
    """
    shares = shares_by_index(lease, request)
    names: list[str] = [share.device for share in shares]
    if any(share.mig for share in shares):
        names = [
            instances.get((share.device, share.mig.position), "") if share.mig else ""
            for share in shares
        ]
        if not all(names):
            raise RequestError(
                f"request {request} is for MIG instances and shares, which no container can use "
                "at once, or for an instance that does not exist"
            )
        setup = ContainerSetup(environment={})
    elif all(share.whole for share in shares):
        setup = whole_setup(lease, request)
    else:
        setup = limited_setup(_with_file_names(lease), file_name(request), node.paths)
    return name_devices(setup, names, (DeviceListStrategy.CDI_CRI,), f"{lease.pod}/{request}")


def file_name(request: str) -> str:
    """Return a request's name without a slash, which one of a prioritized list has (`gpu/mig`)."""
    return request.replace("/", ".")


def _with_file_names(lease: Lease) -> Lease:
    shares = tuple(replace(share, container=file_name(share.container)) for share in lease.shares)
    return replace(lease, shares=shares)


def claim_entry(
    lease: Lease,
    request: str,
    node: NodeSnapshot,
    *,
    honoured: Mapping[str, Fence],
    instances: Instances,
    now: float,
) -> CheckpointEntry:
    """Return the record of a request. Raises RequestError with the reason for a refusal."""
    shares = lease.shares_of(request)
    check_fences(shares, lease.pod, honoured)
    check_devices(shares, node.devices)
    names = tuple(device_name(share.device, share.mig) for share in shares)
    setup = claim_setup(lease, request, node, instances)
    return new_entry(lease, request, DRIVER, names, setup=setup, instances=instances, now=now)
