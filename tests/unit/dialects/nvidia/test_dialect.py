"""nvidia.com/gpu, plain and with HAMi's resources: requests and container setup."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.dialects import DIALECTS
from shared.dialects.advertised import Strategy
from shared.dialects.dialect import ContainerManifest, Rules
from shared.dialects.nvidia.dialect import amount_changes
from shared.dialects.pod_requests import parse_pod_request
from shared.model.device import (
    DeviceMode,
    DeviceUse,
    MigLayout,
    MigProfile,
    device_refusal,
    required_memory_mib,
)
from shared.model.errors import RequestError
from shared.model.lease import MIB, bookings
from shared.model.request import (
    DeviceOrder,
    GpuRequest,
    NodeOrder,
    PodRequest,
    SharingPolicy,
    TopologyScope,
)
from tests.support.dialects.builders import (
    PATHS,
    RULES,
    container_with,
    device,
    leased,
    pod,
    share_of,
)

HAMI = DIALECTS["nvidia"]
GPU = "nvidia.com/gpu"


def limits_of(**amounts: int) -> dict[str, int]:
    return {f"nvidia.com/{key.replace('_', '-')}": amount for key, amount in amounts.items()}


def gpus(name: str = "c", /, **amounts: int) -> ContainerManifest:
    return container_with(name, limits=limits_of(**amounts))


def read_one(notes: dict[str, str] | None = None, /, **amounts: int) -> GpuRequest:
    (request,) = parse_pod_request(pod(gpus(**amounts), notes=notes), RULES).containers
    return request


def read_notes(rules: Rules = RULES, gpu: int = 1, /, **notes: str) -> PodRequest:
    keys = {
        "node": "hami.io/node-scheduler-policy",
        "devices": "hami.io/gpu-scheduler-policy",
        "weights": "hami.io/device-scoring-weights",
        "numa": "nvidia.com/numa-bind",
        "mode": "nvidia.com/vgpu-mode",
        "use": "nvidia.com/use-gputype",
        "nouse": "nvidia.com/nouse-gputype",
        "uuid": "nvidia.com/use-gpuuuid",
        "nouuid": "nvidia.com/nouse-gpuuuid",
    }
    written = {keys[name]: text for name, text in notes.items()}
    return parse_pod_request(pod(gpus(gpu=gpu, gpumem=1000), notes=written), rules)


@pytest.mark.parametrize(
    ("amounts", "mib", "cores", "company"),
    [
        ({"gpu": 1}, 16384, 100, SharingPolicy.EXCLUSIVE),
        ({"gpu": 1, "gpumem": 3000}, 3000, 0, SharingPolicy.SHARED),
        ({"gpu": 1, "gpumem": 3000, "gpucores": 30}, 3000, 30, SharingPolicy.SHARED),
        ({"gpu": 1, "gpumem": 3000, "gpucores": 100}, 3000, 100, SharingPolicy.EXCLUSIVE),
        ({"gpu": 1, "gpumem_percentage": 33}, 5406, 0, SharingPolicy.SHARED),
        ({"gpu": 1, "gpumem_percentage": 100}, 16384, 100, SharingPolicy.EXCLUSIVE),
        ({"gpu": 1, "gpucores": 30}, 16384, 30, SharingPolicy.SHARED),
        ({"gpu": 1, "gpumem": 0}, 16384, 100, SharingPolicy.EXCLUSIVE),
        ({"gpu": 1, "gpumem": 3000, "gpumem_percentage": 50}, 3000, 0, SharingPolicy.SHARED),
    ],
    ids=str,
)
def test_hami_requests_have_hamis_meaning(
    amounts: dict[str, int], mib: int, cores: int, company: SharingPolicy
) -> None:
    request = read_one(**amounts)
    (booking,) = bookings([share_of(request, device())])

    assert (booking.memory_mib, booking.cores_percent, booking.sharing) == (mib, cores, company)


def test_hami_memory_is_multiplied_by_the_nodes_factor_and_a_percentage_is_not() -> None:
    card = device(unit_mib=1024)

    assert required_memory_mib(read_one(gpu=1, gpumem=3), card) == 3072
    assert required_memory_mib(read_one(gpu=1, gpumem_percentage=33), card) == 5406


@pytest.mark.parametrize(
    ("amounts", "text"),
    [
        ({"gpumem": 3000}, "gpumem needs nvidia.com/gpu of 1 or more"),
        ({"gpucores": 30}, "gpucores needs nvidia.com/gpu of 1 or more"),
        ({"gpu": 0, "gpumem_percentage": 30}, "gpumem-percentage needs nvidia.com/gpu"),
        ({"priority": 1}, "priority needs nvidia.com/gpu"),
        ({"gpu": 1, "gpucores": 101}, "gpucores must be 0 to 100 percent of a GPU, got 101"),
        ({"gpu": 1, "gpumem_percentage": 101}, "gpumem-percentage must be 1 to 100, got 101"),
        ({"gpu": 1, "gpumem": -1}, "gpumem must not be negative"),
    ],
    ids=str,
)
def test_hami_malformed_requests_are_refused_with_container_and_rule(
    amounts: dict[str, int], text: str
) -> None:
    with pytest.raises(RequestError, match=text) as refused:
        read_one(**amounts)

    assert "container c" in str(refused.value)


@pytest.mark.parametrize("limits", [{}, limits_of(gpu=0), {"cpu": 1}])
def test_limits_without_a_gpu_have_no_request(limits: dict[str, int]) -> None:
    assert parse_pod_request(pod(container_with(limits=limits)), RULES).containers == ()


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        (limits_of(gpumem=3000), 1),
        (limits_of(gpucores=30), 1),
        (limits_of(gpu=0, gpumem_percentage=50), 1),
        (limits_of(gpu=4, gpumem=3000), 4),
        ({"cpu": 1}, None),
        (limits_of(priority=1), None),
    ],
)
def test_hami_adds_a_missing_number_of_gpus(limits: dict[str, int], count: int | None) -> None:
    completed = {**limits, **amount_changes(limits)}

    assert completed.get(GPU) == count
    assert {**completed, GPU: 0} == {**limits, GPU: 0}


def test_hami_a_device_with_all_cores_reserved_refuses_even_shares_without_cores() -> None:
    request = read_one(gpu=1, gpumem=1000)

    all_cores, not_all = (DeviceUse(cores_percent=cores, shares=1) for cores in (100, 99))

    assert device_refusal(request, device(), all_cores, memory_mib=1000)
    assert not device_refusal(request, device(), not_all, memory_mib=1000)


def test_hami_slots_limit_shares() -> None:
    request = read_one(gpu=1, gpumem=1)

    assert device_refusal(request, device(slots=2), DeviceUse(shares=2), memory_mib=1)


def test_plain_nvidia_pods_get_whole_devices_and_nothing_but_their_names() -> None:
    held = leased(pod(gpus(gpu=2)), (3, 1))
    setup = HAMI.container_setup(held, "c", {}, PATHS)

    assert dict(setup.environment) == {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-3"}
    assert setup.mounts == ()
    assert parse_pod_request(pod(gpus(gpu=2)), RULES).prefer_links


def test_hami_a_container_gets_hamis_environment_and_mounts() -> None:
    held = leased(pod(gpus(gpu=2, gpumem=3000, gpucores=30, priority=0)), (1, 0))
    setup = HAMI.container_setup(held, "c", {}, PATHS)

    cache = setup.environment["CUDA_DEVICE_MEMORY_SHARED_CACHE"]
    assert cache.startswith("/usr/local/vgpu/")
    assert cache.endswith(".cache")
    assert dict(setup.environment) == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "30",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": cache,
        "GPU_CORE_UTILIZATION_POLICY": "force",
        "LIBCUDA_LOG_LEVEL": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_TASK_PRIORITY": "0",
    }
    assert [(m.container_path, m.host_path, m.read_only) for m in setup.mounts] == [
        ("/usr/local/vgpu", "/var/c/u1_c", False),
        ("/usr/local/vgpu/libvgpu.so", "/opt/l/libvgpu.so", True),
        ("/tmp/cudevshr.cache", f"/var/c/u1_c/{Path(cache).name}", False),
        ("/tmp/vgpulock", "/var/c/u1_c.lock", False),
        ("/overrideEnv", "/var/c/u1_c.env", True),
        ("/etc/ld.so.preload", "/opt/l/preload", True),
    ]


def test_hami_priority_belongs_to_the_container_that_requests_it() -> None:
    manifest = pod(gpus("a", gpu=1, gpumem=1, priority=1), gpus("b", gpu=1, gpumem=1))
    held = leased(manifest, (0,), (0,))

    given = {name: HAMI.container_setup(held, name, {}, PATHS).environment for name in "ab"}

    assert given["a"]["CUDA_TASK_PRIORITY"] == "1"
    assert "CUDA_TASK_PRIORITY" not in given["b"]


def test_hami_default_policies_pack_nodes_and_spread_devices() -> None:
    request = read_notes()

    assert (request.node_order, request.device_order, request.allocation_weights) == (
        NodeOrder.BINPACK,
        DeviceOrder.LEAST_ALLOCATED,
        (1, 1, 1),
    )
    assert (request.topology_scope, request.prefer_links, request.containers[0].sharing) == (
        TopologyScope.NODE,
        False,
        SharingPolicy.SHARED,
    )


@pytest.mark.parametrize(
    ("chain", "gpu", "order", "links", "company"),
    [
        ("binpack", 1, DeviceOrder.MOST_ALLOCATED, False, SharingPolicy.SHARED),
        ("numa,binpack", 2, DeviceOrder.MOST_ALLOCATED, True, SharingPolicy.SHARED),
        ("spread, binpack", 1, DeviceOrder.LEAST_ALLOCATED, False, SharingPolicy.SHARED),
        ("mutex", 1, DeviceOrder.LEAST_ALLOCATED, False, SharingPolicy.IDLE_DEVICE),
        ("mutex,binpack", 1, DeviceOrder.MOST_ALLOCATED, False, SharingPolicy.IDLE_DEVICE),
        ("topology-aware", 1, DeviceOrder.LEAST_LINKED, True, SharingPolicy.SHARED),
        ("topology-aware", 4, DeviceOrder.LEAST_ALLOCATED, True, SharingPolicy.SHARED),
        ("", 1, DeviceOrder.LEAST_ALLOCATED, False, SharingPolicy.SHARED),
    ],
)
def test_hami_a_chain_of_policies_orders_and_filters_devices(
    chain: str, gpu: int, order: DeviceOrder, links: bool, company: SharingPolicy
) -> None:
    request = read_notes(RULES, gpu, devices=chain)

    assert (request.device_order, request.prefer_links) == (order, links)
    assert request.containers[0].sharing is company


def test_hami_the_operators_policies_are_defaults() -> None:
    rules = Rules(node_scheduler_policy="spread", gpu_scheduler_policy="mutex,binpack")

    assert read_notes(rules).device_order is DeviceOrder.MOST_ALLOCATED
    assert read_notes(rules).containers[0].sharing is SharingPolicy.IDLE_DEVICE
    assert read_notes(rules).node_order is NodeOrder.SPREAD
    assert read_notes(rules, node="binpack", devices="spread").device_order is (
        DeviceOrder.LEAST_ALLOCATED
    )
    assert read_notes(rules, node="binpack").node_order is NodeOrder.BINPACK


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("slot=1,core=1,memory=3", (1, 1, 3)),
        ("memory=3", (1, 1, 3)),
        ("slot=0, core=0.5", (0, 500, 1000)),
    ],
)
def test_hami_scoring_weights(text: str, weights: tuple[int, int, int]) -> None:
    assert read_notes(weights=text).allocation_weights == weights


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        ({"devices": "binpak"}, "gpu-scheduler-policy: 'binpak' must be one of binpack, spread"),
        ({"node": "pack"}, "node-scheduler-policy must be one of binpack, spread, fragmentation"),
        ({"weights": "slots=1"}, "must look like slot=1,core=1,memory=3"),
        ({"weights": "slot=-1"}, "slot must be a number from 0 to 1000, got '-1'"),
        ({"numa": "yes"}, "numa-bind must be true or false, got 'yes'"),
        ({"mode": "mps"}, "vgpu-mode must be hami-core or mig, got 'mps'"),
    ],
    ids=str,
)
def test_hami_invalid_annotations_are_refused(notes: dict[str, str], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        read_notes(**notes)


def test_hami_numa_bind_keeps_a_containers_devices_on_one_numa_node() -> None:
    assert read_notes(numa="true").topology_scope is TopologyScope.NUMA
    assert read_notes(numa="false").topology_scope is TopologyScope.NODE


def test_hami_selections_are_trimmed_and_all_of_them_count() -> None:
    selection = read_notes(
        use="A100, ,V100", nouse="SXM", uuid=" GPU-a,GPU-b", nouuid="GPU-b"
    ).selection

    assert selection.types == ("A100", "V100")
    assert selection.not_types == ("SXM",)
    assert (selection.uuids, selection.not_uuids) == (("GPU-a", "GPU-b"), ("GPU-b",))


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("mig", "mig"), ("hami-core", "hami-core"), ("mig,hami-core", None), ("", None)],
)
def test_hami_a_pod_may_choose_the_mode_of_its_devices(mode: str, wanted: str | None) -> None:
    assert read_notes(mode=mode).selection.mode == wanted


def test_hami_instances_serve_shares_and_whole_devices_only_in_mig_mode() -> None:
    mig = {"nvidia.com/vgpu-mode": "mig"}

    assert read_one(gpu=1, gpumem=1000).mig_allowed
    assert not read_one(gpu=1).mig_allowed
    demanded = read_one(mig, gpu=1)
    assert (demanded.mig_allowed, demanded.whole, demanded.sharing) == (
        True,
        False,
        SharingPolicy.SHARED,
    )


def test_hami_the_node_serves_slots_and_shows_memory_and_cores() -> None:
    layout = MigLayout(name="g", profiles=(MigProfile(name="1g.10gb", memory_mib=9728, count=7),))
    cards = [
        device(0, 11178, unit_mib=10),
        device(1, 11178, unit_mib=10, healthy=False),
        device(2, 81920, unit_mib=10, mode=DeviceMode.MIG, layouts=(layout,)),
    ]
    shown = HAMI.advertise(cards, Strategy.AUTO)

    served = shown.served[GPU]
    assert [entry.id for entry in served][:2] == ["GPU-0-0", "GPU-0-1"]
    assert (len(served), sum(entry.healthy for entry in served)) == (27, 17)
    assert shown.node_status == {"nvidia.com/gpumem": 1117 + 8192, "nvidia.com/gpucores": 200}


@pytest.mark.parametrize("scheduler", ["hami-scheduler", "leasehold", "volcano", "default"])
def test_pods_of_all_schedulers_but_koordinators_are_read_here(scheduler: str) -> None:
    assert parse_pod_request(pod(gpus(gpu=1), scheduler=scheduler), RULES).dialect == "nvidia"
    koordinators = parse_pod_request(pod(gpus(gpu=1), scheduler="koord-scheduler"), RULES)
    assert koordinators.dialect == "koordinator"


@pytest.mark.parametrize(
    ("amounts", "text"),
    [
        ({"gpu": 1, "gpumem": 3000}, "gpumem belongs to nvidia, and this pod uses koordin"),
        ({"gpumem": 3000}, "gpumem has no meaning in pods for the scheduler 'koord-scheduler'"),
    ],
)
def test_hamis_resources_in_pods_for_koordinators_scheduler_are_refused(
    amounts: dict[str, int], text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        parse_pod_request(pod(gpus(**amounts), scheduler="koord-scheduler"), RULES)


amounts = st.fixed_dictionaries(
    {"gpu": st.integers(1, 4)},
    optional={
        "gpumem": st.integers(0, 16384),
        "gpumem_percentage": st.integers(1, 100),
        "gpucores": st.integers(0, 100),
    },
)


@given(st.lists(amounts, min_size=1, max_size=3))
def test_the_lease_has_exactly_what_was_requested(requested: list[dict[str, Any]]) -> None:
    card = device(memory_mib=16381)
    containers = [gpus(f"c{n}", **wanted) for n, wanted in enumerate(requested)]
    wanted = parse_pod_request(pod(*containers), RULES)
    shares = [share_of(r, card) for r in wanted.containers for _ in range(r.gpus)]

    def mib(written: dict[str, int]) -> int:
        """Percent of the device, rounded down; an amount wins; all of it otherwise."""
        return written.get("gpumem") or 16381 * written.get("gpumem_percentage", 100) // 100

    def cores(written: dict[str, int]) -> int:
        everything = mib(written) == 16381 and not written.get("gpumem")
        return written.get("gpucores") or (100 if everything else 0)

    assert sum(s.limit_bytes for s in shares) == sum(
        written["gpu"] * mib(written) * MIB for written in requested
    )
    assert sum(s.cores_percent for s in shares) == sum(
        written["gpu"] * cores(written) for written in requested
    )
