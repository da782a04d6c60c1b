"""Claims for parts of GPUs on a real API server and kube-scheduler, leased by the ledger.

Some have parameters of NVIDIA's DRA driver.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import yaml

from shared.model.devices.enforcers import NOTHING_OFFERED
from shared.model.names import NodeName
from shared.model.requests.claim import DRIVER
from tests.real.claim_parts import AFTER_S, API, ClaimCluster, claim_cluster
from tests.real.control_plane import Json, missing
from tests.real.node_parts import nodes_of_zones
from tests.support.placer.ledger import device
from tests.support.waiting import until
from tools.generate.pages import ROOT

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="module"),
]

NODES = nodes_of_zones(a=1)
NODE = NodeName("a-0")
GPU_MIB = 81_920
GPU = device(NODE, 0, memory_mib=GPU_MIB, slots=10)
CLASSES = ROOT / "k8s" / "components" / "dra" / "device-classes.yaml"
CLASS = "gpu.leasehold.dev"
PART = {"requests": {"memory": "8Gi", "cores": "50"}}
PART_MIB = 8192


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ClaimCluster]:
    async with claim_cluster(NODES, {NODE: [GPU]}) as started:
        for manifest in yaml.safe_load_all(CLASSES.read_text()):
            await started.plane.create(f"{API}/deviceclasses", manifest)
        yield started


def request(capacity: Json | None = None, **more: Any) -> Json:
    exactly: Json = {"deviceClassName": CLASS, **more}
    exactly |= {"capacity": capacity} if capacity else {}
    return {"requests": [{"name": "gpu", "exactly": exactly}]}


def parameters(**fields: Any) -> Json:
    """Return the configuration of a claim as NVIDIA's driver has it, for ours."""
    config = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", **fields}
    return {"config": [{"opaque": {"driver": DRIVER, "parameters": config}}]}


def slicing(interval: str) -> Json:
    return {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}


@pytest.mark.parametrize(
    ("name", "devices", "mib", "whole"),
    [
        ("time-slices", request(PART) | parameters(sharing=slicing("Default")), PART_MIB, False),
        ("exclusive", request() | parameters(), GPU_MIB, True),
    ],
)
async def test_a_claim_with_parameters_that_hold_is_leased_and_its_pod_is_bound(
    cluster: ClaimCluster, name: str, devices: Json, mib: int, whole: bool
) -> None:
    await cluster.plane.create("/api/v1/namespaces", {"metadata": {"name": name}})

    await cluster.add_pod(name, "train", devices)
    await until(lambda: cluster.bound_pods(name), limit_s=AFTER_S)

    [share] = (await cluster.leases(name))["train"].shares
    assert (share.memory_mib, share.whole) == (mib, whole)
    await cluster.clear(name)


@pytest.mark.parametrize(
    ("name", "sharing", "words"),
    [
        ("mps", {"strategy": "MPS"}, "the claim has a device without"),
        ("longer-slices", slicing("Longer"), "Invalid enum value 'Longer'"),
        ("slices-of-a-part", slicing("Short"), "request gpu is for a part of a GPU"),
    ],
)
async def test_a_claim_with_parameters_that_nothing_holds_is_refused_with_the_reason(
    cluster: ClaimCluster, name: str, sharing: Json, words: str
) -> None:
    await cluster.plane.create("/api/v1/namespaces", {"metadata": {"name": name}})

    await cluster.add_pod(name, "train", request(PART) | parameters(sharing=sharing))
    await until(lambda: conditions(cluster, name), lambda seen: words in seen, limit_s=AFTER_S)

    assert not await cluster.bound_pods(name)
    assert not await cluster.leases(name)
    await cluster.clear(name)


async def test_a_second_claim_for_other_time_slices_of_the_gpu_waits_with_the_reason(
    cluster: ClaimCluster,
) -> None:
    namespace = "slices"
    await cluster.plane.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    capacity = {"requests": {"memory": "8Gi", "cores": "10"}}
    for interval in ("Long", "Short"):
        spec = {"selectors": _selectors(), **parameters(sharing=slicing(interval))}
        made = {"metadata": {"name": f"{interval.lower()}-slices"}, "spec": spec}
        await cluster.plane.create(f"{API}/deviceclasses", made)
    selector = f"device.attributes['{DRIVER}'].?timeSlices.orValue('Long') == 'Long'"
    chosen = [{"cel": {"expression": selector}}]
    of_long = request(capacity, deviceClassName="long-slices", selectors=chosen)
    await cluster.add_pod(namespace, "first", of_long)
    await until(lambda: cluster.bound_pods(namespace), limit_s=AFTER_S)
    of_short = request(capacity, deviceClassName="short-slices")
    await cluster.add_pod(namespace, "second", of_short)
    reason = "has Long time slices, and the claim asks for Short"
    await until(
        lambda: conditions(cluster, namespace), lambda seen: reason in seen, limit_s=AFTER_S
    )

    [lease] = (await cluster.leases(namespace)).values()
    assert set(lease.time_slices.values()) == {"Long"}
    await cluster.clear(namespace)


def _selectors() -> Any:
    manifests = yaml.safe_load_all(CLASSES.read_text())
    return next(
        made["spec"]["selectors"] for made in manifests if made["metadata"]["name"] == CLASS
    )


async def conditions(cluster: ClaimCluster, namespace: str) -> str:
    """Return the conditions of a namespace's pods and claims."""
    pods = await cluster.plane.objects(f"/api/v1/namespaces/{namespace}/pods")
    claims = await cluster.plane.objects(f"{API}/namespaces/{namespace}/resourceclaims")
    return json.dumps([item.get("status") for item in (*pods, *claims)])


async def test_kube_scheduler_tries_a_refused_claim_again_until_the_gpu_can_hold_it(
    cluster: ClaimCluster,
) -> None:
    """The node's agent has not reported yet that something limits parts of its GPU."""
    namespace = "later"
    await cluster.plane.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    await cluster.nodes.report_devices(NODE, [replace(GPU, offer=NOTHING_OFFERED)])
    refused = len(cluster.nodes.refused)

    await cluster.add_pod(namespace, "train", request(PART))
    await until(lambda: len(cluster.nodes.refused) >= refused + 2, limit_s=AFTER_S)
    assert not await cluster.bound_pods(namespace)
    await cluster.nodes.report_devices(NODE, [GPU])
    await until(lambda: cluster.bound_pods(namespace), limit_s=AFTER_S)

    [share] = (await cluster.leases(namespace))["train"].shares
    assert (share.memory_mib, share.whole) == (PART_MIB, False)
    await cluster.clear(namespace)
