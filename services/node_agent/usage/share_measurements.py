"""Usage of each leased share as the agent reports it, and since when a share is idle; pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from services.node_agent.usage.measurements import MeasuredContainer, MeasuredShare
from shared.model.lease import MIB
from shared.model.usage import ShareKey, ShareMeasurement


class IdleShares:
    """Since when the cores of each share have not been in use."""

    def __init__(self) -> None:
        self.since: dict[ShareKey, float] = {}
        """Unix seconds; without shares in use, and those whose use is not known."""

    def observe(self, containers: Sequence[MeasuredContainer], now: float) -> None:
        """Take the result of one scan; `now` is its time in Unix seconds."""
        idle = [
            one.key
            for one in share_measurements(containers, {})
            if one.cores_percent is not None and not one.cores_percent
        ]
        self.since = {key: self.since.get(key, now) for key in idle}


def share_measurements(
    containers: Iterable[MeasuredContainer], idle_since: Mapping[ShareKey, float]
) -> Iterator[ShareMeasurement]:
    """Return the usage of each share; memory is rounded up to MiB."""
    for use in containers:
        lease = use.container.lease
        for one in use.shares:
            name, device = use.container.name, one.share.device
            yield ShareMeasurement(
                pod=lease.pod,
                namespace=lease.namespace,
                name=lease.name,
                container=name,
                device=device,
                memory_mib=_memory_mib(one),
                cores_percent=_cores_percent(one),
                processes=one.processes,
                idle_since=idle_since.get((lease.pod, name, device)),
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
