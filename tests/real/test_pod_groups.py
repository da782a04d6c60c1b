"""PodGroups of Kubernetes on a real API server: the placer starts all pods of one, or none."""

import pytest

from tests.real.control_plane import missing
from tests.real.leasehold import Leasehold, Namespace
from tests.real.node_parts import GPUS, NODES
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="session"),
]

ALL_GPUS = GPUS * len(NODES)
SIZE = 8


async def create_group(namespace: Namespace) -> None:
    """Create a PodGroup and its pods, each with a GPU of its own."""
    path = f"/apis/scheduling.k8s.io/v1alpha2/namespaces/{namespace.name}/podgroups"
    policy = {"schedulingPolicy": {"gang": {"minCount": SIZE}}}
    group = {"metadata": {"name": "train"}, "spec": policy}
    await namespace.leasehold.plane.create(path, group)
    for number in range(SIZE):
        member = {"podGroupName": "train"}
        await namespace.pod(f"train-{number}", memory=0, schedulingGroup=member)


async def test_all_pods_of_a_pod_group_start(up: Leasehold) -> None:
    namespace = await up.add_namespace("group")

    await create_group(namespace)
    await namespace.until_running(SIZE)

    await namespace.check()
    await namespace.delete_pods()


async def test_no_pod_of_a_pod_group_starts_without_room_for_all(up: Leasehold) -> None:
    others = await up.add_namespace("others")
    taken = ALL_GPUS - SIZE + 1
    for number in range(taken):
        await others.pod(f"other-{number}", memory=0)
    await others.until_running(taken)
    namespace = await up.add_namespace("waiting-group")

    await create_group(namespace)
    await namespace.until_waits("train-0", f"needs {SIZE} pods at once")
    assert not await namespace.nodes()
    await up.plane.kube.delete(f"{others.path('pods')}/other-0")
    await namespace.until_running(SIZE)

    assert await until(others.nodes, lambda nodes: len(nodes) == taken - 1)
    await namespace.delete_pods()
    await others.delete_pods()
