"""Leasehold on a real API server with its controllers, and what an extender is sent there."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.real.control_plane import control_plane
from tests.real.disks import DiskClass
from tests.real.leasehold import Leasehold, leasehold
from tests.real.node_parts import KUBELETS, NODES
from tests.real.recording_extender import Recorder, recorder
from tests.support.storage import ZONE

POD_GROUPS = (
    "--feature-gates=GenericWorkload=true",
    "--runtime-config=scheduling.k8s.io/v1alpha2=true",
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def notes() -> AsyncIterator[Recorder]:
    """What kube-scheduler has sent to the extender."""
    async with recorder() as recording:
        yield recording


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def up() -> AsyncIterator[Leasehold]:
    async with control_plane(*POD_GROUPS, tokens={KUBELETS: "system:masters"}) as plane:
        plane.start_controllers()
        async with leasehold(plane, NODES) as started:
            await add_classes(started)
            yield started


async def add_classes(up: Leasehold) -> None:
    disks = up.disks
    await disks.add_class("disks", DiskClass(delay_s=0.5))
    await disks.add_class("zonal", DiskClass(reach=ZONE))
    await disks.add_class("files", DiskClass(reach=""))
    await disks.add_class("at-once", DiskClass(reach="", waits=False))
    topologies = [{"matchLabelExpressions": [{"key": ZONE, "values": ["c"]}]}]
    await disks.add_class("elsewhere", DiskClass(reach=ZONE), allowedTopologies=topologies)
    full = frozenset({"a-0", "a-1", "b-0"})
    await disks.add_class("scarce", DiskClass(fails_on=full))
    await disks.add_class("none", DiskClass(fails_on=frozenset(NODES)))
