"""ResourceClaims for MIG instances, from the profile that a claim selects to the instance."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from shared.model.requests.claim import DRIVER
from tests.support.stack import NEEDS_KUBECTL, Stack, gpu_pod, running, stack, succeeded
from tests.support.waiting import until

pytestmark = NEEDS_KUBECTL


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster() -> AsyncIterator[Stack]:
    env = {"LEASEHOLD_DRA": "conditions"}
    async with stack("--nodes", "1", "--gpus", "1xA100-40GB:mig", webhook=True, env=env) as up:
        yield up


def by_profile(profile: str) -> dict[str, Any]:
    expression = f"device.attributes['{DRIVER}'].profile == '{profile}'"
    return {"selectors": [{"cel": {"expression": expression}}]}


def by_memory(memory: str) -> dict[str, Any]:
    return {"capacity": {"requests": {"memory": memory}}}


async def create(up: Stack, name: str, *requests: dict[str, Any]) -> None:
    """Create a claim, and the pod of its name that uses it."""
    wanted = [
        {"name": f"r{number}", "exactly": {"deviceClassName": "mig.leasehold.dev", **request}}
        for number, request in enumerate(requests)
    ]
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": wanted}},
    }
    await until(lambda: up.kubectl("apply", "-f", "-", stdin=json.dumps(claim)), succeeded)
    pod = gpu_pod(name, {})
    pod["spec"] |= {
        "schedulerName": "default-scheduler",
        "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
    }
    pod["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    await up.create(pod)


async def instances(up: Stack, pod: str) -> list[str]:
    """Return the profiles of the instances that the pod's container sees."""
    await up.until(pod, running)
    listed = (await up.exec(pod, "nvidia-smi", "-L")).out.splitlines()
    return sorted(line.split()[1] for line in listed if line.split()[0] == "MIG")


async def no_leases(up: Stack) -> None:
    await up.clear()
    await until(lambda: up.leasehold("ps", "--json"), lambda d: not json.loads(d.out)["leases"])
    await up.audit()


async def test_claims_get_instances_of_their_profile_while_there_are_any(cluster: Stack) -> None:
    for number in range(3):
        await create(cluster, f"large-{number}", by_profile("3g.20gb"))
    await cluster.until_all(2)
    pods = [await cluster.pod(f"large-{number}") for number in range(3)]
    names = [pod["metadata"]["name"] for pod in pods if running(pod)]
    [waiting] = {f"large-{number}" for number in range(3)} - set(names)

    assert [await instances(cluster, name) for name in names] == [["3g.20gb"], ["3g.20gb"]]
    await cluster.audit()
    await until(
        lambda: cluster.pod(waiting), lambda p: "cannot allocate" in json.dumps(p["status"])
    )
    await cluster.kube.delete(f"/api/v1/namespaces/default/pods/{names[0]}")
    assert await instances(cluster, waiting) == ["3g.20gb"]
    await no_leases(cluster)


async def test_requests_of_one_claim_get_instances_of_one_layout(cluster: Stack) -> None:
    await create(cluster, "several", by_profile("1g.5gb"), by_memory("8Gi"))

    assert await instances(cluster, "several") == ["1g.5gb", "2g.10gb"]
    await cluster.audit()
    await no_leases(cluster)
