"""`/metrics` with the names of vendors' schedulers, computed from leases at each scrape.

The dialects have the names; `leasehold_share_*` is our own.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.api.projection.projection import Projection
from shared.dialects.metrics import DeviceAllocation, PublishedMetric, ShareAllocation
from shared.dialects.nvidia import metrics as hami
from shared.dialects.volcano import metrics as volcano
from shared.model.leases.lease import bookings

_SHARE_LABELS = {
    "namespace": "lease.namespace",
    "pod": "lease.name",
    "pod_uid": "lease.pod",
    "container": "held.container",
    "node": "device.node",
    "device_uuid": "device.uuid",
}
DEVICES = (*volcano.SCHEDULER_DEVICES, *hami.SCHEDULER_DEVICES)
PODS = volcano.SCHEDULER_PODS
CONTAINERS = (
    *hami.SCHEDULER_CONTAINERS,
    *(
        PublishedMetric(*row, _SHARE_LABELS)
        for row in (
            ("leasehold_share_memory_bytes", "Memory leased.", "memory_bytes"),
            ("leasehold_share_cores_ratio", "Part of a device's cores leased.", "cores_part"),
            (
                "leasehold_share_memory_used_bytes",
                "Memory in use: the larger of what HAMi-core and the driver report.",
                "used_bytes",
            ),
            (
                "leasehold_share_cores_used_ratio",
                "Part of the device's cores in use.",
                "used_cores_part",
            ),
            (
                "leasehold_share_idle",
                "1 for a share that has not been used for a while (--idle-after-minutes).",
                "measured.idle",
            ),
        )
    ),
)

MOST_SHARES = 20_000
LEFT_OUT = (
    "leasehold_shares_left_out",
    f"Shares without series here: the page has those of {MOST_SHARES:,}.",
)


def metric_families(projection: Projection) -> Iterator[Metric]:
    """Values with equal labels are added up."""
    devices = {
        uuid: DeviceAllocation.from_attributes(view) for uuid, view in projection.devices.items()
    }
    for of_devices in DEVICES:
        yield _family(of_devices, devices.values())
    leases = [lease for totals in projection.totals.values() for lease in totals.leases]
    pods = [
        ShareAllocation(device=devices[held.device], lease=lease, held=held)
        for lease in leases
        for held in bookings(lease.shares)
        if held.device in devices
    ]
    containers = [
        ShareAllocation(
            device=devices[share.device],
            lease=lease,
            held=share,
            measured=projection.usage_of(lease, share),
        )
        for lease in leases
        for share in lease.shares
        if share.device in devices
    ]
    for of_shares, shares in (
        *((metric, pods) for metric in PODS),
        *((metric, containers) for metric in CONTAINERS),
    ):
        yield _family(of_shares, shares[:MOST_SHARES])
    yield GaugeMetricFamily(*LEFT_OUT, value=max(len(containers) - MOST_SHARES, 0))


def _family(metric: PublishedMetric, subjects: Iterable[object]) -> Metric:
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for subject in subjects:
        value = metric.value(subject)
        if value is not None:
            key = tuple(metric.labels(subject).items())
            sums[key] = sums.get(key, 0.0) + value
    family = GaugeMetricFamily(metric.name, metric.help)
    for key, value in sums.items():
        family.add_sample(metric.name, dict(key), value)
    return family


class SchedulerMetrics(Collector):
    def __init__(self, projection: Projection) -> None:
        self.projection = projection

    def collect(self) -> Iterable[Metric]:
        return metric_families(self.projection)
