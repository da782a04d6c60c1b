"""Binders beside a simulated API server whose controllers bind claims."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from services.binder.bind.volume_binder import VolumeBinder
from services.binder.clients import PodClient
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.ledger.leases import RedisLeases
from shared.model.errors import UnavailableError
from shared.model.events.event import Event
from shared.model.events.pod_events import BindingFailed, PlacementChosen, PodBound
from shared.model.leases.lease import Lease
from shared.model.names import PodUid
from shared.model.requests.request import ClaimVolume, NodeTerm, PodClaim
from simcluster.apimachinery.objects import Json, annotations_of, at_path
from simcluster.controller_manager.volumes.controller import VolumeController
from tests.support.binder.world import NOW, FakeBus, World, chosen, lease, running
from tests.support.clock import FakeClock
from tests.support.placer.ledger import ledger
from tests.support.simcluster.apiserver import ApiUnderTest, a_pod, api_server

HOSTNAME = "kubernetes.io/hostname"
SELECTED = "volume.kubernetes.io/selected-node"


def to_provision(name: str = "data") -> PodClaim:
    """Return a claim of a StorageClass that waits for its consumer."""
    return PodClaim(name=name, provisions=True)


def local_claim(*volumes: tuple[str, str], name: str = "data") -> PodClaim:
    """Return a claim that may get any of these volumes, each on its node."""
    candidates = [
        ClaimVolume(name=volume, terms=((NodeTerm(key=HOSTNAME, operator="In", values=(node,)),),))
        for volume, node in volumes
    ]
    return PodClaim(name=name, volumes=tuple(candidates))


class Loopback(FakeBus):
    """Delivers published placements to its binder, and records everything."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self._deliveries: set[asyncio.Task[None]] = set()

    async def publish(self, events: Sequence[Event]) -> None:
        await super().publish(events)
        placements = [event for event in events if isinstance(event, PlacementChosen)]
        if placements:
            delivery = asyncio.create_task(self.deliver(placements))
            self._deliveries.add(delivery)

    async def deliver(self, placements: Sequence[PlacementChosen]) -> None:
        assert self.world is not None
        await super().publish(await self.world.binder.pods.bind_pods(placements))

    async def close(self) -> None:
        await asyncio.gather(*self._deliveries)


class EarlyBindings(PodClient):
    """Records Bindings of pods of which a claim was not bound."""

    def __init__(self, client: KubernetesClient, api: ApiUnderTest) -> None:
        super().__init__(client)
        self.early: list[str] = []
        self.sent: list[str] = []
        self._api = api
        self._send = client.bind_pod
        self.bind_pod = self._bind

    async def _bind(self, namespace: str, name: str, *args: Any, **more: Any) -> None:
        pod = self._api.store.read("pods", namespace, name)
        for volume in pod["spec"].get("volumes") or ():
            claim = at_path(volume, "persistentVolumeClaim.claimName")
            stored = self._api.store.find("persistentvolumeclaims", namespace, claim)
            if stored is None or at_path(stored.obj, "status.phase") != "Bound":
                self.early.append(name)
        self.sent.append(name)
        await self._send(namespace, name, *args, **more)


async def follow_claims(volumes: VolumeBinder) -> None:
    """Run the loop as its runtime does: a loaded machine may be too slow for a request."""
    while True:
        with contextlib.suppress(UnavailableError):
            await volumes.follow_claims()
        await asyncio.sleep(0.1)


