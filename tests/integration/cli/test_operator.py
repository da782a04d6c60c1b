"""The account of the operator: its token at NATS, and what its pod may read."""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.audit.snapshot_reader import claims_of, node_names, pods_of
from services.cli.doctor.cluster_probes import ClusterProbes, ClusterServers
from services.cli.doctor.doctor import AGENT_ONLY_CHECKS, CLUSTER_CHECKS, run_check
from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials, load_credentials
from shared.model.findings import Outcome, SkipError
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from tests.support.auth.world import AuthWorld, auth_world
from tests.support.servers.nats import nats_server
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.installed import created, install_rights, token_of


@pytest.fixture
async def world() -> AsyncIterator[AuthWorld]:
    with tempfile.TemporaryDirectory(prefix="lh-operator-") as folder:
        async with auth_world(Path(folder)) as made:
            yield made


async def test_the_token_of_the_operator_is_accepted(world: AuthWorld) -> None:
    file = world.folder / "token"
    file.write_text(world.cluster.issue_token("operator"))
    tls = TlsFiles(ca=world.trusting.ca)
    login = ClientCredentials(token_file=file, user="operator", tls=tls)
    servers = ClusterServers(nats_url=world.url, nats_credentials=login)

    found = await run_check(ClusterProbes(servers, SkipError("there is none")).nats())

    assert found.outcome is Outcome.OK


async def test_a_nats_whose_messages_are_too_small_is_warned_of() -> None:
    async with nats_server() as nats:
        probes = ClusterProbes(ClusterServers(nats_url=nats.url), SkipError("there is none"))
        found = await run_check(probes.nats())

    assert found.outcome is Outcome.WARN
    assert "at most 1048576 bytes" in found.text
    assert "set max_payload of NATS" in found.fix


SETTINGS = {"metadata": {"name": "settings"}, "data": {"LEASEHOLD_LOG_LEVEL": "info"}}


OLD_RULES = [
    {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["persistentvolumes"], "verbs": ["list"]},
    {
        "apiGroups": ["storage.k8s.io"],
        "resources": ["storageclasses", "csidrivers", "csistoragecapacities"],
        "verbs": ["list", "watch"],
    },
]


@pytest.fixture
async def cluster() -> AsyncIterator[ApiUnderTest]:
    async with api_server() as api:
        yield api


@pytest.fixture
async def admin(cluster: ApiUnderTest) -> AsyncIterator[KubernetesClient]:
    async with KubernetesClient(load_credentials(cluster.kubeconfig)) as kube:
        yield kube


@pytest.fixture
async def operator(
    cluster: ApiUnderTest, admin: KubernetesClient
) -> AsyncIterator[KubernetesClient]:
    labels = {"app": "x"}
    container = {
        "name": "main",
        "image": "x",
        "envFrom": [{"configMapRef": {"name": "settings"}}],
    }
    spec = {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
    }
    async with cluster.client() as client:
        await install_rights(cluster)
        for namespace, kind in (
            (SYSTEM_NAMESPACE, "deployments"),
            (AGENTS_NAMESPACE, "daemonsets"),
        ):
            await created(client, f"/api/v1/namespaces/{namespace}/configmaps", SETTINGS)
            path = f"/apis/apps/v1/namespaces/{namespace}/{kind}"
            for name in ("extender", "watcher"):
                await created(client, path, {"metadata": {"name": name}, "spec": spec})
        ready = {"status": {"readyReplicas": 2}}
        deployments = f"/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/deployments"
        await admin.patch_merge(f"{deployments}/extender/status", ready)
        extended = {"metadata": {"name": "a"}, "spec": {"extendedResourceName": "example.org/gpu"}}
        await created(client, "/apis/resource.k8s.io/v1/deviceclasses", extended)
        token = await token_of(client, "operator", "node-a")
        ca_pem = cluster.ca.read_text()
        credentials = ClusterCredentials(server=cluster.url, ca_pem=ca_pem, token=token)
        async with KubernetesClient(credentials) as kube:
            yield kube


async def test_no_check_of_the_doctor_lacks_a_right(operator: KubernetesClient) -> None:
    probes = ClusterProbes(ClusterServers(), operator)

    texts = {
        name: (await run_check(check.run(probes))).text
        for name, check in CLUSTER_CHECKS.items()
        if name not in AGENT_ONLY_CHECKS
    }

    assert {name: text for name, text in texts.items() if "403" in text} == {}
    assert texts["settings"].startswith("there is no NATS address")
    assert texts["workloads"].startswith("api is not installed; binder is not installed")
    assert texts["extender"].startswith("deployment/kube-scheduler does not exist")


async def test_rights_to_storage_that_the_watcher_lacks_are_named(
    operator: KubernetesClient, admin: KubernetesClient
) -> None:
    probes = ClusterProbes(ClusterServers(), operator)
    roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles/leasehold-watcher"

    complete = await run_check(probes.storage_rights())
    await admin.patch_merge(roles, {"rules": OLD_RULES})
    lacking = await run_check(probes.storage_rights())

    assert complete.outcome is Outcome.OK
    assert "all 12 rights" in complete.text
    assert lacking.outcome is Outcome.FAIL
    assert lacking.text == (
        "system:serviceaccount:leasehold-system:watcher may not watch persistentvolumes, "
        "list csinodes, watch csinodes: pods with PersistentVolumeClaims wait"
    )
    assert "helm upgrade" in lacking.fix


WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/endpointslices"


async def test_what_is_registered_and_has_no_ready_endpoint_is_a_fault() -> None:
    service = {"name": "webhook", "namespace": SYSTEM_NAMESPACE}
    hook = {
        "name": "pods.leasehold.dev",
        "clientConfig": {"service": service},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "rules": [],
    }
    address = {"addresses": ["10.0.0.1"], "conditions": {"ready": False}}
    labels = {"kubernetes.io/service-name": "webhook"}
    slice_: dict[str, Any] = {
        "metadata": {"name": "webhook-1", "labels": labels},
        "addressType": "IPv4",
        "endpoints": [address],
    }
    async with (
        api_server() as api,
        api.client() as client,
        KubernetesClient(load_credentials(api.kubeconfig)) as admin,
    ):
        probes = ClusterProbes(ClusterServers(), admin)
        nothing = await run_check(probes.endpoints())
        await created(client, WEBHOOKS, {"metadata": {"name": "leasehold"}, "webhooks": [hook]})
        scaled_to_0 = await run_check(probes.endpoints())
        await created(client, "/api/v1/namespaces", {"metadata": {"name": SYSTEM_NAMESPACE}})
        await created(client, SLICES, slice_)
        starting = await run_check(probes.endpoints())
        await admin.patch_merge(f"{SLICES}/webhook-1", {"endpoints": [{"addresses": ["10.0.0.1"]}]})
        ready = await run_check(probes.endpoints())

    assert nothing.outcome is Outcome.OK
    for finding in (scaled_to_0, starting):
        assert finding.outcome is Outcome.FAIL
        assert "leasehold (Service webhook): every new pod with GPUs is denied" in finding.text
    assert (ready.outcome, ready.text[0]) == (Outcome.OK, "1")


async def test_the_audit_reads_pods_nodes_and_claims(operator: KubernetesClient) -> None:
    assert [pod.name for pod in await pods_of(operator)] == ["operator-node-a"]
    assert await node_names(operator) == frozenset()
    assert await claims_of(operator) == ()
