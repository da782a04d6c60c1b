"""Reads the cluster's components for the doctor: one method per check."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from cryptography import x509

from services.cli.api_client import APISERVICE, GROUP
from services.cli.doctor import cluster_checks as judge
from services.webhook.registration import CLAIMS_WEBHOOK
from shared.credentials.logins import NO_CREDENTIALS, ClientCredentials
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.full_pods import Workload
from shared.kubernetes.paths import objects_path
from shared.kubernetes.registrations import (
    RegisteredService,
    Registration,
    ServiceEndpoints,
    ServiceReference,
)
from shared.kubernetes.resource_claims import CLASSES_PATH, DeviceClass
from shared.kubernetes.types import (
    AccessReview,
    ApiNode,
    ApiResourceQuota,
    ObjectList,
    RawObject,
    RegisteredWebhook,
    ServerVersion,
    WebhookConfiguration,
)
from shared.ledger.connection_pool import uses_sentinels
from shared.ledger.leases import RedisLeases
from shared.ledger.redis_server import RedisFacts, redis_facts
from shared.model.clock import clock_ahead_s
from shared.model.devices.device import Device
from shared.model.errors import LeaseholdError, RequestError, UnavailableError
from shared.model.events.pod_events import Heartbeat
from shared.model.findings import DIAGNOSIS_TIMEOUT_S, Finding, Outcome, SkipError, fail, ok
from shared.model.leases.ledger import UnreadableRecord
from shared.model.names import (
    AGENTS_NAMESPACE,
    REQUIRED_SERVICES,
    SYSTEM_NAMESPACE,
    NodeName,
)
from shared.model.requests.claim import DRIVER
from shared.nats import servers
from shared.nats.bus import Bus
from shared.nats.subjects import most_replicas

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
REGISTRATIONS = (
    f"{ADMISSION}/mutatingwebhookconfigurations/leasehold",
    f"/apis/apiregistration.k8s.io/v1/apiservices/{APISERVICE}",
)
WORKLOADS = (
    (SYSTEM_NAMESPACE, "deployments"),
    (SYSTEM_NAMESPACE, "statefulsets"),
    (AGENTS_NAMESPACE, "daemonsets"),
)
SLICES = f"/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.driver={DRIVER}&limit=1"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
REVIEWS_OF_OTHERS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
STORAGE = {
    "": ("persistentvolumeclaims", "persistentvolumes"),
    "storage.k8s.io": ("storageclasses", "csidrivers", "csistoragecapacities", "csinodes"),
}
"""By group; the watcher lists and watches them for pods with PersistentVolumeClaims."""
REDIS_PROBES = frozenset({"redis", "ledger"})
"""They fail if Redis does."""
OBSERVE_S = 6.0
"""A little longer than the interval of heartbeats."""
RIGHTS = (
    ("get", "nodes"),
    ("patch", "nodes"),
    ("patch", "nodes/status"),
    ("patch", "pods"),
    ("get", "namespaces"),
)
POD_LISTS = ("nodes/pods", "nodes/proxy")
"""An agent needs the right to get either: they have the kubelet's pods."""


@dataclass(frozen=True, kw_only=True)
class ClusterServers:
    redis_url: str = ""
    nats_url: str = ""
    nats_credentials: ClientCredentials = NO_CREDENTIALS
    redis_credentials: ClientCredentials = NO_CREDENTIALS
    simulated: bool = False
    services: tuple[str, ...] = REQUIRED_SERVICES


