"""What C makes of a region, and what we make of it, are the same in every published layout."""

import shutil
from pathlib import Path

import pytest

from services.node_agent.isolation.region import Region, sums
from services.node_agent.isolation.region_image import RegionSeed, image_of
from services.node_agent.isolation.region_layouts import LAYOUTS, PRE_V0, V1_2, RegionLayout
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.isolation.region_writer import seed_region
from tests.support.node_agent.regions import (
    SEED,
    at,
    c_program,
    needs_compiler,
    show_by_c,
    write,
    write_by_c,
)

pytestmark = needs_compiler
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def amount(slot: int, device: int, field: int) -> int:
    return 1_000_000 * (slot + 1) + 1000 * device + field


@pytest.fixture(scope="module", autouse=True)
def binary() -> object:
    program = c_program()
    yield program
    shutil.rmtree(program.parent, ignore_errors=True)
    c_program.cache_clear()


@each_layout
def test_hami_core_1_every_field_that_c_wrote_is_read(tmp_path: Path, layout: RegionLayout) -> None:
    place = at(tmp_path)
    write_by_c(layout, place)

    region = read_region(place)

    assert isinstance(region, Region)
    assert region.layout is layout
    assert region.uuids == tuple(
        f"GPU-{n:08x}-1111-2222-3333-444444444444" if n < 4 else "" for n in range(16)
    )
    assert region.memory_limits == tuple((n + 1) << 30 for n in range(16))
    assert region.core_limits == tuple(range(10, 26))
    assert region.utilization_switch == 0
    assert region.last_kernel_at == (1_787_000_000 if layout.has_last_kernel else None)
    assert not region.orphans
    assert not region.torn
    assert [(s.pid, s.host_pid, s.status) for s in region.slots] == [
        (100 + k, 9000 + k, 1) for k in range(3)
    ]
    for k, slot in enumerate(region.slots):
        for field, amounts in enumerate(
            (slot.context, slot.module, slot.buffer, slot.offset, slot.total), 1
        ):
            assert amounts == tuple(amount(k, d, field) for d in range(16))
        wanted = tuple(0 if layout is PRE_V0 else (k * 7 + d * 3) % 100 for d in range(16))
        assert slot.sm_percent == wanted
    assert sums(region, 2).total == sum(amount(k, 2, 5) for k in range(3))


@each_layout
def test_c_reads_a_seed_of_every_layout_and_gets_its_locks(
    tmp_path: Path, layout: RegionLayout
) -> None:
    place = at(tmp_path)
    write(place, image_of(SEED, layout))

    fields = show_by_c(layout, place)

    assert fields["sem"] == "0"
    assert fields.get("postinit", "0") == "0"
    assert (fields["magic"], fields["proc_num"], fields["device_num"]) == ("19920718", "0", "0")
    assert [fields[f"limit{n}"] for n in range(3)] == [str(5 << 30), str(3 << 30), "0"]
    assert [fields[f"sm_limit{n}"] for n in range(3)] == ["40", "40", "100"]


def test_hami_core_11_c_reads_the_seed_of_a_container(tmp_path: Path) -> None:
    place = at(tmp_path / "u1_main")
    seed = RegionSeed(
        memory_bytes=(5 << 30,), cores_percent=(40,), priority=0, other_cores_percent=40
    )

    seed_region(place, seed, starting=True)

    fields = show_by_c(V1_2, place)
    assert (fields["major"], fields["minor"], fields["switch"]) == ("1", "2", "1")
    assert (fields["recent_kernel"], fields["priority"], fields["last_kernel"]) == ("2", "0", "0")
    assert (fields["limit0"], fields["sm_limit0"], fields["sm_limit15"]) == (
        str(5 << 30),
        "40",
        "40",
    )
    assert (fields["owner"], fields["sm_init"], fields["uuid0"]) == ("0", "0", '""')
    assert (fields["sem"], fields["postinit"]) == ("0", "0")
