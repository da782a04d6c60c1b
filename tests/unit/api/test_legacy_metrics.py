"""Vendors' schedulers' metrics: published names, labels, units; no stale or duplicate series."""

from prometheus_client import Metric

from services.api.legacy_metrics import LEFT_OUT, metric_families
from services.api.projection import Projection
from shared.model.lease import Lease
from shared.model.ledger import NodeTotals, counted_use
from shared.model.names import NodeName
from tests.support import build

DEVICE = {"devID", "NodeName"}
D = {"node", "device_uuid", "device_index", "device_type"}
P = {"namespace", "node", "pod", "container_index", "device_uuid"}
UNTYPED = {"nodeid", "deviceuuid", "deviceidx"}
OLD = UNTYPED | {"devicetype"}
OLD_P = {"podnamespace", "nodename", "podname", "containeridx", "deviceuuid"}
VOLCANO = {
    "volcano_vgpu_device_shared_number": DEVICE,
    "volcano_vgpu_device_allocated_memory": DEVICE,
    "volcano_vgpu_device_allocated_cores": DEVICE,
    "volcano_vgpu_device_memory_limit": DEVICE,
    "volcano_vgpu_device_memory_allocation_for_a_certain_pod": DEVICE | {"podName"},
    "volcano_vgpu_device_core_allocation_for_a_certain_pod": DEVICE | {"podName"},
}
HAMI = {
    "hami_gpu_memory_limit_bytes": D,
    "hami_gpu_core_limit_ratio": D,
    "hami_gpu_memory_allocated_bytes": D | {"device_cores"},
    "hami_gpu_shared_count": D,
    "hami_gpu_core_allocated_ratio": D,
    "hami_node_gpu_memory_allocated_ratio": D,
    "hami_node_gpu_overview": D | {"device_cores", "device_memory_limit"},
    "hami_vgpu_memory_allocated_bytes": P,
    "hami_vgpu_core_allocated_ratio": P,
    "GPUDeviceMemoryLimit": OLD,
    "GPUDeviceCoreLimit": OLD,
    "GPUDeviceMemoryAllocated": OLD | {"devicecores"},
    "GPUDeviceSharedNum": OLD,
    "GPUDeviceCoreAllocated": OLD,
    "nodeGPUMemoryPercentage": UNTYPED,
    "vGPUMemoryAllocated": OLD_P,
    "vGPUCoreAllocated": OLD_P,
}
MIB = 1 << 20


def scraped(*leases: Lease, unit_mib: int = 1) -> dict[str, Metric]:
    uses, _ = counted_use(leases)
    device = build.device("GPU-a", unit_mib=unit_mib)
    held = (device, uses[device.uuid]) if device.uuid in uses else device
    board = Projection()
    board.update_nodes([], [NodeTotals(node=build.ledger_node("n1", held), leases=leases)])
    return {family.name: family for family in metric_families(board)}


def lease(pod: str = "u1", *, mib: int = 2000, cores: int = 30, **fields: str) -> Lease:
    share = build.share(memory_mib=mib, cores_percent=cores, fence=1)
    return build.lease(pod, "n1", share, **({"name": "train"} | fields))


def values(family: Metric) -> list[float]:
    return [sample.value for sample in family.samples]


def test_item_49_the_schedulers_names_labels_and_types_are_the_published_ones() -> None:
    found = scraped(lease())

    for name, labels in (VOLCANO | HAMI).items():
        (sample,) = found[name].samples
        assert (found[name].type, sample.name, set(sample.labels)) == ("gauge", name, labels)


def test_item_49_volcanos_memory_is_in_the_units_of_its_node_and_hamis_in_bytes() -> None:
    found = scraped(lease(), unit_mib=10)

    assert values(found["volcano_vgpu_device_allocated_memory"]) == [200]
    assert values(found["volcano_vgpu_device_memory_limit"]) == [3276]
    assert values(found["volcano_vgpu_device_memory_allocation_for_a_certain_pod"]) == [200]
    assert values(found["volcano_vgpu_device_allocated_cores"]) == [30]
    assert values(found["hami_gpu_memory_allocated_bytes"]) == [2000 * MIB]
    assert values(found["hami_node_gpu_memory_allocated_ratio"]) == [2000 / 32768]


def test_pods_of_one_name_are_summed_in_the_vendors_series_and_separate_in_our_own() -> None:
    found = scraped(lease("u1", namespace="a"), lease("u2", namespace="b", mib=500))

    assert values(found["volcano_vgpu_device_memory_allocation_for_a_certain_pod"]) == [2500]
    ours = found["leasehold_share_memory_bytes"].samples
    assert {(s.labels["namespace"], s.labels["pod_uid"], s.value) for s in ours} == {
        ("a", "u1", 2000 * MIB),
        ("b", "u2", 500 * MIB),
    }


def test_item_49_series_of_a_pod_end_with_its_lease_and_those_of_its_device_stay() -> None:
    found = scraped()

    assert values(found["volcano_vgpu_device_shared_number"]) == [0]
    assert found["volcano_vgpu_device_memory_allocation_for_a_certain_pod"].samples == []
    assert found["hami_vgpu_memory_allocated_bytes"].samples == []


def test_series_of_a_node_that_vanished_are_gone() -> None:
    board = Projection()
    board.update_nodes([], [NodeTotals(node=build.ledger_node("n1", build.device()), leases=())])

    board.update_nodes([NodeName("n1")], [])

    assert [one.name for family in metric_families(board) for one in family.samples] == [
        LEFT_OUT[0]
    ]