@dataclass
class ClusterProbes:
    """A check without an address is skipped."""

    servers: ClusterServers
    api_server: KubernetesClient | LeaseholdError
    nodes: Mapping[NodeName, str] = field(default_factory=dict)
    """Those with devices, each with why it is cordoned, or empty."""
    devices: Mapping[NodeName, Sequence[Device]] | None = None
    """None if the ledger is not readable."""
    without_agents: frozenset[NodeName] = frozenset()
    """The check `agent` reports them."""
    _observing: asyncio.Task[tuple[Heartbeat, ...]] | None = None
    _facts: asyncio.Task[RedisFacts] | None = None
    _connecting: asyncio.Task[tuple[int, float]] | None = None
    _ahead_s: dict[str, float] = field(default_factory=dict)
    """By component, less the way of the message that came soonest."""

    @property
    def kubernetes(self) -> KubernetesClient:
        """Raises the reason why there is no API server."""
        if isinstance(self.api_server, LeaseholdError):
            raise self.api_server
        return self.api_server

    async def nats(self) -> Finding:
        most_bytes, reply_s = await self._connected_to_nats()
        return judge.nats(most_bytes, reply_s)

    async def redis(self) -> Finding:
        facts = await self._redis_facts()
        unreadable: list[UnreadableRecord] = []
        with contextlib.suppress(UnavailableError, RequestError, TimeoutError):
            opening = RedisLeases.connect(self._redis(), credentials=self.servers.redis_credentials)
            async with opening as ledger:
                unreadable = await ledger.checks.unreadable()
        by_sentinels = uses_sentinels(self.servers.redis_url)
        return judge.redis(facts, by_sentinels=by_sentinels, unreadable=unreadable)

    async def redis_clock(self) -> Finding:
        """Reservations expire by Redis' clock."""
        try:
            facts = await self._redis_facts()
        except UnavailableError as error:
            raise SkipError("Redis does not reply: see the check redis") from error
        return judge.clock("Redis", facts.ahead_s)

    async def _redis_facts(self) -> RedisFacts:
        """Query Redis once for all checks."""
        if self._facts is None:
            reading = redis_facts(self._redis(), self.servers.redis_credentials)
            self._facts = asyncio.create_task(reading)
        return await asyncio.shield(self._facts)

    async def _connected_to_nats(self) -> tuple[int, float]:
        if self._connecting is None:
            reading = servers.connection_facts(self._nats(), self.servers.nats_credentials)
            self._connecting = asyncio.create_task(reading)
        return await asyncio.shield(self._connecting)

    async def clocks(self) -> Finding:
        await self._heartbeats()
        return judge.clocks(self._ahead_s)

    async def api_clock(self) -> Finding:
        """The API server reports whole seconds."""
        before = time.time()
        date = await self.kubernetes.date()
        after = time.time()
        if not date:
            raise SkipError("the API server does not report its time")
        if after - before > judge.SLOW_S:
            return judge.slow_api_server(after - before)
        server_time = parsedate_to_datetime(date).timestamp()
        return judge.clock("the API server", clock_ahead_s(server_time, before - 1, after))

    async def webhook(self) -> Finding:
        kind = "mutatingwebhookconfigurations"
        try:
            path = f"{ADMISSION}/{kind}/leasehold"
            webhooks = (await self.kubernetes.read(path, WebhookConfiguration)).webhooks
            missing = [] if webhooks else [kind]
        except NotFoundError:
            webhooks = ()
            missing = [kind]
        missing += await self._unreviewed_claims(webhooks)
        configs = [webhook.client_config for webhook in webhooks]
        trusted = next((config.ca_bundle for config in configs if config.ca_bundle), b"")
        url = next((config.url for config in configs if config.url), "")
        refusal = await self._refusal(url, trusted) if url and trusted else ""
        knows_callers = await self._knows_callers(url, trusted)
        return judge.webhook(missing, _days_left(trusted), refusal, knows_callers=knows_callers)

    async def _knows_callers(self, url: str, trusted: bytes) -> bool | None:
        """Return None if it is not known.

        A webhook with a URL is called; in a cluster the Deployment has the setting.
        """
        if url and trusted:
            # With TLS 1.3 a client learns of the refusal only when it reads.
            return bool(await self._refusal(url, trusted, most=ssl.TLSVersion.TLSv1_2))
        path = objects_path(SYSTEM_NAMESPACE, "deployments", "webhook", group="/apis/apps/v1")
        try:
            deployment = await self.kubernetes.read(path)
        except LeaseholdError:
            return None
        return b"LEASEHOLD_CLIENT_CA_FILE" in deployment or b"--client-ca-file" in deployment

    async def _unreviewed_claims(self, webhooks: Iterable[RegisteredWebhook]) -> list[str]:
        if CLAIMS_WEBHOOK in {webhook.name for webhook in webhooks}:
            return []
        try:
            classes = await self._device_classes()
        except NotFoundError:
            return []
        return (
            [CLAIMS_WEBHOOK]
            if DRIVER in {device_class.metadata.name for device_class in classes}
            else []
        )

    async def _device_classes(self) -> Sequence[DeviceClass]:
        return (await self.kubernetes.read(CLASSES_PATH, ObjectList[DeviceClass])).items or ()

    async def _refusal(
        self, url: str, trusted: bytes, *, most: ssl.TLSVersion = ssl.TLSVersion.MAXIMUM_SUPPORTED
    ) -> str:
        address = urlsplit(url)
        context = ssl.create_default_context(cadata=trusted.decode())
        context.maximum_version = most
        began_s = time.monotonic()
        try:
            _, writer = await asyncio.open_connection(
                address.hostname, address.port or 443, ssl=context
            )
        except (OSError, ssl.SSLError) as error:
            return f"{address.hostname}:{address.port}: {error}"
        writer.close()
        took_s = time.monotonic() - began_s
        return f"it takes {took_s:.1f} s to accept a connection" if took_s > judge.SLOW_S else ""

    async def apiservice(self) -> Finding:
        try:
            await self.kubernetes.read(GROUP)
        except NotFoundError:
            return fail(
                f"there is no APIService {APISERVICE}: the commands, and kubectl get gpudevices, "
                "find nothing",
                "kubectl apply -k OVERLAY, or helm upgrade",
            )
        return ok("the API server passes requests on to the API")

    async def endpoints(self) -> Finding:
        unanswered: dict[str, str] = {}
        count = 0
        for path in REGISTRATIONS:
            try:
                registered = await self.kubernetes.read(path, Registration)
            except NotFoundError:
                continue  # which other checks report
            for service in registered.services:
                count += 1
                if not await self._has_endpoint(service):
                    unanswered["/".join(path.split("/")[-2:])] = service.name
        if self.nodes and not await self._has_slices():
            unanswered[f"deviceclasses/{DRIVER}"] = judge.AGENT
        return judge.endpoints(unanswered, count)

    async def _has_slices(self) -> bool:
        try:
            classes = await self._device_classes()
        except NotFoundError:
            return True
        if DRIVER not in {device_class.metadata.name for device_class in classes}:
            return True
        listed = await self.kubernetes.read(SLICES, ObjectList[RawObject])
        return bool(listed.items)

    async def _has_endpoint(self, service: ServiceReference) -> bool:
        group = "/apis/discovery.k8s.io/v1"
        slices = objects_path(service.namespace, "endpointslices", group=group)
        selector = f"?labelSelector=kubernetes.io/service-name={service.name}"
        listed = await self.kubernetes.read(slices + selector, ObjectList[ServiceEndpoints])
        if listed.items:
            return any(item.is_ready for item in listed.items)
        path = objects_path(service.namespace, "endpoints", service.name)
        with contextlib.suppress(NotFoundError):
            return (await self.kubernetes.read(path, ServiceEndpoints)).is_ready
        path = objects_path(service.namespace, "services", service.name)
        with contextlib.suppress(NotFoundError):
            return (await self.kubernetes.read(path, RegisteredService)).is_outside
        return False

    async def workloads(self) -> Finding:
        sizes: dict[str, judge.Replicas] = {}
        for namespace, kind in WORKLOADS:
            path = objects_path(namespace, kind, group="/apis/apps/v1")
            for workload in (await self.kubernetes.read(path, ObjectList[Workload])).items or ():
                wanted = workload.spec.replicas
                ready = workload.status.ready_replicas
                if kind == "daemonsets":
                    wanted = workload.status.desired_number_scheduled
                    ready = workload.status.number_ready
                sizes[workload.metadata.name] = judge.Replicas(namespace, kind, wanted, ready)
        if not sizes:
            raise SkipError("the components do not run as workloads of this cluster")
        return judge.workloads(sizes)

    async def versions(self) -> Finding:
        heartbeats = await self._heartbeats()
        return judge.versions({heartbeat.instance: heartbeat.version for heartbeat in heartbeats})

    async def components(self) -> Finding:
        heartbeats = await self._heartbeats()
        reported = await self._reported()
        nodes = {name: why for name, why in self.nodes.items() if name not in self.without_agents}
        return judge.components(
            heartbeats,
            nodes,
            observed_s=OBSERVE_S,
            required=self.servers.services,
            reported=reported,
            nats_is_slow=await self._nats_is_slow(),
        )

    async def _reported(self) -> frozenset[str]:
        try:
            finding = await self.redis()
        except SkipError:
            return frozenset()
        except (LeaseholdError, OSError, TimeoutError):
            return REDIS_PROBES
        return frozenset() if finding.outcome is Outcome.OK else REDIS_PROBES

    async def _nats_is_slow(self) -> bool:
        with contextlib.suppress(LeaseholdError, OSError, TimeoutError):
            _, reply_s = await self._connected_to_nats()
            return reply_s > judge.SLOW_S
        return False

    async def leftovers(self) -> Finding:
        if self.devices is None:
            raise SkipError("the ledger is not readable")
        return judge.leftovers(self.devices)

    async def settings(self) -> Finding:
        wanted = await judge.read_settings(self.kubernetes)
        return judge.settings(wanted, await self._heartbeats())

    async def rights(self) -> Finding:
        denied: list[str] = []
        try:
            for verb, resource in RIGHTS:
                if not await self._is_allowed(verb, resource):
                    denied.append(f"{verb} {resource}")
            if not any([await self._is_allowed("get", path) for path in POD_LISTS]):
                denied.append(f"get {' or '.join(POD_LISTS)}")
        except NotFoundError as error:
            raise SkipError("this API server has no access reviews") from error
        return judge.rights(denied, len(RIGHTS) + 1)

    async def storage_rights(self) -> Finding:
        names = [name for name in ("watcher", judge.COMBINED) if await self._deployment(name)]
        if not names:
            raise SkipError("the components do not run as workloads of this cluster")
        user = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{names[0]}"
        rights = [
            (verb, group, resource)
            for group, resources in STORAGE.items()
            for resource in resources
            for verb in ("list", "watch")
        ]
        denied = [
            f"{verb} {resource}"
            for verb, group, resource in rights
            if not await self._may(user, {"verb": verb, "group": group, "resource": resource})
        ]
        return judge.storage_rights(user, denied, len(rights))

    async def _may(self, user: str, attributes: Mapping[str, str]) -> bool:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": attributes},
        }
        return (await self.kubernetes.create(REVIEWS_OF_OTHERS, body, AccessReview)).status.allowed

    async def runtime_class(self) -> Finding:
        if self.servers.simulated:
            raise SkipError("the containers of `leasehold up` need no container runtime")
        try:
            await self.kubernetes.read("/apis/node.k8s.io/v1/runtimeclasses/nvidia")
        except NotFoundError:
            return judge.runtime_class(exists=False)
        return judge.runtime_class(exists=True)

    async def resource_quotas(self) -> Finding:
        """The API server accepts names that it does not count."""
        listed = await self.kubernetes.read("/api/v1/resourcequotas", ObjectList[ApiResourceQuota])
        return judge.resource_quotas(
            {
                f"{item.metadata.namespace}/{item.metadata.name}": item.spec.hard
                for item in listed.items or ()
            }
        )

    async def device_classes(self) -> Finding:
        try:
            classes = await self._device_classes()
        except NotFoundError as error:
            raise SkipError("this API server has no DeviceClasses") from error
        resources = {
            device_class.metadata.name: device_class.spec.extended_resource_name
            for device_class in classes
            if device_class.spec.extended_resource_name
        }
        if not resources:
            raise SkipError("no DeviceClass has an extended resource")
        nodes = (await self.kubernetes.read("/api/v1/nodes", ObjectList[ApiNode])).items
        return judge.device_classes(
            resources,
            {
                NodeName(node.metadata.name): [
                    name for name, amount in node.status.allocatable.items() if amount != "0"
                ]
                for node in nodes or ()
            },
        )

    async def extender(self) -> Finding:
        if self.servers.simulated:
            raise SkipError("the components do not run as workloads of this cluster")
        names = ("extender", "kube-scheduler")
        deployments = {name: await self._deployment(name) for name in names}
        if not any(deployments.values()):
            raise SkipError(
                "the component kube-scheduler is not installed: pods with fields that the placer "
                "does not obey are denied"
            )
        ready = {
            name: deployment.status.ready_replicas if deployment else None
            for name, deployment in deployments.items()
        }
        scheduler = deployments["kube-scheduler"]
        containers = scheduler.spec.template.spec.containers if scheduler else ()
        image = containers[0].image if containers else ""
        return judge.extender(ready, image=image, cluster=await self._version())

    async def _deployment(self, name: str) -> Workload | None:
        path = objects_path(SYSTEM_NAMESPACE, "deployments", name, group="/apis/apps/v1")
        try:
            return await self.kubernetes.read(path, Workload)
        except NotFoundError:
            return None

    async def _version(self) -> str:
        """Such as `v1.36.2+k3s1`."""
        return (await self.kubernetes.read("/version", ServerVersion)).git_version

    async def _is_allowed(self, verb: str, resource: str) -> bool:
        name, _, subresource = resource.partition("/")
        attributes = {"verb": verb, "resource": name, "subresource": subresource}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        return (await self.kubernetes.create(REVIEWS, body, AccessReview)).status.allowed

    async def _heartbeats(self) -> tuple[Heartbeat, ...]:
        if self._observing is None:
            self._observing = asyncio.create_task(self._observe_heartbeats())
        try:
            return await self._observing
        except UnavailableError as error:
            if await self._nats_is_slow():
                raise SkipError("NATS replies late: see the check nats") from error
            raise

    async def _observe_heartbeats(self) -> tuple[Heartbeat, ...]:
        if self._is_agent():
            raise SkipError(
                "the NATS user of a node's agent may not observe heartbeats: log in as operator"
            )
        try:
            await self._connected_to_nats()
        except UnavailableError as error:
            raise SkipError("NATS does not reply: see the check nats") from error
        loop = asyncio.get_running_loop()
        latest: dict[str, dict[str, Heartbeat]] = {}
        async with Bus.connect(
            self._nats(),
            name="doctor",
            credentials=self.servers.nats_credentials,
            patience_s=DIAGNOSIS_TIMEOUT_S,
        ) as bus:
            inbox = await bus.observe((Heartbeat,))
            deadline = loop.time() + OBSERVE_S
            while (left_s := deadline - loop.time()) > 0:
                try:
                    async with asyncio.timeout(left_s):
                        batch = await inbox.batch()
                except TimeoutError:
                    break
                for delivered in batch:
                    for event in delivered.events:
                        if isinstance(event, Heartbeat):
                            self._compare_clock(event)
                            _add_heartbeat(latest.setdefault(event.route, {}), event)
        return tuple(
            event
            for replicas in latest.values()
            for event in replicas.values()
            if not event.stopping
        )

    def _compare_clock(self, event: Heartbeat) -> None:
        if event.sent_at:
            name = f"{event.service} of {event.node}" if event.node else event.instance
            ahead_s = event.sent_at - time.time()
            self._ahead_s[name] = max(ahead_s, self._ahead_s.get(name, ahead_s))

    def _is_agent(self) -> bool:
        login = self.servers.nats_credentials.login()
        return login is not None and login.user.startswith(f"{judge.AGENT}.")

    def _nats(self) -> str:
        if not self.servers.nats_url:
            raise SkipError("there is no NATS address: set --nats-url")
        return self.servers.nats_url

    def _redis(self) -> str:
        if not self.servers.redis_url:
            raise SkipError("there is no Redis address (agents have no access): set --redis-url")
        return self.servers.redis_url


def _add_heartbeat(replicas: dict[str, Heartbeat], event: Heartbeat) -> None:
    """A sender chooses the names of its replicas itself."""
    replicas.pop(event.instance, None)
    replicas[event.instance] = event
    if len(replicas) > most_replicas(event.route):
        del replicas[next(iter(replicas))]


def _days_left(trusted: bytes) -> float | None:
    if not trusted:
        return None
    expiries = [
        certificate.not_valid_after_utc for certificate in x509.load_pem_x509_certificates(trusted)
    ]
    return (max(expiries) - datetime.now(UTC)).total_seconds() / 86400
