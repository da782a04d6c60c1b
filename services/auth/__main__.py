"""Runs the auth service: `python -m services.auth --help`."""

from services.auth.auth_callout import AuthorizationRefusedError, ServiceNamespaces, TokenReviewer
from services.auth.managed_servers import ManagedServers
from services.auth.nats_users import AUTH_CALLOUT_SUBJECT
from services.auth.object_store import RootSecretStore
from services.auth.root_secret import AUTH
from services.auth.service import EXPIRATION, AuthService
from services.auth.settings import ABOUT, EXAMPLES, AuthSettings
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.tokens import TokenUser, review_token
from shared.model.clock import SystemClock
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.runtime.run import Nats, run_service, serve


def token_reviewer(client: KubernetesClient, audience: str) -> TokenReviewer:
    async def review(token: str) -> TokenUser:
        status = await review_token(client, token, [audience])
        if not status.authenticated or audience not in status.audiences:
            raise AuthorizationRefusedError(
                f"the API server does not know its token: {status.error}"
            )
        return status.user

    return review


async def serve_servers(auth: AuthService, bus: Bus) -> None:
    await bus.receive_raw(subjects.FLOODED, auth.note_flood)
    await bus.reply_raw(AUTH_CALLOUT_SUBJECT, AUTH, auth.authorize)


async def serve_auth(settings: AuthSettings) -> None:
    """NATS starts only after this service, which does not wait for it."""
    namespace, name = settings.secret_name
    namespaces = ServiceNamespaces(system=namespace, agents=settings.agents_namespace)
    servers = ManagedServers(settings)
    async with KubernetesClient(load_credentials(settings.kubeconfig)) as client:
        auth = AuthService(
            RootSecretStore(client, namespaces, name),
            servers,
            token_reviewer(client, settings.audience),
            SystemClock(),
        )
        EXPIRATION.set_function(lambda: auth.expires_at)
        async with Bus.connect_later(
            settings.nats_url, name=AUTH, credentials=servers.nats_credentials
        ) as bus:
            await serve(
                AUTH,
                auth,
                bus=bus,
                settings=settings,
                nats=Nats.MEANWHILE,
                probes={"secrets": auth.unready_reason},
                begin=lambda: serve_servers(auth, bus),
            )


if __name__ == "__main__":
    run_service(AuthSettings, serve_auth, service=AUTH, about=ABOUT, examples=EXAMPLES)
