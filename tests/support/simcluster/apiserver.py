"""A simulated API server for tests: in this process, on a free port, over real TLS."""

import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from simcluster.apimachinery.objects import Json
from simcluster.apiserver.http.server import ApiServer, ApiSettings, start_server
from simcluster.apiserver.registry import open_store
from simcluster.apiserver.storage.store import DEFAULT_WINDOW, ObjectStore
from simcluster.credentials import api_server_certificates, write_kubeconfig
from simcluster.ports import ContainerRuntime

Client = aiohttp.ClientSession
MERGE = {"Content-Type": "application/merge-patch+json"}
PODS = "/api/v1/namespaces/default/pods"
TOKEN = "a-token-for-tests"  # noqa: S105
_CERTIFICATES: list[tempfile.TemporaryDirectory[str]] = []
"""Made once for all tests of a process, and removed when it ends."""


@dataclass(frozen=True, slots=True)
class ApiUnderTest:
    """Where the server is, and the store behind it."""

    url: str
    token: str
    ca: Path
    kubeconfig: Path
    store: ObjectStore
    server: ApiServer

    @asynccontextmanager
    async def client(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Open an authenticated session; use it with paths such as `/api/v1/pods`."""
        context = ssl.create_default_context(cafile=str(self.ca))
        async with aiohttp.ClientSession(
            self.url,
            headers={"Authorization": f"Bearer {self.token}"},
            connector=aiohttp.TCPConnector(ssl=context),
        ) as session:
            yield session


def a_pod(
    name: str = "web", limits: Json | None = None, *, labels: Json | None = None, **spec: Any
) -> Json:
    """Return a pod of one container."""
    container: Json = {"name": "main", "image": "example/image:1"}
    if limits is not None:
        container["resources"] = {"limits": limits}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels or {}},
        "spec": {"containers": [container], **spec},
    }


@asynccontextmanager
async def api_server(
    *,
    window: int = DEFAULT_WINDOW,
    bookmark_s: float = 60.0,
    store: ObjectStore | None = None,
    runtime: Callable[[ObjectStore], ContainerRuntime] | None = None,
) -> AsyncIterator[ApiUnderTest]:
    """Start a server; `runtime` is made from its store."""
    if not _CERTIFICATES:
        _CERTIFICATES.append(tempfile.TemporaryDirectory(prefix="lh-tls-"))
    certs = api_server_certificates(Path(_CERTIFICATES[0].name))
    held = open_store(window=window) if store is None else store
    server = ApiServer(
        held,
        ApiSettings(token=TOKEN, bookmark_s=bookmark_s),
        runtime=None if runtime is None else runtime(held),
    )
    with tempfile.TemporaryDirectory(prefix="lh-api-") as directory:
        async with start_server(server, certs) as url:
            kubeconfig = Path(directory) / "kubeconfig"
            write_kubeconfig(kubeconfig, url, certs.ca.read_bytes(), TOKEN)
            yield ApiUnderTest(url, TOKEN, certs.ca, kubeconfig, held, server)


async def body_of(response: aiohttp.ClientResponse, code: int = 200) -> Any:
    """Return the body of a response that must have this status."""
    document = await response.json()
    assert response.status == code, document
    return document


async def read(client: Client, path: str, *, code: int = 200, **more: Any) -> Any:
    """Read an object or a list."""
    return await body_of(await client.get(path, **more), code)


async def create(client: Client, path: str, body: Any, *, code: int = 201, **more: Any) -> Any:
    """Create an object; return it, or why it is refused with another code."""
    return await body_of(await client.post(path, json=body, **more), code)


async def merge(client: Client, path: str, body: Any, *, code: int = 200) -> Any:
    """Change an object by a merge patch; return it, or why it is refused with another code."""
    return await body_of(await client.patch(path, json=body, headers=MERGE), code)


async def refusal(client: Client, path: str, body: Any, *, code: int, **more: Any) -> str:
    """Create an object that is refused; return the message."""
    return str((await create(client, path, body, code=code, **more))["message"])
