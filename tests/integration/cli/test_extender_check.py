"""The doctor's check of kube-scheduler and its extender, on the simulated API server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.cli.doctor.doctor import DoctorTarget, run_checks
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.findings import Finding, Outcome
from shared.model.names import SYSTEM_NAMESPACE
from tests.support.simcluster.apiserver import ApiUnderTest, api_server

DEPLOYMENTS = f"/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/deployments"


@pytest.fixture
async def api() -> AsyncIterator[ApiUnderTest]:
    async with (
        api_server() as running,
        KubernetesClient(load_credentials(running.kubeconfig)) as kube,
    ):
        await kube.create("/api/v1/namespaces", {"metadata": {"name": SYSTEM_NAMESPACE}})
        yield running


async def deploy(api: ApiUnderTest, name: str, ready: int) -> None:
    labels = {"app": name}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    spec: dict[str, Any] = {"selector": {"matchLabels": labels}, "template": template}
    async with KubernetesClient(load_credentials(api.kubeconfig)) as kube:
        await kube.create(DEPLOYMENTS, {"metadata": {"name": name}, "spec": {"replicas": 0} | spec})
        status = {"status": {"readyReplicas": ready}}
        await kube.patch_merge(f"{DEPLOYMENTS}/{name}/status", status)


async def check(api: ApiUnderTest) -> Finding:
    findings = await run_checks(DoctorTarget(nodes=(), kubeconfig=api.kubeconfig, only="cluster"))
    return next(found for found in findings if found.check == "extender")


async def test_the_extender_is_checked_where_the_component_is_installed(api: ApiUnderTest) -> None:
    absent = await check(api)
    await deploy(api, "extender", 2)
    half = await check(api)
    await deploy(api, "kube-scheduler", 1)
    ready = await check(api)

    assert absent.outcome is Outcome.SKIPPED
    assert half.outcome is Outcome.FAIL
    assert "deployment/kube-scheduler does not exist" in half.text
    assert (ready.outcome, ready.text) == (
        Outcome.OK,
        "ready replicas: extender 2, kube-scheduler 1",
    )


async def test_an_extender_without_a_ready_replica_is_named_with_its_secret(
    api: ApiUnderTest,
) -> None:
    await deploy(api, "extender", 0)
    await deploy(api, "kube-scheduler", 1)

    found = await check(api)

    assert found.outcome is Outcome.FAIL
    assert found.text.startswith("deployment/extender has no ready replica")
    assert "auth-extender" in found.fix
