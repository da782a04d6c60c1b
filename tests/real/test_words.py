"""Pods in the words of KAI and of NVIDIA's device plugin, unchanged, on a real API server."""

from typing import Any

import pytest

from shared.dialects.kai.dialect import SCHEDULER
from shared.dialects.nvidia.plugin_config import parse_sharing
from shared.kubernetes.errors import KubernetesError
from tests.real.control_plane import Json, missing
from tests.real.leasehold import Leasehold, Namespace
from tests.real.node_parts import GPU_MIB

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="session"),
]

QUEUE = {"kai.scheduler/queue": "team-a"}
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def container(name: str, **limits: str) -> Json:
    return {"name": name, "image": "pause", "resources": {"limits": limits}}


async def create(namespace: Namespace, *containers: Json, **fields: Any) -> None:
    """Create a pod; `fields` are those of its spec, and its metadata."""
    metadata = {"name": "pod"} | fields.pop("metadata", {})
    spec = {"containers": list(containers), "terminationGracePeriodSeconds": 1} | fields
    body = {"metadata": metadata, "spec": spec}
    await namespace.leasehold.plane.create(namespace.path("pods"), body)


async def lease(namespace: Namespace) -> list[tuple[str, int, bool]]:
    """Return the container, MiB and whether it is whole of each share of the namespace's pod."""
    await namespace.until_running(1)
    leases = (await namespace.leasehold.leases()).values()
    [held] = [lease for lease in leases if lease.namespace == namespace.name]
    return [(share.container, share.memory_mib, share.whole) for share in held.shares]


async def test_a_fraction_of_kai_is_that_part_of_a_gpu_for_the_first_container(
    up: Leasehold,
) -> None:
    namespace = await up.add_namespace("kai-fraction")
    notes = {"gpu-fraction": "0.25"}
    await create(
        namespace,
        container("main"),
        metadata={"labels": QUEUE, "annotations": notes},
        schedulerName=SCHEDULER,
    )

    assert await lease(namespace) == [("main", GPU_MIB // 4, False)]
    await namespace.delete_pods()


async def test_memory_of_kai_on_two_gpus_is_for_the_container_that_is_named(up: Leasehold) -> None:
    namespace = await up.add_namespace("kai-memory")
    notes = {
        "gpu-memory": "2000",
        "gpu-fraction-num-devices": "2",
        "gpu-fraction-container-name": "model",
    }
    await create(
        namespace,
        container("proxy"),
        container("model"),
        metadata={"labels": QUEUE, "annotations": notes},
        schedulerName=SCHEDULER,
    )

    assert await lease(namespace) == [("model", 2000, False)] * 2
    await namespace.delete_pods()


async def test_a_gpu_of_nvidias_plugin_is_a_whole_one(up: Leasehold) -> None:
    namespace = await up.add_namespace("nvidia-whole")
    await create(
        namespace,
        container("cuda-container", **{"nvidia.com/gpu": "1"}),
        tolerations=[TOLERATION],
        restartPolicy="Never",
    )

    assert await lease(namespace) == [("cuda-container", GPU_MIB, True)]
    await namespace.delete_pods()


@pytest.mark.parametrize("method", ["timeSlicing", "mps"])
async def test_a_replica_of_nvidias_plugin_is_the_part_that_its_configuration_stands_for(
    up: Leasehold, method: str
) -> None:
    namespace = await up.add_namespace(f"nvidia-{method.lower()}")
    resources = [{"name": "nvidia.com/gpu", "replicas": 4}]
    shared = parse_sharing({"version": "v1", "sharing": {method: {"resources": resources}}})
    limits = {name: str(amount) for name, amount in shared.part.items()}
    await create(namespace, container("cuda-container", **limits), tolerations=[TOLERATION])

    assert await lease(namespace) == [("cuda-container", GPU_MIB // 4, False)]
    await namespace.delete_pods()


async def test_a_selector_of_shared_gpus_waits_for_a_node_that_has_the_label(up: Leasehold) -> None:
    namespace = await up.add_namespace("nvidia-selector")
    await create(
        namespace,
        container("cuda-container", **{"nvidia.com/gpu": "1"}),
        nodeSelector={"nvidia.com/gpu.sharing-strategy": "time-slicing"},
    )

    await namespace.until_waits("pod", "didn't match Pod's node affinity/selector")
    await namespace.delete_pods()


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ({"gpu-fraction": "1.5"}, "gpu-fraction"),
        ({"gpu-fraction": "0.5", "gpu-memory": "2000"}, "gpu-memory"),
    ],
)
async def test_a_value_that_kai_refuses_is_denied_with_its_annotation(
    up: Leasehold, notes: Json, words: str
) -> None:
    namespace = await up.add_namespace(f"kai-denied-{len(notes)}")

    with pytest.raises(KubernetesError, match=words):
        await create(
            namespace, container("main"), metadata={"annotations": notes}, schedulerName=SCHEDULER
        )
