"""The containers of the node that lease shares of devices; pure."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import PurePath

from services.node_agent.gpus.inventory import DeviceSample
from services.node_agent.isolation.region import InvalidRegion, Region
from services.node_agent.isolation.region_image import RegionSeed, region_path_of, seed_of
from services.node_agent.kubelet.pods import ClaimHolding, KubeletPod, ProcessOrigin
from services.node_agent.mig.instances import MigInstance
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from shared.dialects.hami_core import shares_by_index
from shared.model.errors import RequestError
from shared.model.leases.lease import Lease, Share
from shared.model.names import NodeName, PodUid

ContainerKey = tuple[PodUid, str]
"""Pod and name of a container; ResourceClaim and name of a request."""

Regions = Mapping[ContainerKey, Region | InvalidRegion | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedContainer:
    lease: Lease
    name: str
    region_path: PurePath | None = None
    seed: RegionSeed | None = None
    instances: tuple[str, ...] = ()
    allocated_at: float = 0.0
    """Unix seconds, or 0."""

    def instance_of(self, share: Share) -> str:
        mig_shares = (
            mig_share for mig_share in self.lease.shares_of(self.name) if mig_share.mig is not None
        )
        uuids = {
            (mig_share.device, mig_share.mig): uuid
            for mig_share, uuid in zip(mig_shares, self.instances, strict=False)
        }
        return uuids.get((share.device, share.mig), "")

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(shares_by_index(self.lease, self.name))

    @property
    def key(self) -> ContainerKey:
        return self.lease.pod, self.name

    @property
    def described(self) -> str:
        return f"{'container' if self.lease.claim is None else 'request'} {self.name}"

    @property
    def pods(self) -> tuple[PodUid, ...]:
        return self.lease.users


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    node: NodeName
    containers: Sequence[LeasedContainer]
    regions: Regions
    devices: Sequence[DeviceSample]
    origins: Mapping[int, ProcessOrigin]
    """By PID on the node."""
    pods: Mapping[PodUid, KubeletPod]
    complete: bool
    """Otherwise `containers` may lack leases, and no process counts as unleased."""
    scanned_at: float = 0.0
    instances: Mapping[str, MigInstance] = field(default_factory=dict)
    living: Mapping[ContainerKey, Set[int]] | None = None
    """In the container's own namespace."""
    stuck: Mapping[ContainerKey, str] = field(default_factory=dict)
    uncapped: Set[ContainerKey] = frozenset()
    claims: Set[ClaimHolding] = frozenset()

    def living_in(self, container: ContainerKey) -> Set[int] | None:
        return None if self.living is None else self.living.get(container, frozenset())


def leased_containers(
    entries: Iterable[CheckpointEntry], leases: Mapping[PodUid, Lease], *, complete: bool
) -> tuple[LeasedContainer, ...]:
    containers: dict[ContainerKey, LeasedContainer] = {}
    for entry in entries:
        allocation = entry.allocation
        lease = leases.get(allocation.pod)
        if lease is None and complete:
            continue
        container = _leased_container(entry, lease or allocation.lease)
        earlier = containers.get(container.key)
        if earlier is None or earlier.region_path is None:
            containers[container.key] = container
    return tuple(containers.values())


def _leased_container(entry: CheckpointEntry, lease: Lease) -> LeasedContainer:
    try:
        region_path = region_path_of(entry.limits)
        seed = seed_of(entry.limits.environment) if region_path is not None else None
    except RequestError:  # written by another version of the agent
        region_path = None
        seed = None
    return LeasedContainer(
        lease=lease,
        name=entry.allocation.container,
        region_path=region_path,
        seed=seed,
        instances=entry.instances,
        allocated_at=entry.allocation.activated_at,
    )
