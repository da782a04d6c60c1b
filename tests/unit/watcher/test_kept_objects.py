"""How many objects the watcher keeps, and that it says of which namespaces it keeps fewer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from services.watcher import pod_groups
from services.watcher.kept_objects import PLAIN_BYTES, Room
from services.watcher.pod_group_sources import PodGroupConditions
from services.watcher.pod_groups import KnownGroup, PodGroupChanges
from services.watcher.service import Watcher
from shared.dialects.pod_groups import PodGroupKind
from shared.model.clock import SystemClock
from shared.pods.storage import Claim

SMALL = Claim(name="data")
LARGE = Claim(name="data", error="x" * (2 * PLAIN_BYTES))


def room(*, most: int = 10, most_of_namespace: int = 4) -> Room:
    return Room("PersistentVolumeClaims", most=most, most_of_namespace=most_of_namespace)


def test_a_namespace_leaves_out_its_own_objects_and_those_of_others_are_kept() -> None:
    kept = room()

    flood = [kept.admits("flood", SMALL) for _ in range(6)]

    assert flood == [True] * 4 + [False] * 2
    assert [kept.admits("team", SMALL) for _ in range(4)] == [True] * 4
    assert kept.left_out == {"flood"}


def test_all_namespaces_together_have_a_bound_also_for_what_is_of_none() -> None:
    kept = room(most=5)

    assert [kept.admits("", SMALL) for _ in range(5)] == [True] * 5
    assert not kept.admits("team", SMALL)
    assert not kept.admits("", SMALL)


def test_a_large_object_counts_as_several_and_gives_all_its_room_back() -> None:
    kept = room()

    assert kept.admits("team", LARGE)
    assert [kept.admits("team", SMALL) for _ in range(3)] == [True, True, False]
    kept.release("team", LARGE)
    assert [kept.admits("team", SMALL) for _ in range(3)] == [True, True, False]


def test_a_quantity_beyond_64_bits_has_a_size() -> None:
    assert room().admits("team", Claim(name="data", size=10**60))


def test_a_namespace_is_reported_once_with_what_to_do() -> None:
    kept = room(most_of_namespace=1)
    for _ in range(3):
        kept.admits("flood", SMALL)

    assert kept.take_unreported() == [
        "not all PersistentVolumeClaims of namespace flood are kept: the watcher keeps at most 10 "
        "PersistentVolumeClaims, and 1 of a namespace, large ones count as several: delete those "
        "that are not needed, and restart it"
    ]
    kept.admits("flood", SMALL)
    assert kept.take_unreported() == []


class Groups:
    """A source of three PodGroups of one namespace."""

    async def batches(self) -> AsyncIterator[PodGroupChanges]:
        yield PodGroupChanges(
            kind=PodGroupKind.VOLCANO,
            groups=tuple((f"flood/g{number}", KnownGroup(min_member=2)) for number in range(3)),
            synced=True,
        )


async def test_the_log_and_a_metric_show_what_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pod_groups, "MOST_OF_NAMESPACE", 2)
    names = ("pod", "node", "namespace", "quota", "claim", "class", "storage")
    watcher = Watcher(
        group_source=cast("Any", Groups()),
        group_conditions=PodGroupConditions(cast("Any", None)),
        lister=cast("Any", None),
        clock=SystemClock(),
        **{f"{name}_source": cast("Any", None) for name in names},
    )

    async with asyncio.timeout(30):
        with suppress(StopAsyncIteration):
            await anext(watcher.watch_groups())

    kind = "podgroups.scheduling.volcano.sh"
    assert f"not all {kind} of namespace flood are kept" in caplog.text
    value = REGISTRY.get_sample_value("leasehold_watcher_left_out_namespaces", {"kind": kind})
    assert value == 1
