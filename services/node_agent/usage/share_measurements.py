"""Usage of each leased share as the agent reports it; pure."""

from collections.abc import Iterable, Iterator, Mapping

from services.node_agent.usage.measurements import MeasuredContainer, MeasuredShare
from shared.model.lease import MIB
from shared.model.usage import ShareKey, ShareMeasurement


def share_measurements(
    containers: Iterable[MeasuredContainer], idle_since: Mapping[ShareKey, float]
) -> Iterator[ShareMeasurement]:
    """Return the usage of each share; memory is rounded up to MiB."""
    for use in containers:
        lease = use.container.lease
        for one in use.shares:
            yield ShareMeasurement(
                pod=lease.pod,
                namespace=lease.namespace,
                name=lease.name,
                container=use.container.name,
                device=one.share.device,
                position=one.share.mig.position if one.share.mig else None,
                memory_mib=_memory_mib(one),
                cores_percent=_cores_percent(one),
                processes=one.processes,
                idle_since=idle_since.get(use.key_of(one)),
            )


def _memory_mib(share: MeasuredShare) -> int | None:
    if share.driver_bytes is None and share.region is None:
        return None
    return -(-share.measured_bytes // MIB)


def _cores_percent(share: MeasuredShare) -> int | None:
    """Return what the driver reports, else what HAMi-core does, which a container can forge."""
    if share.driver_percent is not None:
        return share.driver_percent
    return None if share.region is None else share.region.sm_percent
