"""Looks at the cluster's parts for the doctor: one method per check."""

import asyncio
import base64
import ssl
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import msgspec
from cryptography import x509

from services.cli.doctor import cluster_checks as judge
from services.cli.doctor.finding import Finding, SkipError
from shared.credentials.logins import ClientCredentials
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.ledger.redis_server import redis_facts
from shared.ledger.sentinel import uses_sentinels
from shared.model.clock import clock_ahead_s
from shared.model.errors import LeaseholdError
from shared.model.events.pod_events import Heartbeat
from shared.nats import server_status
from shared.nats.bus import Bus

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
AGENT = "node-agent"
HEAR_S = 6.0
"""A little longer than replicas are silent."""
RIGHTS = (
    ("get", "", "nodes", ""),
    ("patch", "", "nodes", ""),
    ("patch", "", "nodes", "status"),
    ("patch", "", "pods", ""),
)
"""Verb, group, resource and subresource that an agent needs, besides the kubelet's pods."""
POD_LISTS = ("pods", "proxy")
"""Of nodes: either will do."""


class _ClientConfig(msgspec.Struct):
    bundle: str = msgspec.field(name="caBundle", default="")
    url: str = ""


class _Webhook(msgspec.Struct):
    config: _ClientConfig = msgspec.field(name="clientConfig", default_factory=_ClientConfig)


class _Configuration(msgspec.Struct):
    webhooks: list[_Webhook] = []


class _Status(msgspec.Struct):
    allowed: bool = False


class _Review(msgspec.Struct):
    status: _Status = msgspec.field(default_factory=_Status)


