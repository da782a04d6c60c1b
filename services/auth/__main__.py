"""Runs the auth service: `python -m services.auth --help`."""

from collections.abc import Mapping

from services.auth import metrics
from services.auth.auth_callout import RefusedError, Reviewed
from services.auth.nats_users import CALLS
from services.auth.secret_store import Objects
from services.auth.secrets import AUTH, Handout
from services.auth.servers import OurServers
from services.auth.service import AuthService
from services.auth.settings import ABOUT, EXAMPLES, AuthSettings
from services.topology import roles
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.token_reviews import review_token
from shared.model.clock import SystemClock
from shared.nats.bus import Bus
from shared.runtime.run import Nats, run, serve
from shared.runtime.settings import load_or_exit

AT_ONCE = 16
"""Questions of NATS that are answered side by side."""


class OneSecret:
    """All that is kept, in one Secret, and what follows from it in others."""

    def __init__(self, objects: Objects, name: str) -> None:
        self.objects = objects
        self.name = name

    async def load(self) -> tuple[Mapping[str, bytes], str]:
        """Read it."""
        stored = await self.objects.load("secrets", self.name)
        return stored.data, stored.version

    async def save(self, data: Mapping[str, bytes], version: str) -> None:
        """Write it."""
        await self.objects.save("secrets", self.name, data, version)

    async def hand_out(self, handout: Handout) -> bool:
        """Write what follows."""
        return await self.objects.hand_out(handout)


async def guard(settings: AuthSettings) -> None:
    """Build the auth service from real parts and serve it until told to stop.

    NATS waits for what we make, and so we wait for NATS.
    """
    namespace, name = settings.secret_name
    servers = OurServers(settings)
    async with KubernetesClient(load_credentials(settings.kubeconfig)) as kube:

        async def review(token: str) -> Reviewed:
            status = await review_token(kube, token, [settings.audience])
            if not status.authenticated or settings.audience not in status.audiences:
                raise RefusedError(f"the API server does not know its token: {status.error}")
            return Reviewed(user=status.user.username, extra=status.user.extra)

        auth = AuthService(
            OneSecret(Objects(kube, namespace), name),
            servers,
            review,
            SystemClock(),
            namespace,
            settings.names,
            settings.nats_files,
            roles(),
            metrics.PrometheusTally(),
        )
        metrics.watch(lambda: auth.ends_at)
        async with Bus.connect_later(settings.nats_url, name=AUTH, keys=servers.nats_keys) as bus:

            async def begin() -> None:
                for _ in range(AT_ONCE):
                    await bus.reply_raw(CALLS, AUTH, auth.answer)

            await serve(
                AUTH,
                auth,
                bus=bus,
                settings=settings,
                nats=Nats.MEANWHILE,
                probes={"secrets": auth.missing},
                begin=begin,
            )


def main() -> None:
    """Read the settings and run."""
    settings = load_or_exit(AuthSettings, "python -m services.auth", about=ABOUT, examples=EXAMPLES)
    run(lambda: guard(settings), service=AUTH, log_level=settings.log_level)


if __name__ == "__main__":
    main()
