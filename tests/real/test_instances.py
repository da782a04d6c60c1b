"""Claims for MIG instances: a real kube-scheduler chooses the GPU, and the ledger the place."""

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from services.node_agent.mig.gpu_models import A100_80
from services.node_agent.mig.layouts import derive_layouts
from shared.model.devices.device import DeviceMode
from shared.model.names import NodeName
from shared.model.requests.claim import DRIVER
from shared.placing.mig_instances import count_free, layout_shapes, parse_positions
from tests.real.claim_parts import AFTER_S, API, ClaimCluster, claim_cluster
from tests.real.control_plane import Json, missing
from tests.real.node_parts import nodes_of_zones
from tests.support.placer.ledger import device
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="module"),
]

NODES = nodes_of_zones(a=3)
GPUS = 2
LAYOUTS = derive_layouts(A100_80)
PROFILE = "profile"
"""A label of pods."""
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
class Instances:
    cluster: ClaimCluster

    async def add(self, namespace: str, *profiles: str) -> None:
        """Create a pod for each profile, all at once."""
        await self.cluster.plane.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        for number, profile in enumerate(profiles):
            expression = f"device.attributes['{DRIVER}'].profile == '{profile}'"
            selectors = [{"cel": {"expression": expression}}]
            exactly = {"deviceClassName": "mig", "selectors": selectors}
            devices = {"requests": [{"name": "gpu", "exactly": exactly}]}
            await self.cluster.add_pod(namespace, f"p-{number}", devices, {PROFILE: profile})

    async def bound(self, namespace: str) -> Counter[str]:
        """Return how many pods of each profile have a node."""
        pods = await self.cluster.bound_pods(namespace)
        return Counter(pod["metadata"]["labels"][PROFILE] for pod in pods.values())

    async def leased(self, namespace: str) -> Counter[str]:
        """Return how many instances of each profile claims have; all in places of their own."""
        leases = (await self.cluster.leases(namespace)).values()
        return Counter(share.mig.profile for lease in leases for share in lease.shares if share.mig)

    async def free(self) -> set[str]:
        """Return the profiles of which an instance is free."""
        nodes = list(self.cluster.nodes.devices)
        totals = await self.cluster.ledger.totals.of_nodes(nodes)
        return {
            profile
            for account in totals
            for gpu, use in account.node.devices
            for profile in count_free(
                layout_shapes(gpu.layouts), use.layout, parse_positions(use.slots_taken)
            )
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def instances() -> AsyncIterator[Instances]:
    devices = {
        NodeName(name): [
            device(name, n, mode=DeviceMode.MIG, memory_mib=81_920, layouts=LAYOUTS)
            for n in range(GPUS)
        ]
        for name in NODES
    }
    async with claim_cluster(NODES, devices) as started:
        await started.plane.create(f"{API}/deviceclasses", CLASS)
        yield Instances(started)


async def test_a_gpu_is_filled_with_instances_of_one_profile(instances: Instances) -> None:
    places = 7 * GPUS * len(NODES)

    await instances.add("full", *["1g.10gb"] * (places + 1))
    await until(
        lambda: instances.bound("full"),
        lambda bound: bound == {"1g.10gb": places},
        limit_s=AFTER_S,
    )

    assert await instances.leased("full") == {"1g.10gb": places}
    assert not await instances.free()
    assert not instances.cluster.nodes.refused, "the capacity alone kept the last one waiting"
    await instances.cluster.clear("full")


async def test_claims_of_different_profiles_at_once_get_all_places_and_no_place_twice(
    instances: Instances,
) -> None:
    """Whatever is refused meanwhile, a pod waits only if no instance of its profile is free."""
    wanted = Counter({"3g.40gb": 6, "2g.20gb": 8, "1g.10gb": 12})

    await instances.add("mixed", *wanted.elements())

    async def unsettled() -> tuple[Counter[str], set[str]]:
        """Return instances that no pod uses yet, and profiles with both waiting pods and room."""
        bound = await instances.bound("mixed")
        leased = await instances.leased("mixed")
        return leased - bound, set(wanted - bound) & await instances.free()

    await until(unsettled, lambda left: left == (Counter(), set()), limit_s=AFTER_S)
    bound = await instances.bound("mixed")
    assert await instances.leased("mixed") == bound
    assert bound.total() >= 12
    await instances.cluster.clear("mixed")
