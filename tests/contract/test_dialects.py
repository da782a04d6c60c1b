"""What every dialect guarantees: served resources, and lists that a kubelet accepts."""

from dataclasses import replace

import pytest

from services.node_agent.views.advertisement import (
    MAX_ID_LENGTH,
    advertisement_of,
    check_list,
    list_size_bytes,
)
from shared.dialects import DIALECTS, GPU_RESOURCES, REQUEST_ANNOTATIONS
from shared.dialects.advertised import TRIGGER, Advertisement, NodeSoftware, Strategy
from shared.dialects.dialect import ContainerManifest, Paths, PodManifest, Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.protected_paths import lease_conflict
from shared.dialects.volcano.device_register import HANDSHAKE
from shared.dialects.volcano.gpushare import MAX_UNITS
from shared.model.devices.device import Device, DeviceMode, MigLayout, MigProfile
from shared.model.devices.replicas import Replicas
from shared.model.errors import RequestError
from shared.model.names import DeviceUuid, Namespace
from tests.support.build import lease, share
from tests.support.dialects.kai_pods import is_kais_own

KUBELETS_LIMIT_BYTES = 4 * 1024 * 1024
LOOKUPS_IN_A_SECOND = 5_000_000
"""IDs of a list x IDs held that a kubelet 1.36 looks up in 0.9 s of one core: docs/kubelets.md."""
MAX_PODS = 250
"""Pods of a large node: each holds one more ID of another resource."""
LARGEST = tuple(
    Device(
        uuid=DeviceUuid(f"GPU-{n:08x}-0000-0000-0000-000000000000"),
        index=n,
        model="NVIDIA H200",
        memory_mib=196_608,
        slots=10,
    )
    for n in range(16)
)
LAYOUT = MigLayout(name="g", profiles=(MigProfile(name="1g.18gb", memory_mib=16384, count=7),))
SMALL = (
    *(
        Device(
            uuid=DeviceUuid(f"GPU-{n}"),
            index=n,
            model="Tesla T4",
            memory_mib=4096,
            slots=10,
            unit_mib=16,
        )
        for n in range(2)
    ),
    Device(
        uuid=DeviceUuid("GPU-2"),
        index=2,
        model="NVIDIA H200",
        memory_mib=20480,
        slots=10,
        mode=DeviceMode.MIG,
        layouts=(LAYOUT,),
    ),
)


def divided_into(resource: str) -> tuple[Device, ...]:
    """The GPU outside MIG mode as replicas that are offered by this name."""
    replicas = Replicas(number=4, strategy="time-slicing", resource=resource)
    return (replace(SMALL[0], mode=DeviceMode.REPLICAS, replicas=replicas, slots=4),)


DIVIDED = divided_into("nvidia.com/gpu")
RENAMED = divided_into("nvidia.com/gpu.shared")


def shown(name: str) -> list[Advertisement]:
    """All that a dialect may show: by strategy, with short lists and with long ones."""
    advertised = DIALECTS[name].advertise
    small = [advertised(SMALL, strategy) for strategy in Strategy.ALL]
    divided = [advertised(DIVIDED, strategy) for strategy in Strategy.ALL]
    renamed = [advertised(RENAMED, strategy) for strategy in Strategy.ALL]
    large = [advertised(LARGEST, strategy) for strategy in (Strategy.AUTO, Strategy.NUMBER)]
    return [*small, *large, *divided, *renamed]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_advertises_the_resources_that_it_declares(name: str) -> None:
    dialect = DIALECTS[name]

    assert set().union(*(each.served for each in shown(name))) == dialect.served
    assert set().union(*(each.node_status for each in shown(name))) == dialect.status_resources
    assert dialect.served - {TRIGGER} <= dialect.resources
    assert dialect.status_resources <= dialect.resources
    assert dialect.node_wide <= dialect.status_resources


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_declares_what_the_agent_writes_on_nodes_and_pods(name: str) -> None:
    dialect = DIALECTS[name]
    described = dialect.describe_node(
        LARGEST, NodeSoftware(driver_version="550.1", isolation_available=True)
    )
    written = [*shown(name), described]
    held = lease("u1", "n1", share(), dialect=name)
    containers = frozenset(share.container for share in held.shares)
    notes = [
        dialect.allocated_annotations(held, containers),
        dialect.failed_annotations(held),
    ]

    annotations = {key for each in written for key in (*each.annotations, *each.annotation_entries)}
    assert annotations == dialect.node_annotations - {HANDSHAKE}
    objects = {one.collection for each in written for one in each.objects}
    assert objects == dialect.node_objects
    labels = {key for each in written for key in (*each.labels, *each.own_labels)}
    assert labels == dialect.node_labels
    assert {key for each in notes for key in each} == dialect.agent_annotations


