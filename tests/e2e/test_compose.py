"""`compose.yaml` as processes: each service has the rights of the manifests, and no more."""

import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.cli.up.installation import agent_account
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from tests.support.compose import SERVICES, Compose, running
from tests.support.stack import refusals_in
from tests.support.waiting import until

PODS = "/api/v1/namespaces/default/pods"
AUTHENTICATION = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
AUTHORIZATION = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def composed() -> AsyncIterator[Compose]:
    with tempfile.TemporaryDirectory(prefix="lh-compose-") as root:
        async with running(Path(root)) as made:
            yield made


def admin(composed: Compose) -> KubernetesClient:
    return KubernetesClient(load_credentials(composed.root / "leasehold/cluster/kubeconfig"))


async def test_a_pod_gets_its_share_and_no_service_lacks_a_right(composed: Compose) -> None:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}
    container = {"name": "main", "image": "x", "resources": {"limits": limits}}
    pod = {"metadata": {"name": "first"}, "spec": {"containers": [container]}}
    by_kube_scheduler = {
        "metadata": {"name": "second"},
        "spec": {"containers": [container], "hostUsers": False, "hostNetwork": True},
    }
    async with admin(composed) as kube:

        async def registered() -> bool:
            path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
            return b"leasehold" in await kube.read(path)

        async def runs() -> bool:
            names = ("first", "second")
            created = [json.loads(await kube.read(f"{PODS}/{name}")) for name in names]
            assert created[1]["spec"]["schedulerName"] == "leasehold-full"
            return all(pod["status"].get("phase") == "Running" for pod in created)

        await until(registered, limit_s=180.0)
        await kube.create(PODS, pod)
        await kube.create(PODS, by_kube_scheduler)
        await until(runs, limit_s=180.0)
    shown = await composed.command("gpus")
    audited = await composed.command("audit")
    checked = await composed.command("doctor")

    assert "default/first" in shown.out, shown.err
    assert audited.out.startswith("clean: 2 leases"), audited.out + audited.err
    assert "ok      endpoints" in checked.out, checked.out + checked.err
    assert refusals_in(composed.root / "logs") == []


@pytest.mark.parametrize("service", [name for name in SERVICES if Compose(Path()).kubeconfig(name)])
async def test_no_service_is_an_administrator(composed: Compose, service: str) -> None:
    file = composed.kubeconfig(service)
    assert file is not None
    namespace = SYSTEM_NAMESPACE
    account = service
    if service.startswith("agent-"):
        node = service.replace("agent", "node")
        assert file.name == agent_account(node)
        namespace = AGENTS_NAMESPACE
        account = "node-agent"
    everything = {"resourceAttributes": {"verb": "*", "group": "*", "resource": "*"}}
    async with KubernetesClient(load_credentials(file)) as kube:
        caller = json.loads(await kube.create(AUTHENTICATION, {"kind": "SelfSubjectReview"}))
        review = {"kind": "SelfSubjectAccessReview", "spec": everything}
        allowed = json.loads(await kube.create(AUTHORIZATION, review))

    assert (
        caller["status"]["userInfo"]["username"] == f"system:serviceaccount:{namespace}:{account}"
    )
    assert allowed["status"]["allowed"] is False
    volumes = SERVICES[service]["volumes"]
    has_admin = [volume for volume in volumes if volume.startswith("cluster:")]
    assert not has_admin or service.startswith(("agent-", "operator"))
