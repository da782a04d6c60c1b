"""Leasehold's services beside a real API server, with the manifests' accounts and policies."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.cli.credentials import write
from services.cli.up.installation import ACCOUNTS, KUBE_SCHEDULER, installation
from services.extender.scheduler_configuration import SchedulerTls, scheduler_configuration
from shared.dialects import SCHEDULERS
from shared.dialects.kai.dialect import SCHEDULER as KAI
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError
from shared.kubernetes.kubeconfig import read_kubeconfig
from shared.ledger.leases import RedisLeases
from shared.model.clock import in_background
from shared.model.leases.lease import Lease
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from tests.real.control_plane import START_S, ControlPlane, Json, write_kubeconfig
from tests.real.disks import Disks
from tests.real.node_parts import KUBELETS, Kubelets, create_nodes, run_agents
from tests.support.servers.nats import free_port, nats_server
from tests.support.servers.service_process import ServiceProcess
from tests.support.servers.valkey import valkey_server
from tests.support.waiting import until

HTTP_OK = 200
AFTER_S = 180.0
"""A pod that can run does within this time on a machine that does much else."""
SERVICES = ("watcher", "placer", "planner", "binder", "timekeeper", "extender", "webhook")
WITHOUT_API = {"placer"}
WITH_LEDGER = {"placer", "planner", "binder", "timekeeper", "extender"}
BY_SCHEDULER = ("watcher", "extender", "webhook")
"""They must know the schedulers whose pods Leasehold places."""
CONFIGURATION = "with-extender.json"
"""kube-scheduler's, with the extender."""
NOT_IN_CLUSTER = {"Service", "APIService"}
"""Of what `leasehold up` installs: the page's API is not there."""


def collection(manifest: Json) -> str:
    """Return the path of an object's kind and namespace."""
    version = manifest["apiVersion"]
    kind = manifest["kind"].lower()
    plural = (
        f"{kind[:-1]}ies" if kind[-1] == "y" else f"{kind}es" if kind[-1] == "s" else f"{kind}s"
    )
    group = f"/apis/{version}" if "/" in version else f"/api/{version}"
    namespace = manifest["metadata"].get("namespace")
    return f"{group}/namespaces/{namespace}/{plural}" if namespace else f"{group}/{plural}"


@dataclass(slots=True)
class Leasehold:
    plane: ControlPlane
    ledger: RedisLeases
    disks: Disks
    kubelets: Kubelets
    nats_url: str
    flags: dict[str, tuple[str, ...]]
    """Of each service."""
    running: dict[str, ServiceProcess] = field(default_factory=dict)

    def start(self, service: str) -> None:
        self.running[service] = ServiceProcess(service, *self.flags[service])

    async def until_ready(self) -> None:
        """Wait until all services are, which wait for one another."""

        async def unready() -> list[tuple[str, str]]:
            pages = [(name, await process.page("/readyz")) for name, process in services]
            return [(name, page) for name, (status, page) in pages if status != HTTP_OK]

        services = list(self.running.items())
        await until(unready, lambda unready: not unready, limit_s=START_S)

    def kill(self, service: str) -> None:
        """Kill a service, and start it again."""
        self.running[service].end()
        self.start(service)

    async def leases(self) -> dict[str, Lease]:
        """Return the live leases by the name of their pod."""
        return {lease.name: lease async for page in self.ledger.load_all() for lease in page}

    def start_kube_scheduler(self, *flags: str) -> None:
        """Start kube-scheduler with the extender, for the pods that are handed over."""
        self.plane.start(
            "kube-scheduler",
            f"--config={self.plane.root / CONFIGURATION}",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={self.plane.root / 'scheduler-certificates'}",
            *flags,
        )

    async def add_namespace(self, name: str) -> "Namespace":
        await self.plane.create("/api/v1/namespaces", {"metadata": {"name": name}})
        return Namespace(self, name)


