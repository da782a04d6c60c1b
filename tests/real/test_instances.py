"""Claims for MIG instances: a real kube-scheduler chooses the GPU, and the ledger the place."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from services.claims.clients import ClaimClient
from services.node_agent.mig.gpu_models import A100_80
from services.node_agent.mig.layouts import derive_layouts
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock, in_background
from shared.model.devices.device import DeviceMode
from shared.model.names import NodeName
from shared.model.requests.claim import DRIVER
from shared.placing.mig_instances import count_free, layout_shapes, parse_positions
from tests.real.claim_parts import ClaimService, SliceNodes, profiles_of_bound_pods
from tests.real.control_plane import ControlPlane, Json, control_plane, missing
from tests.real.node_parts import create_nodes, nodes_of_zones
from tests.support.placer.ledger import assert_sound, device, ledger
from tests.support.servers.valkey import valkey_server
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="module"),
]

API = "/apis/resource.k8s.io/v1"
NODES = nodes_of_zones(a=3)
GPUS = 2
LAYOUTS = derive_layouts(A100_80)
AFTER_S = 180.0
CLASS: Json = {
    "metadata": {"name": "mig"},
    "spec": {
        "selectors": [
            {
                "cel": {
                    "expression": f"device.driver == '{DRIVER}' && "
                    f"device.attributes['{DRIVER}'].type == 'mig'"
                }
            }
        ]
    },
}


@dataclass(slots=True)
class Cluster:
    plane: ControlPlane
    ledger: RedisLeases
    nodes: SliceNodes

    async def add(self, namespace: str, *profiles: str) -> None:
        """Create a pod for each profile, all at once."""
        await self.plane.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        for number, profile in enumerate(profiles):
            await self._add(namespace, f"p-{number}", profile)

    async def _add(self, namespace: str, name: str, profile: str) -> None:
        expression = f"device.attributes['{DRIVER}'].profile == '{profile}'"
        selectors = [{"cel": {"expression": expression}}]
        exactly = {"deviceClassName": "mig", "selectors": selectors}
        claim = {
            "metadata": {"name": name},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
        }
        await self.plane.create(f"{API}/namespaces/{namespace}/resourceclaims", claim)
        container = {"name": "c", "image": "pause", "resources": {"claims": [{"name": "gpu"}]}}
        spec = {
            "schedulerName": "default-scheduler",
            "automountServiceAccountToken": False,
            "containers": [container],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            "terminationGracePeriodSeconds": 0,
        }
        metadata = {"name": name, "labels": {"profile": profile}}
        await self.plane.create(
            f"/api/v1/namespaces/{namespace}/pods", {"metadata": metadata, "spec": spec}
        )

    async def bound(self, namespace: str) -> Counter[str]:
        """Return how many pods of each profile have a node."""
        return Counter((await profiles_of_bound_pods(self.plane.kube, namespace)).values())

    async def leased(self, namespace: str) -> Counter[str]:
        """Return how many instances of each profile claims have; all in places of their own."""
        leases = await assert_sound(self.ledger)
        shares = [
            share for lease in leases if lease.namespace == namespace for share in lease.shares
        ]
        return Counter(share.mig.profile for share in shares if share.mig)

    async def free(self) -> set[str]:
        """Return the profiles of which an instance is free."""
        totals = await self.ledger.totals.of_nodes(list(self.nodes.devices))
        return {
            profile
            for account in totals
            for gpu, use in account.node.devices
            for profile in count_free(
                layout_shapes(gpu.layouts), use.layout, parse_positions(use.slots_taken)
            )
        }

    async def clear(self, namespace: str) -> None:
        for pod in await profiles_of_bound_pods(self.plane.kube, namespace):
            await self.plane.kube.delete(f"/api/v1/namespaces/{namespace}/pods/{pod}", grace_s=0)
        await self.plane.kube.delete(f"/api/v1/namespaces/{namespace}/pods")
        await self.plane.kube.delete(f"{API}/namespaces/{namespace}/resourceclaims")
        await until(lambda: self.leased(namespace), lambda held: not held, limit_s=AFTER_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with contextlib.AsyncExitStack() as stack:
        plane = await stack.enter_async_context(control_plane())
        plane.start_controllers()
        plane.start_scheduler()
        valkey = stack.enter_context(valkey_server())
        await valkey.ready()
        leases = await stack.enter_async_context(ledger(valkey.url, {}))
        await create_nodes(plane, NODES)
        await plane.create(f"{API}/deviceclasses", CLASS)
        devices = {
            NodeName(name): [
                device(name, n, mode=DeviceMode.MIG, memory_mib=81_920, layouts=LAYOUTS)
                for n in range(GPUS)
            ]
            for name in NODES
        }
        nodes = SliceNodes(plane.kube, leases, ClaimClient(plane.kube, SystemClock()), devices)
        await nodes.save()
        service = ClaimService(plane.kube, leases, nodes)
        await stack.enter_async_context(in_background(service.run()))
        yield Cluster(plane, leases, nodes)


async def test_a_gpu_is_filled_with_instances_of_one_profile(cluster: Cluster) -> None:
    places = 7 * GPUS * len(NODES)

    await cluster.add("full", *["1g.10gb"] * (places + 1))
    await until(
        lambda: cluster.bound("full"),
        lambda bound: bound == {"1g.10gb": places},
        limit_s=AFTER_S,
    )

    assert await cluster.leased("full") == {"1g.10gb": places}
    assert not await cluster.free()
    assert not cluster.nodes.refused, "the capacity alone kept the last one waiting"
    await cluster.clear("full")


async def test_claims_of_different_profiles_at_once_get_all_places_and_no_place_twice(
    cluster: Cluster,
) -> None:
    """Whatever is refused meanwhile, a pod waits only if no instance of its profile is free."""
    wanted = Counter({"3g.40gb": 6, "2g.20gb": 8, "1g.10gb": 12})

    await cluster.add("mixed", *wanted.elements())

    async def unsettled() -> tuple[Counter[str], set[str]]:
        """Return instances that no pod uses yet, and profiles with both waiting pods and room."""
        bound = await cluster.bound("mixed")
        leased = await cluster.leased("mixed")
        return leased - bound, set(wanted - bound) & await cluster.free()

    await until(unsettled, lambda left: left == (Counter(), set()), limit_s=AFTER_S)
    bound = await cluster.bound("mixed")
    assert await cluster.leased("mixed") == bound
    assert bound.total() >= 12
    await cluster.clear("mixed")
