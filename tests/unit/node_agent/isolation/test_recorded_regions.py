"""Region files of real libraries (tests/recorded/regions), read without them.

In each, three processes had 512 MiB; the second was killed, the first was then out of memory, and
the third allocated 1 GiB more.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.isolation.region import Region, sums
from services.node_agent.isolation.region_image import RegionSeed, altered_limits
from services.node_agent.isolation.region_reader import read_region
from tests.support.node_agent.recorded_regions import ONE, RECORDED
from tests.support.node_agent.regions import at, write

GIB = 1 << 30
LAYOUT_OF = {
    "8f3a89c": "1.2",  # 2026-06
    "8888734": "1.2",  # 2026-04
    "3273df8": "1.1-bad",  # 2026-03, as in HAMi 2.8.1
    "4a7e11e": "1.1",  # 2026-01
    "f14a04c": "1.1",  # 2025-11
}
"""By commit of HAMi-core."""
SEED = RegionSeed(memory_bytes=(4 * GIB,), cores_percent=(0,), other_cores_percent=0)


@pytest.fixture(params=LAYOUT_OF)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def region(name: str, tmp_path: Path) -> Region:
    place = at(tmp_path)
    write(place, gzip.decompress((RECORDED / f"{name}.region.gz").read_bytes()))
    found = read_region(place)
    assert isinstance(found, Region), found
    return found


@pytest.fixture
def facts(name: str) -> dict[str, Any]:
    text = (RECORDED / f"{name}.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_layout_limits_and_devices_are_read(name: str, region: Region) -> None:
    assert region.layout.name == LAYOUT_OF[name]
    assert altered_limits(region, SEED) == ()
    assert region.core_limits == (100,) * 16, "without a limit"
    assert region.uuids[0] == ONE.uuid
    assert (region.torn, region.locked) == (0, False)


def test_living_processes_use_what_the_driver_accounts(
    region: Region, facts: dict[str, Any]
) -> None:
    living = frozenset(facts["living"])

    assert sums(region, 0, living).total == facts["driver_bytes"]
    assert {slot.pid for slot in region.processes(living)} == living
    assert all(slot.host_pid == slot.pid for slot in region.processes(living))


def test_a_moved_process_is_lost_only_to_a_library_with_sequence_locks(
    region: Region, facts: dict[str, Any]
) -> None:
    third = facts["living"][1]
    lost = [slot.pid for slot in region.lost(frozenset(facts["living"]))]

    assert lost == ([third] if region.layout.slot.seqlock is not None else [])
    assert not region.lost(frozenset({facts["killed"]}))