@dataclass(frozen=True, slots=True)
class Namespace:
    """The objects of one test. For example, `await namespace.claim("data", "fast")`."""

    leasehold: Leasehold
    name: str

    def path(self, plural: str) -> str:
        core = f"/api/v1/namespaces/{self.name}/{plural}"
        return (
            core if plural != "statefulsets" else f"/apis/apps/v1/namespaces/{self.name}/{plural}"
        )

    async def objects(self, plural: str) -> dict[str, Json]:
        items = await self.leasehold.plane.objects(self.path(plural))
        return {item["metadata"]["name"]: item for item in items}

    async def claim(
        self, name: str, storage_class: str, *, mode: str = "ReadWriteOnce", **spec: Any
    ) -> Json:
        manifest = {"metadata": {"name": name}, "spec": claim_spec(storage_class, mode) | spec}
        return await self.leasehold.plane.create(self.path("persistentvolumeclaims"), manifest)

    async def pod(
        self,
        name: str,
        *claims: str,
        gang: int = 0,
        ephemeral: str = "",
        gpus: int = 1,
        memory: int = 1000,
        **spec: Any,
    ) -> None:
        """Create a pod with claims, of a gang of the namespace's name if this has a size."""
        notes = {
            "gang.scheduling.koordinator.sh/name": self.name,
            "gang.scheduling.koordinator.sh/min-available": str(gang),
        }
        metadata = {"name": name, "annotations": notes if gang else {}}
        body = {"metadata": metadata, "spec": pod_spec(claims, ephemeral, gpus, memory) | spec}
        await self.leasehold.plane.create(self.path("pods"), body)

    async def nodes(self) -> dict[str, str]:
        """Return the nodes of pods that run."""
        return {
            name: pod["spec"]["nodeName"]
            for name, pod in (await self.objects("pods")).items()
            if pod["status"].get("phase") == "Running"
        }

    async def until_running(self, count: int, *, limit_s: float = AFTER_S) -> dict[str, str]:
        """Wait until so many pods run, and return their nodes."""
        nodes: dict[str, str] = await until(
            self.nodes, lambda nodes: len(nodes) == count, limit_s=limit_s
        )
        return nodes

    async def condition(self, pod: str) -> str:
        """Return why a pod is not scheduled, or an empty text."""
        stored = json.loads(await self.leasehold.plane.kube.read(f"{self.path('pods')}/{pod}"))
        conditions = stored["status"].get("conditions", ())
        return next(
            (
                str(condition.get("message", ""))
                for condition in conditions
                if condition["type"] == "PodScheduled" and condition["status"] == "False"
            ),
            "",
        )

    async def until_waits(self, pod: str, *texts: str) -> None:
        await until(
            lambda: self.condition(pod), lambda why: all(text in why for text in texts),
            limit_s=AFTER_S,
        )  # fmt: skip

    async def delete_pods(self) -> None:
        """Delete all pods, and wait until their leases have ended."""
        for name in await self.objects("pods"):
            with contextlib.suppress(NotFoundError):  # its owner is gone, and so it went meanwhile
                await self.leasehold.plane.kube.delete(f"{self.path('pods')}/{name}")
        await until(lambda: self.objects("pods"), lambda pods: not pods, limit_s=AFTER_S)
        await until(self._leases, lambda leases: not leases, limit_s=AFTER_S)

    async def _leases(self) -> list[Lease]:
        leases = (await self.leasehold.leases()).values()
        return [lease for lease in leases if lease.namespace == self.name]

    async def delete_claims(self) -> None:
        """Delete all claims, and wait until these and their volumes are gone."""
        for name in await self.objects("persistentvolumeclaims"):
            await self.leasehold.plane.kube.delete(f"{self.path('persistentvolumeclaims')}/{name}")
        await until(self._storage, lambda left: not left, limit_s=AFTER_S)

    async def _storage(self) -> list[str]:
        volumes = await self.leasehold.plane.objects("/api/v1/persistentvolumes")
        mine = [
            volume["metadata"]["name"]
            for volume in volumes
            if volume["spec"].get("claimRef", {}).get("namespace") == self.name
            and volume["spec"].get("persistentVolumeReclaimPolicy") == "Delete"
        ]
        return [*await self.objects("persistentvolumeclaims"), *mine]

    async def check(self, *claims: str) -> None:
        """Assert that pods reach their volumes, and that leases, pods and claims are as created."""
        pods = await self.objects("pods")
        listed = await self.objects("persistentvolumeclaims")
        volumes = {
            volume["metadata"]["name"]: volume
            for volume in await self.leasehold.plane.objects("/api/v1/persistentvolumes")
        }
        assert set(listed) == set(claims)
        for pod in pods.values():
            for volume in pod["spec"].get("volumes", ()):
                claim = volume.get("persistentVolumeClaim", {}).get("claimName")
                name = claim or f"{pod['metadata']['name']}-{volume['name']}"
                bound = listed[name]
                assert bound["status"]["phase"] == "Bound", (pod["metadata"]["name"], bound)
                reached = _reached(volumes[bound["spec"]["volumeName"]], self.leasehold.disks)
                assert pod["spec"]["nodeName"] in reached
        leases = await self._leases()
        assert {lease.name for lease in leases} == set(pods)
        early = self.leasehold.kubelets.bound_without_volume()
        assert not early, early


def _reached(volume: Json, disks: Disks) -> set[str]:
    terms = volume["spec"].get("nodeAffinity", {}).get("required", {}).get("nodeSelectorTerms")
    if not terms:
        return set(disks.nodes)
    [need] = terms[0]["matchExpressions"]
    return {name for name, labels in disks.nodes.items() if labels[need["key"]] in need["values"]}


def claim_spec(storage_class: str, mode: str = "ReadWriteOnce") -> Json:
    resources = {"requests": {"storage": "1Gi"}}
    return {"storageClassName": storage_class, "accessModes": [mode], "resources": resources}


