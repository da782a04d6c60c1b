"""An auth service that has made its secrets in a small cluster, and a nats-server that calls it."""

import base64
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats

from services.auth.__main__ import OneSecret
from services.auth.auth_callout import RefusedError, Reviewed
from services.auth.metrics import PrometheusTally
from services.auth.nats_users import CALLS
from services.auth.secret_store import Objects
from services.auth.secrets import AUTH
from services.auth.servers import OurServers
from services.auth.service import AuthService
from services.auth.settings import AuthSettings
from services.topology import roles
from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.token_reviews import review_token
from shared.model.clock import SystemClock
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.support.auth.cluster import AUDIENCE, NAMESPACE, DoorsCluster
from tests.support.servers.nats import free_port, nats_binary


class DoorsWorld:
    """Its parts, and whoever comes with a token."""

    def __init__(
        self, folder: Path, cluster: DoorsCluster, kube: KubernetesClient, redis_url: str
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
        self.servers = OurServers(self.settings)
        self.kube = kube
        self.auth = self.another()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def another(self) -> AuthService:
        """Another replica."""

        async def review(token: str) -> Reviewed:
            status = await review_token(self.kube, token, [AUDIENCE])
            if not status.authenticated or AUDIENCE not in status.audiences:
                raise RefusedError(f"the API server does not know its token: {status.error}")
            return Reviewed(user=status.user.username, extra=status.user.extra)

        return AuthService(
            OneSecret(Objects(self.kube, NAMESPACE), "auth"),
            self.servers,
            review,
            SystemClock(),
            NAMESPACE,
            self.settings.names,
            self.settings.nats_files,
            roles(),
            PrometheusTally(),
        )

    def mount(self, secret: str, directory: Path) -> None:
        """Write what a Secret holds, as the kubelet would."""
        directory.mkdir(exist_ok=True)
        for name, text in self.cluster.objects["secrets", secret].items():
            (directory / name).write_bytes(base64.b64decode(text))

    def start_nats(self, config: str = "nats.conf", *flags: str) -> None:
        self.mount("auth-nats", self.files)
        command = [nats_binary(), "-a", "127.0.0.1", "-p", str(self.port), "-js", *flags]
        command += ["-sd", str(self.folder / "store"), "--config", str(self.files / config)]
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

    def keys(self, token: str, user: str) -> ClientCredentials:
        """What somebody shows who has this token and calls itself so."""
        path = self.folder / f"token-{user}"
        path.write_text(token)
        return ClientCredentials(token=path, user=user, tls=self.trusting)

    @contextlib.asynccontextmanager
    async def raw(self, token: str, user: str) -> AsyncIterator[tuple[Any, list[str]]]:
        """A connection by hand, and what it was refused."""
        refused: list[str] = []

        async def note(error: Exception) -> None:
            refused.append(str(error).lower())

        client = await nats.connect(
            self.url,
            user=user,
            password=token,
            tls=self.trusting.context(),
            error_cb=note,
            inbox_prefix=subjects.inbox_of(user),
            allow_reconnect=False,
        )
        try:
            yield client, refused
        finally:
            await client.close()

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[Bus]:
        """Let the auth service answer."""
        keys = self.servers.nats_keys
        async with Bus.connect(self.url, name="auth", keys=keys, keeps_stream=False) as bus:
            for _ in range(4):
                await bus.reply_raw(CALLS, AUTH, self.auth.answer)
            await bus.client.flush()
            yield bus


@contextlib.asynccontextmanager
async def doors_world(
    folder: Path, redis_url: str = "unix:///nowhere"
) -> AsyncIterator[DoorsWorld]:
    """Make the secrets, start NATS with them, and let the auth service answer it."""
    cluster = DoorsCluster()
    async with cluster.served() as kube:
        world = DoorsWorld(folder, cluster, kube, redis_url)
        await world.auth.make()
        world.start_nats()
        try:
            async with world.answering():
                yield world
        finally:
            world.stop_nats()