class VolumeScene:
    """An API server with nodes n1 and n2, a ledger, and binders."""

    def __init__(self, api: ApiUnderTest, client: KubernetesClient, leases: RedisLeases) -> None:
        self.api = api
        self.store = api.store
        self.client = client
        self.ledger = leases
        self.clock = FakeClock(NOW)
        self.pods = EarlyBindings(client, api)
        self.world = self.binder()

    def binder(self) -> World:
        """Return another binder on the same ledger and API server."""
        bus = Loopback()
        made = World(self.ledger, pods=self.pods, bus=bus, clock=self.clock, volumes=self.client)
        bus.world = made
        return made

    @contextlib.asynccontextmanager
    async def running(self, world: World | None = None) -> AsyncIterator[None]:
        """Run what binds pods in a binder, the first one by default."""
        binder = (world or self.world).binder
        async with running(
            binder.sender.send_bindings,
            lambda: follow_claims(binder.volumes),
            binder.conditions.write_conditions,
        ):
            yield

    async def deliver(self, *leases: Lease, world: World | None = None) -> None:
        """Deliver the placements of these leases to a binder, and publish its events."""
        binder = world or self.world
        await binder.bus.publish(await binder.binder.pods.bind_pods(chosen(*leases)))

    def published(self, world: World | None = None) -> list[Event]:
        return (world or self.world).bus.published

    def bound(self, world: World | None = None) -> list[str]:
        return [event.lease.name for event in self.published(world) if isinstance(event, PodBound)]

    def failures(self, world: World | None = None) -> dict[str, str]:
        """Return why pods were not bound: the first reason of each."""
        failed = [event for event in self.published(world) if isinstance(event, BindingFailed)]
        return {event.name: event.reason for event in reversed(failed)}

    def storage_class(self, mode: str = "WaitForFirstConsumer", **fields: object) -> None:
        body = {
            "metadata": {"name": "disks"},
            "provisioner": "disks.example",
            "volumeBindingMode": mode,
            **fields,
        }
        self.store.create("storageclasses", body)

    def volume(self, name: str, node: str, size: str = "1Gi") -> None:
        reach = {"key": HOSTNAME, "operator": "In", "values": [node]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [reach]}]}
        spec = {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "disks",
            "local": {"path": "/disks/1"},
            "nodeAffinity": {"required": terms},
        }
        self.store.create("persistentvolumes", {"metadata": {"name": name}, "spec": spec})

    def claim(self, name: str = "data") -> Json:
        """Create a claim."""
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "disks",
            "resources": {"requests": {"storage": "1Gi"}},
        }
        body = {"metadata": {"name": name, "namespace": "default"}, "spec": spec}
        return self.store.create("persistentvolumeclaims", body)

    def stored_claim(self, name: str = "data") -> Json:
        return self.store.read("persistentvolumeclaims", "default", name)

    def selected(self, name: str = "data") -> str | None:
        return annotations_of(self.stored_claim(name)).get(SELECTED)

    def annotate(self, annotations: Mapping[str, str | None], name: str = "data") -> None:
        patch = {"metadata": {"annotations": annotations}}
        self.store.patch("persistentvolumeclaims", "default", name, patch)

    def node_of(self, pod: str) -> str | None:
        node: str | None = at_path(self.store.read("pods", "default", pod), "spec.nodeName")
        return node

    async def reserved(
        self, name: str, *claims: PodClaim, node: str = "n1", gang: str = ""
    ) -> Lease:
        """Create a pod with these claims, and reserve a share of a node for it."""
        volumes = [
            {"name": claim.name, "persistentVolumeClaim": {"claimName": claim.name}}
            for claim in claims
        ]
        pod = self.store.create("pods", a_pod(name, volumes=volumes))
        uid = PodUid(pod["metadata"]["uid"])
        await self.world.restore(lease(name, node, pod=uid, claims=claims, gang=gang))
        return (await self.world.leases())[uid]

    def condition(self, pod: str) -> str:
        conditions = at_path(self.store.read("pods", "default", pod), "status.conditions") or []
        return next((c["message"] for c in conditions if c["type"] == "PodScheduled"), "")


@contextlib.asynccontextmanager
async def volume_scene(url: str) -> AsyncIterator[VolumeScene]:
    """Start an API server with the controllers of storage, and a binder on an empty ledger."""
    async with (
        api_server() as api,
        KubernetesClient(load_credentials(api.kubeconfig)) as client,
        ledger(url, {"n1": 1, "n2": 1}) as leases,
    ):
        for node in ("n1", "n2"):
            meta = {"name": node, "labels": {HOSTNAME: node}}
            api.store.create("nodes", {"metadata": meta})
        controllers = asyncio.create_task(VolumeController(api.store).run())
        try:
            yield VolumeScene(api, client, leases)
        finally:
            controllers.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await controllers
