"""An auth service that has made its secrets in a small cluster, and a nats-server that calls it."""

import base64
import contextlib
import subprocess
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from nats.aio.client import Client

from services.auth.__main__ import serve_servers, token_reviewer
from services.auth.auth_callout import ServiceNamespaces
from services.auth.managed_servers import ManagedServers
from services.auth.object_store import RootSecretStore
from services.auth.service import AuthService, AuthTiming
from services.auth.settings import AuthSettings
from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.kubernetes.client import KubernetesClient
from shared.model.clock import SystemClock
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from shared.nats.bus import Bus
from tests.support.auth.cluster import AUDIENCE, AuthCluster
from tests.support.servers.nats import flush, free_port, nats_binary, plain_client

NAMESPACES = ServiceNamespaces(system=SYSTEM_NAMESPACE, agents=AGENTS_NAMESPACE)


class AuthWorld:
    """The service, its servers, and clients with tokens."""

    def __init__(
        self,
        folder: Path,
        cluster: AuthCluster,
        kube: KubernetesClient,
        redis_url: str,
        timing: AuthTiming | None = None,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster = cluster
        self.port = free_port()
        self.files = folder / "etc-nats"
        self.settings = AuthSettings(
            nats_url=self.url,
            nats_ca_file=folder / "run" / "ca.crt",
            redis_url=redis_url,
            names=("127.0.0.1", "localhost"),
            state_dir=folder / "run",
            nats_files=str(self.files),
            redis_files="",
        )
        self.servers = ManagedServers(self.settings)
        self.kube = kube
        self.timing = timing
        self.auth = self.new_replica()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def new_replica(self) -> AuthService:
        """Return another replica."""
        return AuthService(
            RootSecretStore(self.kube, NAMESPACES, "auth"),
            self.servers,
            token_reviewer(self.kube, AUDIENCE),
            SystemClock(),
            timing=self.timing,
        )

    def combine_scheduler(self) -> None:
        """Let the binder's token authorize watcher, placer and planner, too."""
        self.auth.settings = replace(self.auth.settings, combined_scheduler=True)

    def mount(self, secret: str, directory: Path) -> None:
        """Write a Secret's data to files, as the kubelet does."""
        directory.mkdir(exist_ok=True)
        for name, text in self.cluster.objects["secrets", secret].items():
            (directory / name).write_bytes(base64.b64decode(text))

    def start_nats(self, config: str = "nats.conf", *flags: str) -> None:
        self.mount("auth-nats", self.files)
        command = [nats_binary(), "-a", "127.0.0.1", "-p", str(self.port), *flags]
        command += ["--config", str(self.files / config)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def stop_nats(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def trusting(self) -> TlsFiles:
        return TlsFiles(ca=self.folder / "run" / "ca.crt")

    def credentials(self, token: str, user: str) -> ClientCredentials:
        """Return the credentials of a client with this token and user name."""
        path = self.folder / f"token-{user}"
        path.write_text(token)
        return ClientCredentials(token_file=path, user=user, tls=self.trusting)

    def raw(self, token: str, user: str) -> AbstractAsyncContextManager[tuple[Client, list[str]]]:
        """Open a plain connection; yield it and the errors that the server sends."""
        return plain_client(
            self.url,
            user,
            token,
            tls=self.trusting.context(),
            allow_reconnect=False,
            connect_timeout=20,  # a review passes through two servers; a busy machine takes seconds
        )

    @contextlib.asynccontextmanager
    async def authorizing(self) -> AsyncIterator[Bus]:
        """Let the auth service reply to NATS."""
        keys = self.servers.nats_credentials
        async with Bus.connect(self.url, name="auth", credentials=keys) as bus:
            await serve_servers(self.auth, bus)
            await flush(bus.client)
            yield bus


@contextlib.asynccontextmanager
async def auth_world(
    folder: Path, redis_url: str = "unix:///nowhere", timing: AuthTiming | None = None
) -> AsyncIterator[AuthWorld]:
    """Make the secrets, start NATS with them, and let the auth service reply to it."""
    cluster = AuthCluster()
    async with cluster.served() as kube:
        world = AuthWorld(folder, cluster, kube, redis_url, timing)
        await world.auth.reconcile()
        world.start_nats()
        try:
            async with world.authorizing():
                yield world
        finally:
            world.stop_nats()
