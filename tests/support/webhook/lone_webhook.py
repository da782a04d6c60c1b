"""`python -m tests.support.webhook.lone_webhook DIRECTORY`: a webhook in a process of its own."""

import asyncio
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from services.webhook.pod_admission import AdmissionPolicy
from services.webhook.registration import webhook_paths
from services.webhook.server import serving_reviews
from services.webhook.service import Webhook
from shared.credentials.certificate_rotation import ServingCertificate
from shared.credentials.certificate_stores import DirectoryStore
from shared.model.budgets.quota import Quota
from shared.model.clock import SystemClock
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import ClaimLeaseReply, ClaimLeaseRequest
from shared.model.names import Namespace
from shared.runtime.health import suppress_bad_request_tracebacks
from shared.runtime.run import _runner
from shared.runtime.telemetry import Tracing


async def nothing() -> str:
    return ""


async def no_quotas() -> Mapping[Namespace, Quota]:
    return {}


async def no_isolation() -> Mapping[Namespace, str]:
    return {}


async def no_lease(_: ClaimLeaseRequest) -> ClaimLeaseReply:
    raise UnavailableError("there is no binder")


async def serve(directory: Path) -> None:
    certificate = ServingCertificate(
        DirectoryStore(directory), None, ("127.0.0.1",), lambda: datetime.now(UTC)
    )
    await certificate.refresh()
    webhook = Webhook(
        policy=AdmissionPolicy(),
        default_priority_class=nothing,
        lease_claim=no_lease,
        read_quotas=no_quotas,
        read_isolation=no_isolation,
        rotate_certificate=certificate.run,
        clock=SystemClock(),
        tracing=Tracing("webhook", None),
    )
    suppress_bad_request_tracebacks()
    async with serving_reviews(
        webhook,
        "0.0.0.0:0",
        certificate.current_context,
        paths=lambda: webhook_paths().values(),
    ) as (_, port):
        sys.stdout.write(json.dumps({"port": port}) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    _runner()(serve(Path(sys.argv[1])))
