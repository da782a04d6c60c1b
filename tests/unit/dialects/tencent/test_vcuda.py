"""vcuda: requests, annotations and container setup; the checklist of GPUSharing by number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.dialects import DIALECTS
from shared.dialects.advertised import Strategy
from shared.dialects.dialect import ContainerManifest
from shared.dialects.pod_requests import parse_pod_request
from shared.model.device import DeviceMode, DeviceUse, device_refusal, required_memory_mib
from shared.model.errors import RequestError
from shared.model.lease import MIB, bookings
from shared.model.lease_copy import dump_lease, load_lease
from shared.model.request import DeviceOrder, GpuRequest, SharingPolicy
from tests.support.dialects.builders import (
    PATHS,
    RULES,
    container_with,
    device,
    lease_of,
    leased,
    pod,
    share_of,
)

TENCENT = DIALECTS["tencent"]
CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"


def vcuda(
    name: str = "nvidia", /, core: int = 0, memory: int = 0, **facts: bool
) -> ContainerManifest:
    amounts = {CORE: core, MEMORY: memory}
    limits = {resource: amount for resource, amount in amounts.items() if amount}
    return container_with(name, limits=limits, **facts)


def read_one(core: int = 0, memory: int = 0) -> GpuRequest:
    (request,) = parse_pod_request(pod(vcuda(core=core, memory=memory)), RULES).containers
    return request


def test_gpusharing_1_half_a_gpu_needs_50_cores_and_4026531840_bytes_of_it() -> None:
    request = read_one(core=50, memory=15)
    exact = device(memory_mib=3840)

    assert (request.gpus, request.cores_percent, request.memory_bytes) == (1, 50, 4026531840)
    assert required_memory_mib(request, exact) == 3840
    half, more = DeviceUse(cores_percent=50, shares=1), DeviceUse(cores_percent=51, shares=1)
    assert not device_refusal(request, exact, half, memory_mib=3840)
    assert device_refusal(request, exact, more, memory_mib=3840)
    assert device_refusal(request, device(memory_mib=3839), DeviceUse(), memory_mib=3840)


def test_gpusharing_2_150_cores_are_refused_by_name() -> None:
    with pytest.raises(RequestError) as refused:
        read_one(core=150, memory=4)

    assert str(refused.value) == (
        'container "nvidia": tencent.com/vcuda-core=150 must be 1..99 or a multiple of 100'
    )


@pytest.mark.parametrize(
    ("core", "gpus", "cores", "whole"),
    [(1, 1, 1, False), (99, 1, 99, False), (100, 1, 0, True), (200, 2, 0, True)],
)
def test_gpusharing_2_1_99_100_and_200_pass(core: int, gpus: int, cores: int, whole: bool) -> None:
    request = read_one(core=core, memory=4)

    assert (request.gpus, request.cores_percent, request.whole) == (gpus, cores, whole)


@pytest.mark.parametrize(
    ("core", "memory", "text"),
    [
        (50, 0, r"vcuda-core=50 is less than a GPU and needs tencent.com/vcuda-memory"),
        (0, 4, r"vcuda-memory=4 needs tencent.com/vcuda-core beside it"),
    ],
)
def test_gpusharing_3_a_share_needs_both_resources(core: int, memory: int, text: str) -> None:
    with pytest.raises(RequestError, match=text) as refused:
        read_one(core=core, memory=memory)

    assert 'container "nvidia"' in str(refused.value)


def test_two_containers_of_50_without_memory_are_refused_though_they_add_up_to_a_gpu() -> None:
    with pytest.raises(RequestError, match='container "a"'):
        parse_pod_request(pod(vcuda("a", core=50), vcuda("b", core=50)), RULES)


@pytest.mark.parametrize("memory", [0, 1, 60])
def test_gpusharing_4_200_cores_are_two_whole_gpus_whatever_the_memory(memory: int) -> None:
    held = leased(pod(vcuda(core=200, memory=memory)), (3, 1))

    assert [(b.memory_mib, b.cores_percent, b.sharing) for b in bookings(held.shares)] == [
        (16384, 100, SharingPolicy.EXCLUSIVE)
    ] * 2
    assert TENCENT.container_setup(held, "nvidia", {}, PATHS).environment == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-3"
    }
    assert TENCENT.container_setup(held, "nvidia", {}, PATHS).mounts == ()


@pytest.mark.parametrize("unit", [1, 10, 1024])
def test_gpusharing_5_a_block_is_268435456_bytes_whatever_the_nodes_unit(unit: int) -> None:
    card = device(unit_mib=unit)
    request = read_one(core=1, memory=1)
    held = lease_of(parse_pod_request(pod(vcuda(core=1, memory=1)), RULES), share_of(request, card))

    assert request.memory_bytes == 268435456
    assert [share.limit_bytes for share in held.shares] == [268435456]
    given = TENCENT.container_setup(held, "nvidia", {}, PATHS).environment
    assert given["CUDA_DEVICE_MEMORY_LIMIT_0"] == "256m"


@pytest.mark.parametrize(
    ("core", "memory", "mib"), [(50, 15, 3840), (33, 30, 7680), (10, 64, 16384)]
)
def test_published_examples_of_conversions(core: int, memory: int, mib: int) -> None:
    assert required_memory_mib(read_one(core, memory), device()) == mib


def test_gpusharing_6_two_containers_get_slices_of_their_own() -> None:
    held = leased(pod(vcuda("a", core=30, memory=4), vcuda("b", core=20, memory=8)), (0,), (1,))

    limits = [
        TENCENT.container_setup(held, name, {}, PATHS).environment["CUDA_DEVICE_MEMORY_LIMIT_0"]
        for name in "ab"
    ]

    assert limits == ["1024m", "2048m"]
    assert [b.cores_percent for b in bookings(held.shares)] == [30, 20]


def test_gpusharing_7_gpus_of_init_and_later_containers_are_leased() -> None:
    manifest = pod(
        vcuda("warm", core=10, memory=2, init=True),
        container_with("plain"),
        vcuda("main", core=50, memory=4),
    )
    request = parse_pod_request(manifest, RULES)
    notes = TENCENT.binding_annotations(leased(manifest, (2,), (2,)), 1.0)

    assert [(c.container, c.init) for c in request.containers] == [("warm", True), ("main", False)]
    assert notes["tencent.com/predicate-gpu-idx-1"] == "2"
    assert "tencent.com/predicate-gpu-idx-0" not in notes


def test_a_gpu_of_a_sidecar_is_leased_beside_those_of_later_containers() -> None:
    side = vcuda("side", core=10, memory=2, init=True, sidecar=True)
    warm = vcuda("warm", core=10, memory=4, init=True)
    main = vcuda("main", core=10, memory=2)

    def leased_mib(*containers: ContainerManifest) -> list[int]:
        held = leased(pod(*containers), (0,), (0,), (0,))
        return [booking.memory_mib for booking in bookings(held.shares)]

    assert leased_mib(side, warm, main) == [3 * 512]
    assert leased_mib(warm, side, main) == [2 * 512]


def test_an_assignment_has_the_annotations_of_gpu_manager() -> None:
    notes = TENCENT.binding_annotations(leased(pod(vcuda(core=200)), (5, 2)), 1600000000.123456)

    assert notes.pop("tencent.com/predicate-time")[:15] == "160000000012345"
    assert notes == {
        "tencent.com/predicate-gpu-idx-0": "2,5",
        "tencent.com/predicate-node": "gpu-a",
        "tencent.com/gpu-assigned": "false",
    }


def test_a_pod_is_assigned_once_all_its_containers_have_their_gpus() -> None:
    held = leased(pod(vcuda("a", core=100), vcuda("b", core=100)), (0,), (1,))

    assert TENCENT.allocated_annotations(held, frozenset({"a"})) == {}
    assert TENCENT.allocated_annotations(held, frozenset("ab")) == {
        "tencent.com/gpu-assigned": "true"
    }
    assert TENCENT.failed_annotations(held) == {}


def test_a_share_is_limited_to_its_cores_whatever_the_limit_annotation_allows() -> None:
    notes = {"tencent.com/vcuda-core-limit": "80"}
    held = leased(pod(vcuda(core=30, memory=4), notes=notes), (0,))

    given = TENCENT.container_setup(held, "nvidia", {}, PATHS)

    assert given.environment["CUDA_DEVICE_SM_LIMIT"] == "30"
    assert [mount.container_path for mount in given.mounts] == [
        "/usr/local/vgpu/libvgpu.so",
        "/tmp/vgpu",
        "/tmp/cudevshr.cache",
        "/tmp/vgpulock",
        "/overrideEnv",
        "/etc/ld.so.preload",
    ]


@pytest.mark.parametrize(
    ("core", "memory", "told"),
    [
        (30, 4, ("30", str(1024 * MIB), "/dev/nvidia1")),
        (200, 0, ("200", str(2 * 16384 * MIB), "/dev/nvidia1,/dev/nvidia3")),
    ],
)
def test_the_runtime_gets_the_annotations_of_gpu_manager(
    core: int, memory: int, told: tuple[str, str, str]
) -> None:
    held = leased(pod(vcuda(core=core, memory=memory)), (3, 1) if core > 100 else (1,))

    given = TENCENT.container_setup(held, "nvidia", {}, PATHS).annotations

    assert dict(given) == dict(zip((CORE, MEMORY, "tencent.com/vcuda-device"), told, strict=True))


def test_a_limit_annotation_that_is_not_a_number_is_refused() -> None:
    notes = {"tencent.com/vcuda-core-limit": "half"}

    with pytest.raises(RequestError, match=r"vcuda-core-limit must be a whole number.*'half'"):
        parse_pod_request(pod(vcuda(core=30, memory=4), notes=notes), RULES)


def test_the_node_serves_hundredths_and_shows_the_blocks_of_all_its_memory() -> None:
    cards = [device(n, 11178) for n in range(8)]
    shown = TENCENT.advertise([*cards, device(8, 40960, mode=DeviceMode.MIG)], Strategy.AUTO)

    assert len(shown.served[CORE]) == 800
    assert shown.node_status == {MEMORY: 8 * 11178 // 256}
    assert 8 * (11178 // 256) < 8 * 11178 // 256, "floored once, not per card"


def test_an_unhealthy_gpu_keeps_its_ids_and_loses_its_blocks() -> None:
    shown = TENCENT.advertise([device(0, 1024, healthy=False), device(1, 2048)], Strategy.AUTO)

    assert sum(served.healthy for served in shown.served[CORE]) == 100
    assert shown.node_status == {MEMORY: 8}


def test_the_fullest_gpu_is_chosen_first() -> None:
    request = parse_pod_request(pod(vcuda(core=10, memory=1)), RULES)

    assert request.device_order is DeviceOrder.TIGHTEST
    assert request.triggers == (CORE,)


def test_amounts_of_zero_are_not_a_request() -> None:
    manifest = pod(container_with(limits={CORE: 0, MEMORY: 0}))

    assert parse_pod_request(manifest, RULES).containers == ()


def test_the_memo_is_kept_in_the_lease_copy() -> None:
    manifest = pod(container_with("plain"), vcuda("main", core=100))
    held = leased(manifest, (4,))
    back = load_lease(dump_lease(held), namespace=held.namespace, name=held.name)

    assert TENCENT.binding_annotations(back, 1.0)["tencent.com/predicate-gpu-idx-1"] == "4"
    assert not leased(pod(vcuda(core=100)), (4,)).memo, "the shares are enough"


amounts = st.tuples(st.integers(1, 99), st.integers(1, 64)) | st.tuples(
    st.integers(1, 8).map(lambda cards: 100 * cards), st.integers(0, 64)
)


@given(st.lists(amounts, min_size=1, max_size=4), st.sampled_from([1, 7, 1024]))
def test_the_lease_has_exactly_what_was_requested(
    requested: list[tuple[int, int]], unit: int
) -> None:
    card = device(memory_mib=81920, unit_mib=unit)
    containers = [vcuda(f"c{n}", core, memory) for n, (core, memory) in enumerate(requested)]
    wanted = parse_pod_request(pod(*containers), RULES)
    shares = [share_of(r, card) for r in wanted.containers for _ in range(r.gpus)]

    assert sum(share.cores_percent for share in shares) == sum(core for core, _ in requested)
    assert sum(TENCENT.id_count(share, CORE) for share in shares) == sum(
        core for core, _ in requested
    )
    assert sum(s.limit_bytes for s in shares if not s.whole) == sum(
        memory * 256 * MIB for core, memory in requested if core < 100
    )
    assert all(share.memory_mib == 81920 // unit * unit for share in shares if share.whole)
