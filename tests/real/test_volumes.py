"""kube-scheduler and the placer give the same answers for pods with claims: the table of cases."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial

import pytest
import pytest_asyncio

from tests.real.control_plane import ControlPlane, control_plane, missing
from tests.real.product_answers import ProductAnswers
from tests.real.recording_extender import Recorder, scheduler_answer
from tests.real.volume_objects import VolumeWorld
from tests.support.storage import capacity, claim, driver, storage_class, volume
from tests.support.volume_case import EVERYWHERE, NODES, Case
from tests.support.volume_cases import CASES
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

AT_ONCE = 16
DIFFERENT = {
    "the node is selected, and no storage is left":
    "the claim's volume is being provisioned there, and may be what has taken the storage",
    "a volume that is attached to a node":
    "on another node the pod would wait until the disk is detached",
    "a disk without a driver of its own": "as above",
    "a claim of one pod that is in use":
    "the same nodes, none: Leasehold names the pod's claim once, not each node",
}  # fmt: skip
"""Cases with another answer than kube-scheduler's, and why."""
NOT_STORED = {
    "node affinity without terms",
    "several zones, one of them empty",
    "a class with an empty term",
    "a claim that requests no size",
    "a class of attributes",
    "a volume that the pod itself uses",
}
"""Cases with objects that an API server of today refuses; older ones may have stored them."""
FENCE = Case(
    objects=[
        *(storage_class(), driver(storageCapacity=True), capacity("free", "9Gi", {})),
        *(claim("data"), claim("home", "pv"), volume("pv")),
    ],
    uses=("data", "home"),
    fits=EVERYWHERE,
)
"""Created last: once it is answered, kube-scheduler has seen all before it, kind by kind."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plane(notes: Recorder) -> AsyncIterator[ControlPlane]:
    async with control_plane() as started:
        for name, node in NODES.items():
            status = {"allocatable": dict.fromkeys(("cpu", "memory", "pods"), "1000")}
            status["allocatable"]["nvidia.com/gpu"] = "1000"
            await started.create(
                "/api/v1/nodes",
                {"metadata": {"name": name, "labels": dict(node.labels)},
                 "status": {**status, "capacity": status["allocatable"]}},
            )  # fmt: skip
        started.start_scheduler(extenders=[notes.configuration])
        yield started


async def create_all(worlds: list[VolumeWorld]) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def create(world: VolumeWorld) -> None:
        async with slots:
            await world.create()

    await asyncio.gather(*(create(world) for world in worlds))


@pytest.mark.asyncio(loop_scope="session")
async def test_pods_fit_the_nodes_that_kube_scheduler_finds(
    plane: ControlPlane, notes: Recorder
) -> None:
    worlds = {
        name: VolumeWorld(plane, case, number) for number, (name, case) in enumerate(CASES.items())
    }
    await create_all(list(worlds.values()))
    fence = VolumeWorld(plane, FENCE, len(worlds))
    await fence.create()
    assert not fence.refused
    await fence.open()
    await until(lambda: fence.pod_uid in notes.feasible)
    stored = {name: world for name, world in worlds.items() if not world.refused}
    ours = ProductAnswers()
    await ours.read(plane)
    await asyncio.gather(*(world.open() for world in stored.values()))

    differences: dict[str, str] = {}
    for name, world in stored.items():
        theirs = await until(partial(scheduler_answer, plane, notes, f"{world.pods}/train"))
        answer = ours.of(world.pod_uid)
        if (answer.fits, answer.reasons) != (theirs.fits, theirs.reasons):
            differences[name] = f"kube-scheduler: {theirs}; Leasehold: {answer}"
    print(table(worlds, differences))
    assert differences.keys() == DIFFERENT.keys(), "\n".join(differences.values())
    assert {name for name, world in worlds.items() if world.refused} == NOT_STORED
    assert len(stored) == len(CASES) - len(NOT_STORED)


def table(worlds: Mapping[str, VolumeWorld], differences: Mapping[str, str]) -> str:
    """Return what `pytest -s` shows: the cases that differ, and those that no cluster can have."""
    refused = [f"not stored: {name}: {w.refused}" for name, w in worlds.items() if w.refused]
    different = [f"different: {name}: {text}" for name, text in differences.items()]
    compared = len(worlds) - len(refused)
    lines = [f"{compared} cases compared, {len(different)} different", *different, *refused]
    return "\n".join(lines)
