"""Usage of containers against their leases, and violations."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node_agent.gpus.inventory import DeviceSample, GpuProcess
from services.node_agent.isolation.region import InvalidRegion, Region, decode
from services.node_agent.isolation.region_image import RegionSeed, image_of
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.kubelet.pods import KubeletContainer, KubeletPod, ProcessOrigin
from services.node_agent.usage.leased_containers import LeasedContainer, Scan
from services.node_agent.usage.snapshot import UsageSnapshot, build_snapshot
from shared.model.events.node_events import ViolationReason
from shared.model.leases.lease import ClaimAllocation
from shared.model.names import Namespace, NodeName, PodUid
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.regions import process

MIB = 1 << 20
GPUS = (share(0).device, share(1).device)
PLACE = Path("/c/u1_main/r")


def tenant(
    uid: str = "u1", *shares: Any, container: str = "main", held: bool = True
) -> LeasedContainer:
    given = shares or (share(0, 1000, container=container),)
    return LeasedContainer(
        lease=lease_of(uid, *given),
        name=container,
        region_path=PLACE if held else None,
        seed=seed(*(one for one in given if one.container == container)) if held else None,
    )


def claim_request(
    request: str, *pods: str, claim: str = "claim-1", gpu: int = 0, held: bool = True
) -> LeasedContainer:
    own = share(gpu, 1000, container=request)
    allocation = ClaimAllocation(generation="g", consumers=tuple(map(PodUid, pods)))
    held_by = tenant(claim, own, container=request, held=held)
    return replace(held_by, lease=lease_of(claim, own, name="shared", claim=allocation))


def seed(*shares: Any) -> RegionSeed:
    return RegionSeed(
        memory_bytes=tuple(one.memory_mib * MIB for one in shares),
        cores_percent=tuple(one.cores_percent for one in shares),
    )


def region(
    *shares: Any, pids: Mapping[int, tuple[int, ...]] | None = None, uuids: tuple[str, ...] = ()
) -> Region:
    image = bytearray(image_of(seed(*(shares or (share(0, 1000),)))))
    for index, (pid, totals) in enumerate((pids or {}).items()):
        process(image, index, pid, totals=totals)
    for number, uuid in enumerate(uuids):
        at = V1_2.uuids + 96 * number
        image[at : at + len(uuid)] = uuid.encode()
    return decode(V1_2, image)


def sample(*processes: GpuProcess, gpu: int = 0) -> DeviceSample:
    return DeviceSample(device=GPUS[gpu], index=gpu, model="T4", processes=processes)


def using(pid: int, mib: int | None = 100) -> GpuProcess:
    return GpuProcess(pid=pid, memory_bytes=None if mib is None else mib * MIB, busy_percent=30)


def origin(pod: str | None, inner: int = 1, container: str = "") -> ProcessOrigin:
    return ProcessOrigin(pod=PodUid(pod) if pod else None, container_id=container, inner_pid=inner)


def kubelet_pod(uid: str, *containers: str, **ids: str) -> KubeletPod:
    return KubeletPod(
        uid=PodUid(uid),
        namespace=Namespace("default"),
        name=f"pod-{uid}",
        containers=tuple(KubeletContainer(name=name) for name in containers),
        container_ids=ids,
    )


def snapshot_of(
    tenants: list[LeasedContainer],
    found: Region | InvalidRegion | None,
    samples: list[DeviceSample],
    origins: dict[int, ProcessOrigin],
    *pods: KubeletPod,
) -> UsageSnapshot:
    regions = {one.key: found for one in tenants if one.region_path is not None}
    by_uid = {pod.uid: pod for pod in pods}
    return build_snapshot(
        Scan(
            node=NodeName("node"),
            containers=tenants,
            regions=regions,
            devices=samples,
            origins=origins,
            pods=by_uid,
            complete=True,
        )
    )


def rules(snapshot: UsageSnapshot) -> list[tuple[str, str, str]]:
    return [(one.reason, one.pod, one.container) for one in snapshot.violations]


USED = {7: (300 * MIB,)}
OWN = {70: origin("u1", 7), 71: origin("u1", 8)}
OVERRUN = ViolationReason.OVERRUN
TAMPERED = ViolationReason.TAMPERED
LOST = ViolationReason.ISOLATION_LOST
UNLEASED = ViolationReason.UNLEASED
LINK = InvalidRegion("it is a symbolic link")
ALTERED = f"{99_000 * MIB} bytes instead of {1000 * MIB}"
ONE_RULE: list[
    tuple[LeasedContainer, Region | InvalidRegion | None, list[DeviceSample], Any, str]
] = [
    (tenant(), region(pids=USED), [sample(using(70, 1000 + 512))], None, ""),
    (tenant(), region(pids=USED), [sample(using(70, 1000 + 513))], OVERRUN, "its share has"),
    (tenant(), None, [], LOST, "has lost the file with its GPU limits"),
    (tenant(), LINK, [], TAMPERED, "symbolic link"),
    (tenant(), region(share(0, 99_000)), [], TAMPERED, ALTERED),
    (tenant(held=False), None, [sample(using(70))], None, ""),
    (tenant(), region(pids=USED), [sample(using(70), gpu=1)], UNLEASED, f"GPU {GPUS[1]} without"),
    (tenant(), region(), [sample(using(72))], None, ""),
    (tenant(), region(pids=USED), [sample(using(70), using(71))], LOST, "PIDs 71 on the node"),
]


@pytest.mark.parametrize(("held", "found", "samples", "rule", "text"), ONE_RULE)
def test_a_container_breaks_one_rule_or_none(
    held: LeasedContainer,
    found: Region | InvalidRegion | None,
    samples: list[DeviceSample],
    rule: ViolationReason | None,
    text: str,
) -> None:
    snapshot = snapshot_of([held], found, samples, OWN)

    assert rules(snapshot) == ([] if rule is None else [(rule, "u1", "main")])
    assert all(text in one.message for one in snapshot.violations)
    lost = held.region_path is not None and (rule is LOST or isinstance(found, InvalidRegion))
    assert snapshot.containers[0].isolation_lost is lost
    unleased = int(rule is UNLEASED)
    assert (sum(snapshot.unleased.values()), snapshot.unattributed) == (unleased, 0)


@pytest.mark.parametrize(
    ("samples", "by_driver", "measured"),
    [
        ([sample(using(70, 100))], 100, 900),
        ([sample(using(70, None))], None, 900),
        ([], None, 900),
        ([sample(using(70, 1513))], 1513, 1513),
    ],
)
def test_hami_core_36_the_larger_of_driver_and_region_usage_counts_to_the_byte(
    samples: list[DeviceSample], by_driver: int | None, measured: int
) -> None:
    (use,) = snapshot_of([tenant()], region(pids={7: (900 * MIB,)}), samples, OWN).containers

    (one,) = use.shares
    assert one.driver_bytes == (None if by_driver is None else by_driver * MIB)
    assert (one.measured_bytes, one.overrun_bytes) == (
        measured * MIB,
        max(0, measured - 1000) * MIB,
    )


def test_a_process_of_a_pod_without_a_lease_is_named_once_per_device() -> None:
    pod = kubelet_pod("u9", "main")
    snapshot = snapshot_of(
        [], None, [sample(using(90), using(91)), sample(using(90), gpu=1)],
        {90: origin("u9"), 91: origin("u9")}, pod,
    )  # fmt: skip

    assert rules(snapshot) == [(ViolationReason.UNLEASED, "u9", "main")] * 2
    assert {one.device for one in snapshot.violations} == set(GPUS)
    assert {(one.namespace, one.name) for one in snapshot.violations} == {("default", "pod-u9")}
    assert snapshot.unleased == {GPUS[0]: 2, GPUS[1]: 1}


def test_a_host_process_counts_and_is_no_violation_of_a_pod() -> None:
    snapshot = snapshot_of([], None, [sample(using(90))], {90: origin(None)})

    assert not snapshot.violations
    assert snapshot.unleased == {GPUS[0]: 1}


def test_the_runtimes_container_id_distinguishes_two_containers() -> None:
    a = tenant("u1", share(0, 1000, container="a"), share(0, 2000, container="b"), container="a")
    b = LeasedContainer(lease=a.lease, name="b")
    pod = kubelet_pod("u1", "a", "b", "c", ida="a", idb="b", idc="c")
    held = region(pids={7: (MIB,)})
    origins = {
        70: origin("u1", 7, "ida"),
        71: origin("u1", 7, "idb"),
        72: origin("u1", 7, "idc"),
        73: origin("u1", 7, "new"),
    }

    snapshot = snapshot_of(
        [a, b], held, [sample(*(using(pid, pid) for pid in origins))], origins, pod
    )

    assert [use.shares[0].driver_bytes for use in snapshot.containers] == [70 * MIB, 71 * MIB]
    assert rules(snapshot) == [(ViolationReason.UNLEASED, "u1", "c")]
    assert snapshot.unattributed == 1, (
        "whose container is not in the pod's status yet is not guessed"
    )


def test_the_region_counts_by_its_own_order_only_if_it_names_the_leased_devices() -> None:
    both = (share(0, 1000), share(1, 2000))
    mixed = GPUS[::-1]
    wrong = (GPUS[1], "GPU-00000000-0000")
    found = [
        snapshot_of([tenant("u1", *both)], region(*both, pids={7: (5, 6)}, uuids=uuids), [], {})
        for uuids in (mixed, wrong, ())
    ]

    assert [
        [one.region.total for one in snapshot.containers[0].shares if one.region]
        for snapshot in found
    ] == [[6, 5], [5, 6], [5, 6]]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),
            st.sampled_from(["u1", "u2", "u3", None]),
            st.integers(0, 1),
            st.integers(0, 3000),
        ),
        max_size=8,
    )
)
def test_every_byte_is_counted_for_its_own_pod_only(
    running: list[tuple[int, str | None, int, int]],
) -> None:
    tenants = [tenant("u1", held=False), tenant("u2", share(1, 500), held=False)]
    origins = {pid: origin(pod) for pid, pod, _, _ in running}
    chosen = {(gpu, pid): mib for pid, _, gpu, mib in running}
    samples = [
        sample(*(using(pid, mib) for (at, pid), mib in chosen.items() if at == gpu), gpu=gpu)
        for gpu in (0, 1)
    ]

    snapshot = snapshot_of(tenants, None, samples, origins, kubelet_pod("u3", "main"))

    for use, gpu in zip(snapshot.containers, (0, 1), strict=True):
        pod = use.container.lease.pod
        own = [mib for (at, pid), mib in chosen.items() if (at, origins[pid].pod) == (gpu, pod)]
        assert use.shares[0].driver_bytes == sum(own) * MIB
    counted = sum(use.shares[0].processes for use in snapshot.containers)
    assert counted + sum(snapshot.unleased.values()) == len(chosen)


def test_processes_of_all_pods_of_a_claim_use_its_share() -> None:
    held = region(pids={7: (200 * MIB,), 8: (100 * MIB,)})
    origins = {70: origin("u1", 7), 71: origin("u2", 8), 72: origin("u3", 9)}
    processes = sample(using(70), using(71), using(72))

    snapshot = snapshot_of(
        [claim_request("gpu", "u1", "u2")], held, [processes], origins, kubelet_pod("u3", "main")
    )

    (use,) = snapshot.containers
    assert [one.processes for one in use.shares] == [2]
    assert not use.isolation_lost
    assert rules(snapshot) == [(ViolationReason.UNLEASED, "u3", "main")]


def test_a_claim_beyond_its_lease_is_reported_as_the_claim() -> None:
    (found,) = snapshot_of(
        [claim_request("gpu", "u1", held=False)],
        None,
        [sample(using(70, 2000))],
        {70: origin("u1", 7)},
    ).violations

    assert (found.reason, found.pod, found.name) == (ViolationReason.OVERRUN, "claim-1", "shared")
    assert found.claim
    assert found.message.startswith("request gpu uses")


def test_a_container_uses_its_own_share_before_a_claim_of_its_pod() -> None:
    tenants = [tenant("u1", held=False), claim_request("gpu", "u1", held=False)]
    pod = kubelet_pod("u1", "main", "other", a="main", b="other")
    origins = {70: origin("u1", 7, "a"), 71: origin("u1", 8, "b")}

    snapshot = snapshot_of(tenants, None, [sample(using(70, 10), using(71, 20))], origins, pod)

    used = [use.shares[0].measured_bytes // MIB for use in snapshot.containers]
    assert used == [10, 20]
    assert not snapshot.violations


def test_which_of_two_requests_on_one_device_a_process_uses_is_not_known() -> None:
    tenants = [claim_request(name, "u1", held=False) for name in ("one", "two")]
    tenants.append(claim_request("three", "u1", gpu=1, held=False))
    devices = [sample(using(70)), sample(using(70), gpu=1)]

    snapshot = snapshot_of(tenants, None, devices, {70: origin("u1", 7)})

    assert snapshot.unattributed == 1
    assert [use.shares[0].processes for use in snapshot.containers] == [0, 0, 1]
    assert not snapshot.violations