class ClusterProbes:
    """NATS, Redis, the API server and what stands in it; what is not known is skipped."""

    def __init__(
        self,
        *,
        kube: KubernetesClient | LeaseholdError,
        redis_url: str,
        redis_keys: ClientCredentials,
        nats_url: str,
        nats_keys: ClientCredentials,
        simulated: bool,
    ) -> None:
        self._kube = kube
        self.redis_url = redis_url
        self.redis_keys = redis_keys
        self.nats_url = nats_url
        self.nats_keys = nats_keys
        self.simulated = simulated
        self._parts: asyncio.Task[dict[str, Heartbeat]] | None = None

    @property
    def kube(self) -> KubernetesClient:
        """The API server; raises why there is none."""
        if isinstance(self._kube, LeaseholdError):
            raise self._kube
        return self._kube

    async def nats(self) -> Finding:
        """Connect, and ask for the stream; a node's agent, as whom we may come, may not ask."""
        if self._is_agent():
            await server_status.check_connection(self._nats(), self.nats_keys)
            return judge.agent_let_in()
        return judge.nats(await server_status.stream_messages(self._nats(), self.nats_keys))

    async def redis(self) -> Finding:
        """Ask for its role and how it keeps what it has."""
        facts = await redis_facts(self._redis(), self.redis_keys)
        return judge.redis(facts, by_sentinels=uses_sentinels(self.redis_url))

    async def redis_clock(self) -> Finding:
        """Compare clocks: reservations run out by it."""
        facts = await redis_facts(self._redis(), self.redis_keys)
        return judge.clock("Redis", facts.ahead_s)

    async def api_clock(self) -> Finding:
        """Compare clocks with the API server, whose clock has whole seconds."""
        before = time.time()
        date = await self.kube.date()
        after = time.time()
        if not date:
            raise SkipError("the API server does not tell its time")
        theirs = parsedate_to_datetime(date).timestamp()
        return judge.clock("the API server", clock_ahead_s(theirs, before - 1, after))

    async def webhook(self) -> Finding:
        """Look at the registrations, at the authority in them, and at the server if it is near."""
        kind = "mutatingwebhookconfigurations"
        try:
            found = (await self.kube.read(f"{ADMISSION}/{kind}/leasehold", _Configuration)).webhooks
            missing = [] if found else [kind]
        except NotFoundError:
            found, missing = [], [kind]
        bundle = next((one.config.bundle for one in found if one.config.bundle), "")
        url = next((one.config.url for one in found if one.config.url), "")
        trusted = base64.b64decode(bundle) if bundle else b""
        refusal = await self._refusal(url, trusted) if url and trusted else ""
        return judge.webhook(missing, _days_left(trusted), refusal)

    async def _refusal(self, url: str, trusted: bytes) -> str:
        parts = urlsplit(url)
        context = ssl.create_default_context(cadata=trusted.decode())
        try:
            _, writer = await asyncio.open_connection(
                parts.hostname, parts.port or 443, ssl=context
            )
        except (OSError, ssl.SSLError) as error:
            return f"{parts.hostname}:{parts.port}: {error}"
        writer.close()
        return ""

    async def versions(self) -> Finding:
        """Listen to what replicas say of themselves."""
        return judge.versions({name: part.version for name, part in (await self._heard()).items()})

    async def parts(self) -> Finding:
        """Listen to what replicas say that they lack."""
        return judge.complaints(
            {name: part.unready_reasons for name, part in (await self._heard()).items()}
        )

    async def rights(self) -> Finding:
        """Ask the API server what our account may do."""
        denied: list[str] = []
        try:
            for verb, group, resource, part in RIGHTS:
                if not await self._may(verb, group, resource, part):
                    denied.append(f"{verb} {'/'.join(filter(None, (resource, part)))}")
            if not any([await self._may("get", "", "nodes", part) for part in POD_LISTS]):
                denied.append("get nodes/pods or nodes/proxy")
        except NotFoundError as error:
            raise SkipError("this API server does not tell what an account may do") from error
        return judge.rights(denied, len(RIGHTS) + 1)

    async def runtime_class(self) -> Finding:
        """Look for NVIDIA's runtime class."""
        if self.simulated:
            raise SkipError("simulated GPUs need no runtime")
        try:
            await self.kube.read("/apis/node.k8s.io/v1/runtimeclasses/nvidia")
        except NotFoundError:
            return judge.runtime_class(there=False)
        return judge.runtime_class(there=True)

    async def _may(self, verb: str, group: str, resource: str, part: str) -> bool:
        wanted = {"verb": verb, "group": group, "resource": resource, "subresource": part}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        }
        return (await self.kube.create(REVIEWS, body, _Review)).status.allowed

    async def _heard(self) -> dict[str, Heartbeat]:
        if self._parts is None:
            self._parts = asyncio.create_task(self._hear())
        return await self._parts

    async def _hear(self) -> dict[str, Heartbeat]:
        if self._is_agent():
            raise SkipError(
                "a node's agent, as which we came to NATS, may not hear who runs: look as operator"
            )
        loop = asyncio.get_running_loop()
        heard: dict[str, Heartbeat] = {}
        async with Bus.connect(
            self._nats(),
            name="leasehold doctor",
            keys=self.nats_keys,
            keeps_stream=False,
            patience_s=server_status.TIMEOUT_S,
        ) as bus:
            inbox = await bus.observe((Heartbeat,))
            until = loop.time() + HEAR_S
            while (left_s := until - loop.time()) > 0:
                try:
                    async with asyncio.timeout(left_s):
                        batch = await inbox.batch()
                except TimeoutError:
                    break
                for delivered in batch:
                    for event in delivered.events:
                        if isinstance(event, Heartbeat):
                            heard[event.instance] = event
        return {name: part for name, part in heard.items() if not part.stopping}

    def _is_agent(self) -> bool:
        """Whether NATS knows us as a node's agent; it has users only where somebody must log in."""
        login = self.nats_keys.login()
        return login is not None and login.user.startswith(f"{AGENT}.")

    def _nats(self) -> str:
        if not self.nats_url:
            raise SkipError("no NATS server is known: give --nats-url")
        return self.nats_url

    def _redis(self) -> str:
        if not self.redis_url:
            raise SkipError("no Redis server is known (agents have no access to it): --redis-url")
        return self.redis_url


def _days_left(trusted: bytes) -> float | None:
    """Return how long the newest authority is good for; None: there is none."""
    if not trusted:
        return None
    ends = [one.not_valid_after_utc for one in x509.load_pem_x509_certificates(trusted)]
    return (max(ends) - datetime.now(UTC)).total_seconds() / 86400