@pytest.mark.parametrize("name", DIALECTS)
def test_no_dialect_writes_what_kais_own_components_write_and_obey(name: str) -> None:
    dialect = DIALECTS[name]
    held = lease("u1", "n1", share(), dialect=name, memo="")
    containers = frozenset(share.container for share in held.shares)
    written = {
        *dialect.node_annotations,
        *dialect.node_labels,
        *dialect.agent_annotations,
        *dialect.allocated_annotations(held, containers),
        *dialect.failed_annotations(held),
    }
    if name != "koordinator":  # its annotations need what was requested
        written |= dialect.binding_annotations(held, 0.0).keys()

    assert [key for key in written if is_kais_own(key)] == []


@pytest.mark.parametrize("name", DIALECTS)
def test_no_pod_may_mount_over_what_a_lease_mounts(name: str) -> None:
    half = share(LARGEST[0].uuid, cores_percent=50, slotted=True)
    held = lease("u1", "n1", half, dialect=name)
    known = {device.uuid: device for device in LARGEST}
    paths = Paths(library="/l", preload="/p", containers="/c")

    mounts = DIALECTS[name].container_setup(held, "main", known, paths).mounts

    assert [mount for mount in mounts if not lease_conflict(mount.container_path)] == []


@pytest.mark.parametrize("name", DIALECTS)
def test_no_resource_is_served_and_in_node_status_at_once(name: str) -> None:
    assert not any(each.served.keys() & each.node_status.keys() for each in shown(name))


def test_resources_that_two_dialects_serve_have_one_list() -> None:
    for strategy in (Strategy.AUTO, Strategy.NUMBER):
        lists: dict[str, set[tuple[str, ...]]] = {}
        for dialect in DIALECTS.values():
            for resource, ids in dialect.advertise(LARGEST, strategy).served.items():
                lists.setdefault(resource, set()).add(tuple(entry.id for entry in ids))
        assert all(len(different) == 1 for different in lists.values())


def test_no_two_dialects_write_one_amount_or_one_annotation_of_a_node() -> None:
    for written in ("node_status", "annotations"):
        keys = [
            key
            for dialect in DIALECTS.values()
            for key in getattr(dialect.advertise(SMALL, Strategy.AUTO), written)
        ]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize("strategy", [Strategy.AUTO, Strategy.NUMBER])
@pytest.mark.parametrize("name", DIALECTS)
def test_no_list_of_sixteen_devices_of_192_gib_nears_the_kubelets_limit(
    name: str, strategy: str
) -> None:
    for resource, ids in DIALECTS[name].advertise(LARGEST, strategy).served.items():
        check_list(resource, ids)
        assert list_size_bytes(ids) < KUBELETS_LIMIT_BYTES // 4
        assert len({entry.id for entry in ids}) == len(ids)
        assert all(len(entry.id) <= MAX_ID_LENGTH for entry in ids)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_kubelet_with_sixteen_devices_in_full_use_reads_a_list_within_a_second(
    name: str,
) -> None:
    cores = DIALECTS["tencent"].advertise(LARGEST, Strategy.AUTO).served["tencent.com/vcuda-core"]
    for ids in DIALECTS[name].advertise(LARGEST, Strategy.AUTO).served.values():
        assert len(ids) * (len(cores) + MAX_PODS) <= LOOKUPS_IN_A_SECOND
    assert MAX_UNITS * (MAX_UNITS + MAX_PODS) <= LOOKUPS_IN_A_SECOND


def test_a_node_of_all_dialects_serves_every_resource_that_one_of_them_needs() -> None:
    served = advertisement_of(DIALECTS.values(), LARGEST, Strategy.AUTO).served

    needed = [d.served for d in DIALECTS.values()]
    assert all(served.keys() & each for each in needed)
    assert all(served[resource] for resource in served)


