"""The metrics of docs/reference.md: those that modules register, and those of the node's page."""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from services.api.reports import legacy_metrics
from services.node_agent.enforcers.limit_audit import ReadShare
from services.node_agent.gpus.inventory import DeviceSample
from services.node_agent.isolation.region import DeviceSums, decode
from services.node_agent.isolation.region_image import RegionSeed, image_of
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.mig.instances import MigInstance
from services.node_agent.usage.leased_containers import LeasedContainer
from services.node_agent.usage.measurements import MeasuredContainer, MeasuredShare
from services.node_agent.usage.snapshot import UsageSnapshot
from services.node_agent.usage.usage_metrics import usage_metrics
from shared.model.devices.device import Hardware
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.leases.lease import Lease, Share
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid

BOUNDS: Mapping[str, str] = {
    "constants of the code": (
        "service handler subject outcome quantile kind state cause verb waited system source "
        "setting enforcer memory compute phase"
    ),
    "codes of refusals, or kinds of the one fact that the metric is about": "reason error_type",
    "versions and settings in use": "version layout content digest strategy",
    "GPU models": "model hw_model hw_type",
    "GPUs of the node, or of the cluster": "device_uuid hw_id index gpu",
    "nodes": "node",
    "resource names that the node serves": "resource",
    "GPUQuota objects, ConfigMaps of devices": "name config",
    "namespaces with an account, an idle lease, or an eviction since the start": "namespace",
    "containers with a lease, on a node at most GPUs times `--device-split-count`": (
        "pod pod_uid container"
    ),
}
"""What bounds the number of values of labels of ours."""
ROOT = Path(__file__).parents[2]
PLACE = Path("/r")
Row = tuple[str, str, str, str]
"""Name as Prometheus stores it, type, labels as a query has them, help."""


def registered() -> Mapping[str, list[Row]]:
    """Return the metrics that importing a module registers, by module."""
    found: dict[str, list[Row]] = {}
    for path in sorted([*ROOT.glob("services/**/*.py"), *ROOT.glob("shared/**/*.py")]):
        inside = path.relative_to(ROOT).with_suffix("").parts
        if "prometheus_client import" not in path.read_text():
            continue
        owner = inside[1].replace("_", " ") if inside[0] == "services" else "every service"
        module = importlib.import_module(".".join(inside))
        for value in vars(module).values():
            if isinstance(value, MetricWrapperBase):
                labels = value._labelnames
                found.setdefault(owner, []).extend(
                    _row(family, labels) for family in value.describe()
                )
    return {owner: sorted(rows) for owner, rows in sorted(found.items())}


def node_page() -> list[Row]:
    """Return the families of the page of what a node's containers use, labels included."""
    rows = []
    snapshot = _everything()
    read = {
        (use.container.lease.pod, use.container.name, of.share.device): ReadShare(
            memory_bytes=1, cores_percent=1
        )
        for use in snapshot.containers
        for of in use.shares
    }
    for family in usage_metrics(
        snapshot, NodeName("n"), now=0.0, idle_since={}, read=read, restored=1
    ):
        assert family.samples, f"{family.name}: the picture below must show one"
        rows.append(_row(family, sorted({key for s in family.samples for key in s.labels})))
    return sorted(rows)


def scheduler_page() -> list[Row]:
    """Return the families of the page with the names of schedulers, labels included."""
    tables = (*legacy_metrics.DEVICES, *legacy_metrics.PODS, *legacy_metrics.CONTAINERS)
    rows = [
        _row(Metric(table.name, table.help, "gauge"), table.label_attributes) for table in tables
    ]
    return sorted([*rows, _row(Metric(*legacy_metrics.LEFT_OUT, "gauge"), ())])


def _row(family: Metric, labels: Iterable[str]) -> Row:
    stored = {sample.name for sample in family.samples}
    name = family.name
    if family.type == "counter" and not stored - {f"{name}_total"}:
        name = f"{name}_total"
    listed = ",".join(labels)
    return name, family.type, f"{{{listed}}}" if listed else "", family.documentation


def _everything() -> UsageSnapshot:
    """Return a picture in which there is one of everything."""
    pod = PodUid("u1")
    namespace = Namespace("default")
    node = NodeName("n")
    share = Share(
        container="main",
        device=DeviceUuid("GPU-0"),
        index=0,
        device_mib=16_000,
        memory_mib=1000,
        cores_percent=10,
    )
    seed = RegionSeed(memory_bytes=(share.limit_bytes,), cores_percent=(share.cores_percent,))
    tenant = LeasedContainer(
        lease=Lease(pod=pod, namespace=namespace, name="pod", node=node, shares=(share,)),
        name=share.container,
        region_path=PLACE,
        seed=seed,
    )
    use = MeasuredShare(
        share=share,
        position=0,
        limit_bytes=1,
        region=DeviceSums(),
        driver_bytes=1,
        driver_percent=1,
        instance=MigInstance(gi=1, profile="1g.5gb", start=0, memory_slices=1, compute_slices=1),
    )
    region = replace(decode(V1_2, image_of(seed)), last_kernel_at=0)
    broken = ViolationFound(
        node=node,
        reason=ViolationReason.OVERRUN,
        pod=pod,
        namespace=namespace,
        name="pod",
        container=share.container,
        message="",
    )
    return UsageSnapshot(
        devices=(
            DeviceSample(
                device=share.device,
                index=0,
                model="T4",
                memory_bytes=1,
                busy_percent=1,
                memory_busy_percent=1,
                hardware=Hardware(
                    device=share.device,
                    at=1.0,
                    temperature_c=1,
                    power_w=1,
                    power_limit_w=1,
                    sm_clock_mhz=1,
                    memory_clock_mhz=1,
                    busy_percent=1,
                    throttle=("power limit",),
                ),
            ),
        ),
        containers=(MeasuredContainer(container=tenant, region=region, shares=(use,)),),
        violations=(broken,),
        unleased={share.device: 1},
    )