def pod_spec(claims: Sequence[str], ephemeral: str = "", gpus: int = 1, memory: int = 1000) -> Json:
    volumes: list[Json] = [
        {"name": f"v{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(claims)
    ]
    if ephemeral:
        template = {"volumeClaimTemplate": {"spec": claim_spec(ephemeral)}}
        volumes.append({"name": "scratch", "ephemeral": template})
    limits = {"volcano.sh/vgpu-number": str(gpus)}
    if memory:
        limits["volcano.sh/vgpu-memory"] = str(memory)
    container = {"name": "c", "image": "pause", "resources": {"limits": limits}}
    return {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 1}


@contextlib.asynccontextmanager
async def leasehold(
    plane: ControlPlane, nodes: dict[str, dict[str, str]]
) -> AsyncIterator[Leasehold]:
    """Install and start Leasehold, with nodes, a provisioner and kubelets."""
    await install(plane, KUBE_SCHEDULER, "dra")
    await create_nodes(plane, nodes)
    for account in (*ACCOUNTS, "extender"):
        await log_in(plane, account)
    ends_pods = KubernetesClient(read_kubeconfig(plane.root / f"{KUBELETS}.kubeconfig"))
    with valkey_server() as valkey:
        await valkey.ready()
        async with (
            ends_pods,
            nats_server() as nats,
            RedisLeases.connect(valkey.url, timeout_s=60) as ledger,
        ):
            flags = {
                service: service_flags(plane, service, nats_url=nats.url, redis_url=valkey.url)
                for service in SERVICES
            }
            for service in BY_SCHEDULER:
                flags[service] += ("--schedulers", ",".join((*SCHEDULERS, KAI)))
            flags["webhook"] += ("--tls-dir", str(plane.root / "webhook"))
            flags["webhook"] += ("--url", "https://127.0.0.1", "--kube-scheduler")
            flags["extender"] += _extender_flags(plane)
            disks = Disks(plane, nodes)
            up = Leasehold(plane, ledger, disks, Kubelets(ends_pods), nats.url, flags)
            try:
                async with (
                    in_background(run_agents(nats.url, nodes)),
                    in_background(disks.run()),
                    in_background(up.kubelets.run()),
                ):
                    for service in SERVICES:
                        up.start(service)
                    await up.until_ready()
                    yield up
            finally:
                for process in up.running.values():
                    process.end()


def _extender_flags(plane: ControlPlane) -> tuple[str, ...]:
    """Write the certificates of the extender, and kube-scheduler's configuration for it."""
    host = "127.0.0.1"
    files = write(plane.root / "extender", (), nats=False, redis=False, names=(host,))
    address = f"{host}:{free_port()}"
    tls = SchedulerTls(
        ca=str(files.authority),
        certificate=str(files.scheduler_certificate),
        key=str(files.scheduler_key),
    )
    configuration = scheduler_configuration(f"https://{address}", tls)
    configuration["clientConnection"] = {"kubeconfig": str(plane.kubeconfig)}
    configuration["leaderElection"] = {"leaderElect": False}
    plane.write(CONFIGURATION, configuration)
    return (
        *("--listen", address, "--client-ca-file", str(files.authority)),
        *("--certificate-file", str(files.certificate), "--key-file", str(files.key)),
    )


async def install(plane: ControlPlane, *components: str) -> None:
    """Create what the manifests have beside the services: accounts, roles, policies and kinds."""
    installed = installation("", (), policies=True, aggregated="127.0.0.1:1", components=components)
    for manifest in installed["objects"]:
        if manifest["kind"] not in NOT_IN_CLUSTER:
            await plane.create(collection(manifest), manifest)


def service_flags(
    plane: ControlPlane, service: str, *, nats_url: str, redis_url: str
) -> tuple[str, ...]:
    kubeconfig = ("--kubeconfig", str(plane.kubeconfig_of(service)))
    return (
        *("--nats-url", nats_url, "--instance", service),
        *(("--redis-url", redis_url) if service in WITH_LEDGER else ()),
        *(kubeconfig if service not in WITHOUT_API else ()),
    )


async def log_in(plane: ControlPlane, account: str, *, node: str = "") -> str:
    """Write the kubeconfig of a service's account, and return its token.

    With `node`, it is the account of agents, and the token that of a pod on this node.
    """
    namespace = AGENTS_NAMESPACE if node else SYSTEM_NAMESPACE
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
    spec: Json = {}
    if node:
        stored = json.loads(await plane.kube.read(f"/api/v1/nodes/{node}"))
        bound_to = {"apiVersion": "v1", "kind": "Node", "name": node}
        spec["boundObjectRef"] = bound_to | {"uid": stored["metadata"]["uid"]}
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    token: str = json.loads(await plane.kube.create(path, request))["status"]["token"]
    write_kubeconfig(plane.kubeconfig_of(account), plane.url, token=token)
    return token