def test_ids_never_change_when_a_device_fails_or_another_is_added() -> None:
    ill = (LARGEST[0], *LARGEST[2:])
    for dialect in DIALECTS.values():
        before = dialect.advertise(LARGEST, Strategy.AUTO).served
        after = dialect.advertise(ill, Strategy.AUTO).served
        for resource, ids in after.items():
            kept = {entry.id: entry.device for entry in before[resource]}
            assert all(kept[entry.id] == entry.device for entry in ids)


ONE_OF_EACH = {
    "volcano-vgpu": {"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 1000},
    "volcano-gpushare": {"volcano.sh/gpu-memory": 1000},
    "tencent": {"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 4},
    "nvidia": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1000},
    "koordinator": {
        "koordinator.sh/gpu-core": 30,
        "koordinator.sh/gpu-memory-ratio": 30,
        "koordinator.sh/gpu.shared": 1,
    },
}


def manifest_of(*limits: dict[str, int]) -> PodManifest:
    containers = (ContainerManifest(name=f"c{n}", limits=each) for n, each in enumerate(limits))
    return PodManifest(namespace=Namespace("ns"), containers=tuple(containers))


def test_every_dialect_parses_its_own_resources_and_no_other_does() -> None:
    assert ONE_OF_EACH.keys() == {name for name, it in DIALECTS.items() if it.resources}
    for name, limits in ONE_OF_EACH.items():
        read = {
            dialect.name
            for dialect in DIALECTS.values()
            if dialect.parse(manifest_of(limits), Rules()) is not None
        }
        assert read == {name}
        assert limits.keys() <= GPU_RESOURCES


@pytest.mark.parametrize("one", ONE_OF_EACH)
@pytest.mark.parametrize("other", ONE_OF_EACH)
def test_a_pod_that_mixes_two_dialects_is_refused_with_which_and_where(
    one: str, other: str
) -> None:
    if one == other:
        return
    for limits in (
        (ONE_OF_EACH[one], ONE_OF_EACH[other]),
        (ONE_OF_EACH[one] | ONE_OF_EACH[other],),
    ):
        with pytest.raises(RequestError) as refused:
            parse_pod_request(manifest_of(*limits), Rules())

        text = str(refused.value)
        assert text.startswith(
            (f"the pod mixes {one} and {other}: ", f"the pod mixes {other} and {one}: ")
        )
        assert f"container c0 requests {_word(one)}" in text
        assert f"container c{len(limits) - 1} requests {_word(other)}" in text


def _word(name: str) -> str:
    """The first word, sorted, that only this dialect knows."""
    known = [d.resources for d in DIALECTS.values() if d.name != name]
    return min(word for word in ONE_OF_EACH[name] if not any(word in words for words in known))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_resources_of_a_disabled_dialect_are_refused(name: str) -> None:
    others = tuple(other for other in DIALECTS if other != name)

    with pytest.raises(RequestError, match=f"belongs to {name}, which is not enabled here"):
        parse_pod_request(manifest_of(ONE_OF_EACH[name]), Rules(enabled=others))


def test_annotations_of_a_disabled_dialect_are_refused_in_pods_that_need_them_read() -> None:
    pod = replace(manifest_of({}), annotations={"gpu-fraction": "0.5"}, scheduler="kai-scheduler")

    with pytest.raises(RequestError, match="annotation gpu-fraction belongs to kai, which is not"):
        parse_pod_request(pod, Rules(disabled=("kai",)))


def test_every_annotation_that_a_dialect_reads_is_a_request_annotation() -> None:
    assert all(dialect.request_annotations <= REQUEST_ANNOTATIONS for dialect in DIALECTS.values())


def test_dcgm_exporter_finds_the_gpu_of_each_device_id() -> None:
    served = advertisement_of(DIALECTS.values(), LARGEST, Strategy.AUTO).served

    # Its rule for GPUs that are shared: NVIDIA/dcgm-exporter, transformation/kubernetes.go
    for ids in served.values():
        found = {name: each.device for name, each in ids.items()}
        assert found == {name: name.split("::")[0] for name in ids if "::" in name}
