"""The simulated GPUs' driver limits the memory of cgroups, as R615 does in its two ways."""

import shutil
from pathlib import Path

import pynvml
import pytest

from tests.support.cgroups import CgroupTree
from tests.support.gpu_driver import CONTEXT, GIB, GpuDriver, GpuLoad, gpu

ONE = gpu(1)
NONE = (0, pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX)
BOTH = pytest.mark.parametrize("accounting", ["misc", "dmem"])


@pytest.fixture
def cgroups(tmp_path: Path) -> CgroupTree:
    tree = CgroupTree(root=tmp_path / "cgroup")
    tree.make()
    return tree


@pytest.fixture
def limited(nvml: GpuDriver) -> GpuDriver:
    nvml.create(ONE)
    return nvml


def set_limit(cgroup: Path, hard: int, soft: int = 0) -> None:
    limits = pynvml.c_nvmlSetMemoryLimits_v1_t()
    limits.nameSpace = str(cgroup).encode()
    limits.softLimit = soft
    limits.hardLimit = hard
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(ONE.uuid)
    pynvml.nvmlDeviceSetMemoryLimits_v1(handle, limits)


def get_limit(cgroup: Path) -> tuple[int, int, int]:
    limits = pynvml.c_nvmlGetMemoryLimits_v1_t()
    limits.nameSpace = str(cgroup).encode()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(ONE.uuid)
    pynvml.nvmlDeviceGetMemoryLimits_v1(handle, limits)
    return limits.softLimit, limits.hardLimit, limits.currentUsed


def fails(code: int) -> pytest.RaisesExc[pynvml.NVMLError]:
    return pytest.RaisesExc(pynvml.NVMLError, check=lambda error: error.value == code)


def program(driver: GpuDriver, cgroup: Path) -> GpuLoad:
    return driver.load(GPU_DRIVER_CGROUP=str(cgroup))


