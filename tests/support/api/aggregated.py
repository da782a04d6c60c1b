"""A running API whose objects a simulated API server serves, with the roles of the manifests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import yaml

from services.api.aggregated.server import AggregatedApi
from services.api.settings import ApiSettings
from services.api.wiring import serve_group
from shared.credentials.authorization import KubernetesAuthenticator
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import SystemClock
from tests.support.api.running import RunningApi
from tests.support.servers.nats import free_port
from tests.support.simcluster.apiserver import ApiUnderTest
from tests.support.simcluster.installed import created
from tests.support.waiting import until

SYSTEM = "leasehold-system"
GROUP = "/apis/visibility.leasehold.dev/v1beta1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
MANIFESTS = Path(__file__).parents[3] / "k8s" / "base" / "api.yaml"


@contextlib.asynccontextmanager
async def aggregated(api: ApiUnderTest, shown: RunningApi, folder: Path) -> AsyncIterator[str]:
    """Serve the group behind the API server; yields the address that only it may use."""
    port = free_port()
    async with KubernetesClient(load_credentials(api.kubeconfig)) as kube, api.client() as client:
        await install(client, port)
        group = AggregatedApi(shown.server, KubernetesAuthenticator(kube, SystemClock()))
        address = f"127.0.0.1:{port}"
        settings = ApiSettings(aggregated=address, state_dir=folder)
        serving = asyncio.create_task(serve_group(group, kube, settings))
        await until(lambda: _status(client), lambda status: status == 200)
        yield address
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def _status(client: aiohttp.ClientSession) -> int:
    async with client.get(f"{GROUP}/gpudevices") as response:
        return response.status


async def install(client: aiohttp.ClientSession, port: int) -> None:
    """Create of the manifests what does not run."""
    await created(client, "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})
    for manifest in yaml.safe_load_all(MANIFESTS.read_text()):
        kind = manifest["kind"]
        if kind in {"ClusterRole", "ClusterRoleBinding"}:
            await created(client, f"{RBAC}/{kind.lower()}s", manifest)
        elif kind == "Service":
            await created(client, f"/api/v1/namespaces/{SYSTEM}/services", manifest)
        elif kind == "APIService":
            await created(client, "/apis/apiregistration.k8s.io/v1/apiservices", manifest)
            ports = [{"name": "aggregated", "port": port}]
            subsets = [{"addresses": [{"ip": "127.0.0.1"}], "ports": ports}]
            endpoints = {"metadata": {"name": "api"}, "subsets": subsets}
            await created(client, f"/api/v1/namespaces/{SYSTEM}/endpoints", endpoints)
