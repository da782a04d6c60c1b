"""Pods with GPUs beside those that the cluster's own scheduler places, with ResourceClaims too."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
import redis.asyncio

from tests.support.dialects.checklist import until_quota
from tests.support.stack import (
    NEEDS_KUBECTL,
    START_S,
    Stack,
    command,
    gpu_pod,
    running,
    stack,
    succeeded,
    vgpu,
)
from tests.support.waiting import until

pytestmark = NEEDS_KUBECTL

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HOST = "kubernetes.io/hostname"
RULE = "didn't satisfy existing pods anti-affinity rules"
QUOTA = {
    "apiVersion": "leasehold.dev/v1beta1",
    "kind": "GPUQuota",
    "metadata": {"name": "default"},
    "spec": {"maxMilliGPU": 1000},
}
CLAIM = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaim",
    "metadata": {"name": "shared"},
    "spec": {
        "devices": {
            "requests": [
                {
                    "name": "gpu",
                    "exactly": {
                        "deviceClassName": "gpu.leasehold.dev",
                        "capacity": {"requests": {"memory": "6000Mi", "cores": "40"}},
                    },
                }
            ]
        }
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster() -> AsyncIterator[Stack]:
    env = {
        "LEASEHOLD_DRA": "conditions",
        "LEASEHOLD_PREEMPTION_NOTICE_S": "0",
        "LEASEHOLD_PREEMPTION_MIN_RUNTIME_S": "0",
    }
    async with stack("--nodes", "1", "--gpus", "1xT4", webhook=True, env=env) as up:
        yield up


def quiet_pod(node: str) -> dict[str, object]:
    """A pod without GPUs, placed by the cluster's scheduler, that wants no noisy ones beside it."""
    term = {"topologyKey": HOST, "labelSelector": {"matchLabels": {"app": "noisy"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "quiet"},
        "spec": {
            "nodeSelector": {HOST: node},
            "affinity": {"podAntiAffinity": {REQUIRED: [term]}},
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": "busybox", "command": ["sleep", "1000"]}],
        },
    }


async def test_a_pod_waits_beside_one_that_repels_it_and_runs_once_that_has_gone(
    cluster: Stack,
) -> None:
    nodes = await cluster.kubectl("get", "nodes", "-o", "name")
    node = nodes.out.strip().removeprefix("node/")
    await cluster.create(quiet_pod(node))
    await cluster.until("quiet", running)
    async with redis.asyncio.Redis.from_url(
        cluster.state()["redis_url"], **cluster.login(), decode_responses=True
    ) as ledger:

        async def facts() -> list[str | None]:
            keys = [key async for key in ledger.scan_iter(f"*facts:{node}")]
            return [await ledger.hget(key, "facts") for key in keys]

        await until(facts, lambda shown: "noisy" in str(shown))
    noisy = gpu_pod("noisy", vgpu(memory=1000))
    other = gpu_pod("other", vgpu(memory=1000))
    noisy["metadata"]["labels"] = {"app": "noisy"}

    await cluster.create(noisy)
    await cluster.create(other)

    await cluster.until("other", running)
    explained = await until(
        lambda: cluster.leasehold("explain", "noisy"), lambda done: RULE in done.out
    )
    assert succeeded(explained)
    assert not running(await cluster.pod("noisy"))
    await cluster.kube.delete("/api/v1/namespaces/default/pods/quiet")
    await cluster.until("noisy", running)
    await cluster.audit()
    await cluster.clear()


def claim_pod(name: str) -> dict[str, Any]:
    """A pod with the claim, placed by the cluster's scheduler."""
    pod = gpu_pod(name, {})
    pod["spec"] |= {
        "schedulerName": "default-scheduler",
        "resourceClaims": [{"name": "gpu", "resourceClaimName": "shared"}],
    }
    pod["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    return pod


async def test_a_pod_is_evicted_for_one_of_higher_priority_that_waits_for_a_claim(
    cluster: Stack,
) -> None:
    await cluster.create(gpu_pod("low", vgpu(memory=12_000)))
    await cluster.until("low", running)
    await cluster.kubectl("apply", "-f", "-", stdin=json.dumps(CLAIM))
    urgent = {"metadata": {"name": "urgent"}, "value": 1000}
    await cluster.kube.create("/apis/scheduling.k8s.io/v1/priorityclasses", urgent)
    high = claim_pod("high")
    high["spec"] |= {"schedulerName": "leasehold", "priorityClassName": "urgent"}

    await cluster.create(high)
    await cluster.until("high", running)

    evictions = json.loads((await cluster.leasehold("preemptions", "--json")).out)["evictions"]
    assert [(line["pod"], line["beneficiary"]) for line in evictions] == [
        ("default/low", "default/high")
    ]
    await cluster.audit()
    await cluster.clear()
    await cluster.kube.delete("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/shared")


async def test_pods_of_a_claim_and_of_a_vendor_share_a_gpu(cluster: Stack) -> None:
    both = json.dumps({"apiVersion": "v1", "kind": "List", "items": [QUOTA, CLAIM]})
    await until(lambda: cluster.kubectl("apply", "-f", "-", stdin=both), succeeded)
    await until_quota(cluster)
    webhook = ("get", "mutatingwebhookconfiguration", "leasehold", "-o", "yaml")
    await until(lambda: cluster.kubectl(*webhook), lambda done: "allocations.claims" in done.out)

    for name in ("one", "two"):
        await cluster.create(claim_pod(name))
    await cluster.create(gpu_pod("vendor", vgpu(memory=1000, cores=40)))
    await cluster.until_all(3)
    await cluster.audit()

    limits = (await cluster.exec("two", "env")).out.splitlines()
    assert {"CUDA_DEVICE_MEMORY_LIMIT_0=6000m", "CUDA_DEVICE_SM_LIMIT=40"} <= set(limits)
    assert "/    6000MiB" in (await cluster.exec("two", "nvidia-smi")).out
    too_much = await cluster.exec("two", "gpu-load", "alloc 5g", "alloc 2g")
    assert too_much.out.splitlines() == ["alloc 5g: ok", "alloc 2g: out of memory"]
    shown = json.loads((await cluster.leasehold("ps", "--json")).out)["leases"]
    assert {(lease["name"], lease["shares"][0]["device"]) for lease in shown} == {
        (name, shown[0]["shares"][0]["device"]) for name in ("shared", "vendor")
    }, "the quota of one GPU has room for both, as the claim counts once"
    assert "claim default/shared" in (await cluster.leasehold("gpus")).out
    explained = (await cluster.leasehold("explain", "one", "-o", "wide")).out
    assert "default/shared, which 2 pods use" in explained
    # It was leased as the allocation was written.
    leased = ("ResourceClaim shared", "binder: lease claim ")
    await until(
        lambda: cluster.leasehold("trace", "one"),
        lambda done: all(text in done.out for text in leased),
    )
    await cluster.clear()
    await until(
        lambda: cluster.leasehold("ps", "--json"), lambda d: not json.loads(d.out)["leases"]
    )
    await cluster.audit()


async def restart(cluster: Stack, dra: str) -> None:
    """Restart everything with another setting of the component dra."""
    flags = ("--headless", "--nodes", "1", "--gpus", "1xT4", "--placers", "1")
    state = ("--state", str(cluster.root))
    assert succeeded(await cluster.leasehold("down"))
    up = await command("up", *flags, *state, env={"LEASEHOLD_DRA": dra}, limit_s=START_S)
    assert succeeded(up), up.err


async def test_the_lease_of_a_claim_ends_where_dra_was_switched_off_meanwhile(
    cluster: Stack,
) -> None:
    await cluster.kubectl("apply", "-f", "-", stdin=json.dumps(CLAIM))
    await cluster.create(claim_pod("three"))
    await cluster.until("three", running)

    await restart(cluster, "off")
    for kind, name in (("pod", "three"), ("resourceclaim", "shared")):
        gone = await cluster.kubectl("delete", kind, name, "--wait=false", "--grace-period=1")
        assert succeeded(gone), gone.err

    await until(
        lambda: cluster.leasehold("ps", "--json"), lambda d: not json.loads(d.out)["leases"]
    )
    await cluster.audit()
    await restart(cluster, "conditions")
    await cluster.kubectl("apply", "-f", "-", stdin=json.dumps(CLAIM))
    await cluster.create(claim_pod("four"))
    await cluster.until("four", running)
    await cluster.audit()
