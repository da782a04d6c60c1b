"""Pods that only kube-scheduler can place, on a real one that asks the extender about GPUs."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shared.dialects import KUBE_SCHEDULER
from tests.real.control_plane import missing
from tests.real.leasehold import Leasehold, Namespace
from tests.real.node_parts import GPUS, NODES
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="session"),
]

ALL_GPUS = GPUS * len(NODES)
TARGET = {"targetPortal": "10.0.0.1:3260", "iqn": "iqn.2026-01.example.com:disk", "lun": 0}
DISK = [{"name": "disk", "iscsi": TARGET}]
"""A disk that the pod names itself, without a claim."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def scheduling(up: Leasehold) -> AsyncIterator[Leasehold]:
    up.start_kube_scheduler()
    yield up
    up.plane.stop("kube-scheduler")


async def scheduler_of(namespace: Namespace, pod: str) -> str:
    stored = json.loads(
        await namespace.leasehold.plane.kube.read(f"{namespace.path('pods')}/{pod}")
    )
    name: str = stored["spec"]["schedulerName"]
    return name


async def test_kube_scheduler_places_a_pod_where_the_extender_has_a_gpu(
    scheduling: Leasehold,
) -> None:
    namespace = await scheduling.add_namespace("disk")

    await namespace.pod("train", volumes=DISK)
    await namespace.until_running(1)

    assert await scheduler_of(namespace, "train") == KUBE_SCHEDULER
    leases = await scheduling.leases()
    assert leases["train"].node == (await namespace.nodes())["train"]
    await namespace.delete_pods()


async def test_a_pod_waits_for_a_gpu_and_gets_the_first_one_that_is_free(
    scheduling: Leasehold,
) -> None:
    others = await scheduling.add_namespace("full")
    for number in range(ALL_GPUS):
        await others.pod(f"other-{number}", memory=0)
    await others.until_running(ALL_GPUS)
    namespace = await scheduling.add_namespace("waiting-disk")

    await namespace.pod("train", volumes=DISK)
    await namespace.until_waits("train", "nodes are available", "GPU")
    await scheduling.plane.kube.delete(f"{others.path('pods')}/other-0")
    nodes = await until(namespace.nodes, lambda nodes: "train" in nodes, limit_s=120.0)

    assert (await scheduling.leases())["train"].node == nodes["train"]
    await namespace.delete_pods()
    await others.delete_pods()
