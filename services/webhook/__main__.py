"""Runs the webhook: `python -m services.webhook --help`."""

from datetime import UTC, datetime

from services.webhook import metrics
from services.webhook.config_reader import ClusterClasses, ClusterKeys
from services.webhook.registration import PATH
from services.webhook.registration_writer import Registration
from services.webhook.server import Leaving, listening
from services.webhook.service import Webhook
from services.webhook.settings import ABOUT, EXAMPLES, WebhookSettings
from services.webhook.tracing import ReviewSpans
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import DirectoryStore, SecretStore
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import SystemClock
from shared.nats.bus import Bus
from shared.runtime.run import Nats, run, serve
from shared.runtime.settings import load_or_exit
from shared.runtime.telemetry import open_tracing


async def admit(settings: WebhookSettings) -> None:
    """Build the webhook from real parts and serve it until told to stop.

    NATS only brings news to it: pods are admitted without, by what was heard last.
    """
    policy, tls_dir = settings.policy, settings.tls_dir
    async with (
        KubernetesClient(load_credentials(settings.kubeconfig)) as kube,
        Bus.connect_later(
            settings.nats_url, name="webhook", keys=settings.nats_client_credentials("webhook")
        ) as bus,
    ):
        store = DirectoryStore(tls_dir) if tls_dir else SecretStore(kube, *settings.secret_name)
        registration = Registration(kube)
        shown = ServingCertificate(store, registration, settings.names, lambda: datetime.now(UTC))
        clock, tally = SystemClock(), metrics.PrometheusTally()
        keys, classes = ClusterKeys(kube), ClusterClasses(kube)
        tracing = open_tracing("webhook", settings)
        reviews = ReviewSpans(tracing)
        webhook = Webhook(policy, keys, classes, shown, tally, clock, reviews)
        leaving = Leaving(settings.drain_s)
        metrics.watch(lambda: shown.expires_at)
        async with listening(webhook.review, settings.listen, shown.context, leaving) as (_, port):
            if settings.url:
                registration.url = f"{settings.url.rstrip('/')}:{port}{PATH}"
            probes = {"certificate": shown.unready_reason}
            await serve(
                "webhook",
                webhook,
                bus=bus,
                settings=settings,
                nats=Nats.OPTIONAL,
                tracing=tracing,
                probes=probes,
                leave=leaving.begin,
            )


def main() -> None:
    """Read the settings and run."""
    settings = load_or_exit(
        WebhookSettings, "python -m services.webhook", about=ABOUT, examples=EXAMPLES
    )
    run(lambda: admit(settings), service="webhook", log_level=settings.log_level)


if __name__ == "__main__":
    main()
