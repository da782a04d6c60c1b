"""What a container gets in each dialect: variables, mounts and the runtime's annotations."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import pytest
from msgspec import structs

from shared.dialects import DIALECTS
from shared.model.devices.device import Device
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB, Lease
from shared.model.names import PodUid
from tests.support.dialects.builders import (
    PATHS,
    device,
    gpushare,
    hami,
    koord,
    lease_of,
    leased,
    leased_on,
    pod,
    read,
    share,
    vcuda,
)

CACHE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
LIBRARY = ("/usr/local/vgpu/libvgpu.so", "/opt/l/libvgpu.so", True)
OWN = [("/tmp/vgpulock", "/var/c/u1_c.lock", False), ("/overrideEnv", "/var/c/u1_c.env", True)]
PRELOAD = ("/etc/ld.so.preload", "/opt/l/preload", True)
LIMITED = {"LIBCUDA_LOG_LEVEL": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
FORCED = LIMITED | {"GPU_CORE_UTILIZATION_POLICY": "force"}
VOLCANO = dict.fromkeys(("NVIDIA_GDRCOPY", "NVIDIA_GDS", "NVIDIA_MOFED"), "enabled")


def koordinators(*devices: Device, **amounts: int) -> Lease:
    return leased_on(read(koord(**amounts)), devices)


SETUPS: dict[str, tuple[str, Lease, str, dict[str, str], list[tuple[str, str, bool]]]] = {
    "item 35 a container gets exactly the published environment and mounts": (
        "volcano-vgpu",
        lease_of(share("c", "GPU-a", 3000, 50)),
        "/tmp/vgpu/",
        {
            "NVIDIA_VISIBLE_DEVICES": "GPU-a",
            "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
            "CUDA_DEVICE_SM_LIMIT": "50",
            **(FORCED | VOLCANO),
        },
        [LIBRARY, ("/tmp/vgpu", "/var/c/u1_c", False)],
    ),
    "hami": (
        "nvidia",
        leased(pod(hami(gpu=2, gpumem=3000, gpucores=30, priority=0)), (1, 0)),
        "/usr/local/vgpu/",
        {
            "NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1",
            "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
            "CUDA_DEVICE_MEMORY_LIMIT_1": "3000m",
            "CUDA_DEVICE_SM_LIMIT": "30",
            "CUDA_TASK_PRIORITY": "0",
            **FORCED,
        },
        [("/usr/local/vgpu", "/var/c/u1_c", False), LIBRARY],
    ),
    "gpu-manager, whatever the limit annotation allows": (
        "tencent",
        leased(pod(vcuda(core=30, memory=4), notes={"tencent.com/vcuda-core-limit": "80"}), (0,)),
        "/tmp/vgpu/",
        {
            "NVIDIA_VISIBLE_DEVICES": "GPU-0",
            "CUDA_DEVICE_MEMORY_LIMIT_0": "1024m",
            "CUDA_DEVICE_SM_LIMIT": "30",
            **FORCED,
        },
        [LIBRARY, ("/tmp/vgpu", "/var/c/u1_c", False)],
    ),
}


@pytest.mark.parametrize(
    ("dialect", "lease", "regions", "environment", "mounts"), SETUPS.values(), ids=SETUPS
)
def test_a_limited_container_gets_exactly_its_variables_and_mounts(
    dialect: str,
    lease: Lease,
    regions: str,
    environment: dict[str, str],
    mounts: list[tuple[str, str, bool]],
) -> None:
    setup = DIALECTS[dialect].container_setup(lease, "c", {}, PATHS)

    cache = Path(setup.environment[CACHE])
    assert f"{cache.parent}/" == regions
    assert (len(cache.stem), cache.suffix) == (36, ".cache")
    assert setup.environment == environment | {CACHE: str(cache)}
    assert [(m.container_path, m.host_path, m.read_only) for m in setup.mounts] == [
        *mounts,
        ("/tmp/cudevshr.cache", f"/var/c/u1_c/{cache.name}", False),
        *OWN,
        PRELOAD,
    ]


@pytest.mark.parametrize("dialect", ["volcano-vgpu", "nvidia", "tencent", "koordinator"])
@pytest.mark.parametrize(
    ("held", "cores"),
    [
        ({"memory": "hami-core", "compute": "none"}, "0"),
        ({"memory": "driver", "compute": "hami-core", "mode": "driver"}, "50"),
    ],
)
def test_cores_are_limited_only_if_the_lease_says_that_hami_core_holds_them(
    dialect: str, held: dict[str, str], cores: str
) -> None:
    lease = lease_of(structs.replace(share("c", "GPU-a", 3000, 50), **held))

    environment = DIALECTS[dialect].container_setup(lease, "c", {}, PATHS).environment

    assert environment.get("CUDA_DEVICE_SM_LIMIT", "0") == cores
    forced = cores == "50" and dialect != "koordinator"
    assert environment.get("GPU_CORE_UTILIZATION_POLICY", "") == ("force" if forced else "")


def test_koordinator_26_a_half_gpu_gets_exactly_koordinators_variables_and_mounts() -> None:
    lease = koordinators(device(3, 32768), shared=1, core=50, ratio=50)

    setup = DIALECTS["koordinator"].container_setup(lease, "c", {}, PATHS)

    assert setup.environment == LIMITED | {
        "NVIDIA_VISIBLE_DEVICES": "GPU-3",
        "CUDA_DEVICE_MEMORY_LIMIT": "17179869184",
        "CUDA_DEVICE_SM_LIMIT": "50",
        "LD_PRELOAD": "/usr/local/vgpu/libvgpu.so",
        CACHE: "/usr/local/vgpu/u1_c.cache",
    }
    assert [(m.container_path, m.host_path, m.read_only) for m in setup.mounts] == [
        ("/usr/local/vgpu", "/var/c/u1_c", False),
        LIBRARY,
        *OWN,
    ]


UNLIMITED: dict[str, tuple[str, Lease, dict[str, str]]] = {
    "whole devices": (
        "nvidia", leased(pod(hami(gpu=2)), (3, 1)), {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-3"},
    ),
    **{
        f"gpusharing 4 200 cores are two whole gpus whatever the memory: {memory}": (
            "tencent",
            leased(pod(vcuda(core=200, memory=memory)), (3, 1)),
            {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-3"},
        )
        for memory in (0, 1, 60)
    },
    "koordinator 27 a whole gpu gets only the visible devices": (
        "koordinator",
        koordinators(device(1), shared=1, core=100, ratio=100),
        {"NVIDIA_VISIBLE_DEVICES": "GPU-1"},
    ),
    "koordinator 27 all of the memory without cores": (
        "koordinator",
        koordinators(device(1), shared=1, ratio=100),
        {"NVIDIA_VISIBLE_DEVICES": "GPU-1"},
    ),
    "item 8 the environment is the guides three variables": (
        "volcano-gpushare",
        leased_on(read(gpushare(memory=1024)), (device(0, 11178, unit_mib=10),)),
        {
            "NVIDIA_VISIBLE_DEVICES": "0",
            "VOLCANO_GPU_ALLOCATED": "10240",
            "VOLCANO_GPU_MEMORY_TOTAL": "11178",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(("dialect", "lease", "variables"), UNLIMITED.values(), ids=UNLIMITED)
def test_a_container_without_limits_gets_its_devices_and_no_mounts(
    dialect: str, lease: Lease, variables: dict[str, str]
) -> None:
    cards = {held.device: device(held.index, held.device_mib) for held in lease.shares}

    setup = DIALECTS[dialect].container_setup(lease, "c", cards, PATHS)

    assert setup.environment == variables
    assert setup.mounts == ()


MEMORY, CORES = "CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM_LIMIT"
VARIABLES: dict[str, tuple[str, Lease, str, Mapping[str, str | None]]] = {
    "limits are in the order in which cuda numbers devices": (
        "volcano-vgpu",
        lease_of(share("c", "GPU-b", 4000, 30, 1), share("c", "GPU-a", 2000, 30, 0)),
        "c",
        {"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
        | {f"{MEMORY}_0": "2000m", f"{MEMORY}_1": "4000m"},
    ),
    "item 30 each container has its own share": (
        "volcano-vgpu",
        lease_of(share("a", "GPU-b", 3000, 10), share("b", "GPU-b", 5000, 20)),
        "b",
        {f"{MEMORY}_0": "5000m"},
    ),
    "gpusharing 5 a block is exact on a node that counts in 1024": (
        "tencent",
        leased_on(read(vcuda(core=1, memory=1)), (device(unit_mib=1024),)),
        "c",
        {f"{MEMORY}_0": "256m"},
    ),
    **{
        f"gpusharing 6 each container gets a slice of its own: {name}": (
            "tencent",
            leased(pod(vcuda(core=30, memory=4), vcuda(core=20, memory=8)), (0,), (1,)),
            name,
            {f"{MEMORY}_0": limit, CORES: cores},
        )
        for name, limit, cores in (("a", "1024m", "30"), ("b", "2048m", "20"))
    },
    **{
        f"container {name} has priority {priority}": (
            "nvidia",
            leased(
                pod(hami(gpu=1, gpumem=1, priority=1), hami(gpu=1, gpumem=1)), (0,), (0,)
            ),
            name,
            {"CUDA_TASK_PRIORITY": priority},
        )
        for name, priority in (("a", "1"), ("b", None))
    },
    "compute is limited beside all of the memory": (
        "koordinator",
        koordinators(device(0, 32768), shared=1, core=30, ratio=100),
        "c",
        {CORES: "30", MEMORY: str(32768 * MIB)},
    ),
    "memory alone sets no compute limit": (
        "koordinator",
        koordinators(device(), shared=1, memory=8_000_000_001),
        "c",
        {CORES: None, MEMORY: "8000000001"},
    ),
    "koordinator 28 devices are named by uuid in the order of choice": (
        "koordinator",
        koordinators(device(7), device(2), shared=2, ratio=100),
        "c",
        {"NVIDIA_VISIBLE_DEVICES": "GPU-7,GPU-2"},
    ),
    **{
        f"koordinator 31 each container is limited to its own share: {name}": (
            "koordinator",
            leased_on(
                read(koord(shared=1, ratio=20), koord(shared=1, ratio=30)),
                *((device(n, 10000),) for n in range(2)),
            ),
            name,
            {MEMORY: str(mib * MIB)},
        )
        for name, mib in (("a", 2000), ("b", 3000))
    },
    "a ratio of different gpus is limited by the smaller one": (
        "koordinator",
        koordinators(device(0, 40000), device(1, 20000), shared=2, ratio=100),
        "c",
        {MEMORY: str(10000 * MIB)},
    ),
    **{
        f"the core policy is forced only with a core limit: {cores}": (
            "volcano-vgpu",
            lease_of(share("c", "GPU-a", 3000, cores)),
            "c",
            {"GPU_CORE_UTILIZATION_POLICY": policy},
        )
        for cores, policy in ((1, "force"), (99, "force"), (0, None), (100, None))
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "lease", "container", "variables"), VARIABLES.values(), ids=VARIABLES
)
def test_a_limit_is_that_of_the_containers_own_share(
    dialect: str, lease: Lease, container: str, variables: Mapping[str, str | None]
) -> None:
    given = DIALECTS[dialect].container_setup(lease, container, {}, PATHS).environment

    assert {name: given.get(name) for name in variables} == variables


@pytest.mark.parametrize("dialect", ["volcano-vgpu", "tencent", "nvidia", "koordinator"])
def test_hami_core_33_no_two_containers_can_write_to_the_same_path_or_to_the_library(
    dialect: str,
) -> None:
    one = lease_of(share("a", "GPU-a", 3000, 50), share("b", "GPU-a", 3000, 50))
    other = structs.replace(one, pod=PodUid("u2"))
    containers = ((one, "a"), (one, "b"), (other, "a"))
    setups = [DIALECTS[dialect].container_setup(*each, {}, PATHS) for each in containers]
    writable = [{m.host_path for m in each.mounts if not m.read_only} for each in setups]

    for first, second in combinations(writable, 2):
        assert first
        assert not first & second
    read_only = {mount.container_path for mount in setups[0].mounts if mount.read_only}
    loads = {m.container_path for m in setups[0].mounts if m.container_path[:5] == "/etc/"}
    assert read_only >= {LIBRARY[0], *loads}


@pytest.mark.parametrize("dialect", ["volcano-vgpu", "koordinator"])
def test_a_share_without_memory_is_refused_because_the_library_would_not_limit_it(
    dialect: str,
) -> None:
    with pytest.raises(RequestError, match="no memory leased"):
        DIALECTS[dialect].container_setup(lease_of(share("c", "GPU-a", 0, 50)), "c", {}, PATHS)


@pytest.mark.parametrize(
    ("limits", "places", "told"),
    [
        (vcuda(core=30, memory=4), (1,), ("30", str(1024 * MIB), "/dev/nvidia1")),
        (vcuda(core=200), (3, 1), ("200", str(2 * 16384 * MIB), "/dev/nvidia1,/dev/nvidia3")),
    ],
)
def test_the_runtime_gets_the_annotations_of_gpu_manager(
    limits: dict[str, int], places: tuple[int, ...], told: tuple[str, str, str]
) -> None:
    setup = DIALECTS["tencent"].container_setup(leased(pod(limits), places), "c", {}, PATHS)

    keys = (f"tencent.com/vcuda-{name}" for name in ("core", "memory", "device"))
    assert setup.annotations == dict(zip(keys, told, strict=True))


@pytest.mark.parametrize("memo", ["[", '{"init":1}', '{"x":' + "[" * 200_000])
def test_a_restored_lease_with_an_unreadable_memo_is_refused_with_words(memo: str) -> None:
    lease = structs.replace(lease_of(share("c", "GPU-a", 3000, 50)), memo=memo)

    with pytest.raises(RequestError, match="cannot be read: delete the pod"):
        DIALECTS["nvidia"].container_setup(lease, "c", {}, PATHS)