def test_before_r615_the_functions_are_missing(limited: GpuDriver, cgroups: CgroupTree) -> None:
    group = cgroups.make("pod")

    with fails(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
        set_limit(group, GIB)
    with fails(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
        get_limit(group)


@BOTH
def test_a_cgroup_has_its_limit_for_all_its_processes_together(
    limited: GpuDriver, cgroups: CgroupTree, accounting: str
) -> None:
    limited.limit_cgroups(accounting)
    group = cgroups.make("pod/main")
    other = cgroups.make("pod/other")
    set_limit(group, 4 * GIB)
    first, second = program(limited, group), program(limited, group)

    assert first.fits("3g")
    assert not second.fits("1g")
    assert get_limit(group) == (0, 4 * GIB, 3 * GIB + 2 * CONTEXT)
    assert first.value("info", "total") == first.value("nvml", "total") == 4 * GIB
    assert program(limited, other).fits("8g")
    set_limit(group, pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX)
    assert second.fits("1g")
    assert limited.limits(ONE) == {}


def test_dmem_holds_a_pod_beside_its_containers_and_hides_its_limit(
    limited: GpuDriver, cgroups: CgroupTree
) -> None:
    limited.limit_cgroups("dmem")
    pod = cgroups.make("pod")
    main = cgroups.make("pod/main")
    side = cgroups.make("pod/side")
    set_limit(pod, 3 * GIB)
    set_limit(main, 2 * GIB)
    first, second = program(limited, main), program(limited, side)

    assert get_limit(side)[:2] == NONE
    assert first.fits("1g")
    assert not second.fits("2g")
    assert second.value("info", "total") == 16 * GIB
    assert second.fits("1g")


def test_dmem_guarantees_memory_to_the_cgroups_above_also_after_the_cgroup_is_removed(
    limited: GpuDriver, cgroups: CgroupTree
) -> None:
    limited.limit_cgroups("dmem")
    main = cgroups.make("slice/pod/main")
    pod = main.parent
    set_limit(pod, 8 * GIB)
    for soft in (3 * GIB, GIB):
        set_limit(main, 4 * GIB, soft)
        assert limited.soft_limits(ONE) == {main: soft, pod: soft, pod.parent: soft}
    assert get_limit(pod)[:2] == (GIB, 8 * GIB)
    set_limit(main, NONE[1])
    assert limited.soft_limits(ONE) == {pod: 0}

    set_limit(main, 4 * GIB, GIB)
    shutil.rmtree(main)

    assert get_limit(pod)[:2] == (GIB, 8 * GIB)
    assert limited.soft_limits(ONE) == {pod: GIB, pod.parent: GIB}


def test_misc_counts_the_nearest_limit_only(limited: GpuDriver, cgroups: CgroupTree) -> None:
    limited.limit_cgroups("misc")
    pod = cgroups.make("pod")
    main = cgroups.make("pod/main")
    with fails(pynvml.NVML_ERROR_NOT_SUPPORTED):
        get_limit(main)
    set_limit(pod, GIB)
    assert get_limit(main)[:2] == (0, GIB)
    load = program(limited, main)
    assert not load.fits("2g")

    set_limit(main, 3 * GIB)

    assert load.fits("2g")


def test_lowering_below_use_is_ignored_by_dmem_and_refused_by_misc(
    limited: GpuDriver, cgroups: CgroupTree
) -> None:
    for accounting in ("dmem", "misc"):
        limited.limit_cgroups(accounting)
        group = cgroups.make(accounting)
        set_limit(group, 4 * GIB)
        load = program(limited, group)
        assert load.fits("3g")
        if accounting == "misc":
            with fails(pynvml.NVML_ERROR_INVALID_ARGUMENT):
                set_limit(group, 2 * GIB)
        else:
            set_limit(group, 2 * GIB)
        assert get_limit(group)[1] == 4 * GIB
        load.do("free 0")
        set_limit(group, 2 * GIB)
        assert get_limit(group)[1] == 2 * GIB
        load.kill()


@BOTH
def test_a_driver_that_keeps_limits_raises_them_and_lowers_none_until_that_ends(
    limited: GpuDriver, cgroups: CgroupTree, accounting: str
) -> None:
    limited.limit_cgroups(accounting)
    group = cgroups.make("pod")
    set_limit(group, 2 * GIB)
    limited.keep_limits(kept=True)
    set_limit(group, 4 * GIB)
    if accounting == "misc":
        with fails(pynvml.NVML_ERROR_INVALID_ARGUMENT):
            set_limit(group, 3 * GIB)
    else:
        set_limit(group, 3 * GIB)
    assert get_limit(group)[1] == 4 * GIB
    limited.keep_limits(kept=False)

    set_limit(group, 3 * GIB)

    assert get_limit(group)[1] == 3 * GIB


def test_misc_does_not_count_what_was_allocated_before_the_limit(
    limited: GpuDriver, cgroups: CgroupTree
) -> None:
    limited.limit_cgroups("misc")
    group = cgroups.make("pod")
    load = program(limited, group)
    assert load.fits("3g")

    set_limit(group, 2 * GIB)

    assert get_limit(group) == (0, 2 * GIB, 0)
    assert load.fits("2g")
    assert not load.fits("1g")


def test_a_cgroup_without_files_of_dmem_cannot_be_limited(
    limited: GpuDriver, cgroups: CgroupTree
) -> None:
    limited.limit_cgroups("dmem")
    pod = cgroups.make("pod")
    main = cgroups.make("pod/main")
    cgroups.enable(pod, "cpu", "memory")

    with fails(pynvml.NVML_ERROR_NOT_FOUND):
        set_limit(main, GIB)
    set_limit(pod, GIB)
    assert get_limit(main)[:2] == (0, GIB)
    with fails(pynvml.NVML_ERROR_NOT_FOUND):
        set_limit(cgroups.root / "gone", GIB)
    with fails(pynvml.NVML_ERROR_NOT_SUPPORTED):
        set_limit(cgroups.root, GIB)


def test_a_removed_cgroup_loses_its_limit_with_dmem_only(
    limited: GpuDriver, cgroups: CgroupTree
) -> None:
    for accounting, limits in (("dmem", 0), ("misc", 1)):
        limited.limit_cgroups(accounting)
        group = cgroups.root / accounting
        group.mkdir()
        set_limit(group, GIB)
        group.rmdir()
        set_limit(cgroups.make("other"), NONE[1])
        assert len(limited.limits(ONE)) == limits
    limited.forget_limits()
    assert limited.limits(ONE) == {}


@BOTH
def test_a_gpu_in_mig_mode_has_no_limits(
    nvml: GpuDriver, cgroups: CgroupTree, accounting: str
) -> None:
    nvml.create(gpu(1, mig=True))
    nvml.limit_cgroups(accounting)

    with fails(pynvml.NVML_ERROR_NOT_SUPPORTED):
        set_limit(cgroups.make("pod"), GIB)


def test_an_error_of_the_driver_is_returned_until_it_ends(
    limited: GpuDriver, cgroups: CgroupTree
) -> None:
    limited.limit_cgroups("dmem")
    group = cgroups.make("pod")
    limited.fail_limits(pynvml.NVML_ERROR_NO_PERMISSION)
    with fails(pynvml.NVML_ERROR_NO_PERMISSION):
        set_limit(group, GIB)
    limited.fail_limits(0)
    calls = limited.limit_calls()

    set_limit(group, GIB)

    assert get_limit(group)[1] == GIB
    assert limited.limit_calls() == calls + 2
