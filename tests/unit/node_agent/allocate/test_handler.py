"""The kubelet's questions, against hand-written kubelets and ledgers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.agent_timing import AgentTiming
from services.node_agent.allocate.allocation import NodeSnapshot
from services.node_agent.allocate.handler import AllocationHandler
from services.node_agent.allocate.pod_resolver import PodResolver
from services.node_agent.allocate.reporter import AllocationReporter
from services.node_agent.gpus.inventory import devices_of
from services.node_agent.gpus.sharing_config import SharingConfig
from services.node_agent.gpus.simulated.gpus import SimulatedGpus, uuid_of
from services.node_agent.kubelet.pods import Holding, KubeletContainer, KubeletPod, PodResources
from services.node_agent.metrics import TracedAllocation
from services.node_agent.node_state import AgentNodeState
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.known_leases import KnownLeases
from services.node_agent.records.lease_sync import LeaseSync
from services.node_agent.views.advertisement import advertisement_of
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup, Paths
from shared.model.clock import SystemClock
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.node_events import ShareActivated, ShareRefused
from shared.model.lease import Lease, LeaseState
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from tests.support.node_agent.agent import NUMBER, Ledger, lease_of, share
from tests.support.simcluster.kubelet import NODE

SLOT = f"{uuid_of(NodeName(NODE), 0)}-0"
OTHER = f"{uuid_of(NodeName(NODE), 1)}-0"


class Kubelet:
    """Lists what a test says."""

    unreadable_reason = ""
    silent = ""
    """Why it does not say who holds what; empty: it does."""

    def __init__(self) -> None:
        self.pods: list[KubeletPod] = []
        self.held: list[Holding] = []
        self.looks = 0

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        self.looks += 1
        return tuple(self.pods)

    async def list_running(self) -> frozenset[PodUid]:
        return frozenset()

    async def list_holdings(self) -> PodResources:
        if self.silent:
            raise UnavailableError(self.silent)
        return PodResources(holdings=tuple(self.held))

    def add(self, name: str, *containers: KubeletContainer) -> KubeletPod:
        pod = KubeletPod(
            uid=PodUid(f"uid-{name}"),
            namespace=Namespace("default"),
            name=name,
            containers=containers or (wants(),),
        )
        self.pods.append(pod)
        return pod

    def hold(self, name: str, container: str, *ids: str) -> None:
        self.held.append(Holding("default", name, container, NUMBER, frozenset(ids)))


class Around:
    """The disk, the views and the traces: keeps what happened."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    async def prepare(self, setup: ContainerSetup, *, starting: bool = False) -> None:
        self.happened.append("prepared for a start" if starting else "prepared")

    async def ensure_named(self, setup: ContainerSetup) -> None:
        if setup.cdi_devices:
            self.happened.append(f"specified {list(setup.cdi_devices)}")

    async def mig_instances_of(
        self, lease: Lease, container: str
    ) -> dict[tuple[DeviceUuid, int], str]:
        return {}

    def show_allocated(self, lease: Lease, containers: frozenset[str]) -> None:
        self.happened.append(f"shown {sorted(containers)}")

    def show_failed(self, lease: Lease) -> None:
        self.happened.append("shown as failed")

    def begin(self, lease: Lease, facts: Mapping[str, str]) -> TracedAllocation:
        return TracedAllocation(lease.trace, None, facts)

    def count_allocation(self, resource: str, outcome: str, seconds: float) -> None:
        self.happened.append(outcome)


class Desk:
    """An allocation handler with everything around it."""

    def __init__(self, path: Path) -> None:
        self.kubelet, self.around, self.ledger = Kubelet(), Around(), Ledger()
        node = NodeName(NODE)
        self.state = AgentNodeState()
        self.checkpoint = Checkpoint(path / "checkpoint.json", node)
        leases = KnownLeases(node)
        self.reporter = AllocationReporter(node, leases=leases, views=self.around)
        resolver = PodResolver(
            LeaseSync(node, leases, self.ledger),
            pods=self.kubelet,
            pod_resources=self.kubelet,
            clock=SystemClock(),
            timing=AgentTiming(resolve_s=0.15),
        )
        self.handler = AllocationHandler(
            node,
            require_snapshot=self.state.require_snapshot,
            resolver=resolver,
            pod_resources=self.kubelet,
            checkpoint=self.checkpoint,
            files=self.around,
            cdi=self.around,
            mig_instances_of=self.around.mig_instances_of,
            reporter=self.reporter,
            metrics=self.around,
            clock=SystemClock(),
        )

    async def open(self) -> "Desk":
        gpus = await SimulatedGpus(NodeName(NODE), "2xT4").discover()
        devices = devices_of(gpus, SharingConfig())
        self.state.snapshot = NodeSnapshot(
            name=NodeName(NODE),
            devices={device.uuid: device for device in devices},
            served=advertisement_of(DIALECTS.values(), devices, "auto").served,
            paths=Paths(library="/l", preload="/p", containers="/c"),
        )
        return self

    def lease(self, name: str, *shares: Any, **changes: Any) -> Lease:
        return self.ledger.grant(lease_of(f"uid-{name}", *shares, name=name, **changes))


def wants(name: str = "main", *, init: bool = False) -> KubeletContainer:
    return KubeletContainer(name=name, limits={NUMBER: 1}, init=init)


@pytest.fixture
async def desk(tmp_path: Path) -> Desk:
    return await Desk(tmp_path).open()


async def test_an_answer_is_on_disk_prepared_said_and_shown(desk: Desk) -> None:
    desk.kubelet.add("a")
    desk.lease("a", share(0, 1000))

    setup = await desk.handler.allocate(NUMBER, [SLOT])
    again = Checkpoint(desk.checkpoint.path, NODE)
    await again.load()
    said = await desk.reporter.outbox.take()

    assert again.allocations == desk.checkpoint.allocations
    assert desk.around.happened == ["prepared", "shown ['main']", "answered"]
    assert isinstance(said[0], ShareActivated)
    assert setup.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"


async def test_a_kubelet_that_cannot_say_who_holds_what_is_told_so_in_its_own_words(
    desk: Desk,
) -> None:
    desk.kubelet.add("a")
    desk.lease("a", share(0, 1000))
    desk.kubelet.silent = "PodResources: no answer within 10 s"

    with pytest.raises(UnavailableError, match="no answer within 10 s"):
        await desk.handler.allocate(NUMBER, [SLOT])


async def test_two_alike_are_looked_at_again_and_then_refused_by_name(desk: Desk) -> None:
    for name in ("a", "b"):
        desk.kubelet.add(name)
        desk.lease(name, share(0, 1000))

    with pytest.raises(RequestError, match=r"default/a, container main; default/b"):
        await desk.handler.allocate(NUMBER, [SLOT])

    (said,) = await desk.reporter.outbox.take()
    assert isinstance(said, ShareRefused)
    assert said.pod is None, "nobody's lease is given up for a guess"
    assert desk.kubelet.looks > 1
    assert desk.checkpoint.allocations == ()


async def test_nothing_is_preferred_when_it_is_unclear_for_whom(desk: Desk) -> None:
    desk.kubelet.add("a")
    desk.kubelet.add("b")

    assert list(await desk.handler.get_preferred_allocation(NUMBER, [SLOT, OTHER], [], 1)) == []


async def test_the_leased_slot_is_preferred_before_it_is_allocated(desk: Desk) -> None:
    desk.kubelet.add("a")
    desk.lease("a", share(1, 1000))

    assert list(await desk.handler.get_preferred_allocation(NUMBER, [SLOT, OTHER], [], 1)) == [
        OTHER
    ]


async def test_38_a_mismatch_is_refused_told_and_shown(desk: Desk) -> None:
    desk.kubelet.add("a")
    desk.lease("a", share(1, 1000))

    with pytest.raises(RequestError, match="the lease is for 1 of"):
        await desk.handler.allocate(NUMBER, [SLOT])

    (said,) = await desk.reporter.outbox.take()
    assert isinstance(said, ShareRefused)
    assert said.pod == "uid-a"
    assert desk.around.happened == ["shown as failed", "refused"]


async def test_a_lease_that_has_ended_is_asked_for_and_refused(desk: Desk) -> None:
    desk.kubelet.add("a")
    desk.lease("a", share(0, 1000), state=LeaseState.RELEASED)

    with pytest.raises(RequestError, match="holds no lease"):
        await desk.handler.allocate(NUMBER, [SLOT])


async def test_27_a_start_is_refused_when_another_container_holds_the_devices(desk: Desk) -> None:
    desk.kubelet.add("a")
    desk.lease("a", share(0, 1000))
    await desk.handler.allocate(NUMBER, [SLOT])

    desk.kubelet.hold("b", "main", SLOT)
    with pytest.raises(RequestError, match=r"with default/b/main, .* given to default/a/main"):
        await desk.handler.pre_start_container(NUMBER, [SLOT])

    desk.kubelet.held.clear()
    with pytest.raises(RequestError, match="with no container"):
        await desk.handler.pre_start_container(NUMBER, [SLOT])

    desk.kubelet.hold("a", "main", SLOT)
    await desk.handler.pre_start_container(NUMBER, [SLOT])
    assert desk.around.happened[-1] == "prepared for a start"


async def test_27_an_init_container_starts_although_the_kubelet_does_not_show_it(
    desk: Desk,
) -> None:
    desk.kubelet.add("a", wants("first", init=True), wants())
    desk.lease("a", share(0, 1000, container="first", init=True), share(0, 1000, fence=2))
    await desk.handler.allocate(NUMBER, [SLOT])

    await desk.handler.pre_start_container(NUMBER, [SLOT])

    assert desk.checkpoint.allocations[0].container == "first"


async def test_29_the_same_ids_serve_the_init_container_and_then_the_container(desk: Desk) -> None:
    desk.kubelet.add("a", wants("first", init=True), wants())
    desk.lease(
        "a", share(0, 500, container="first", init=True), share(1, 1000, container="main", fence=2)
    )

    first = await desk.handler.allocate(NUMBER, [SLOT])
    second = await desk.handler.allocate(NUMBER, [SLOT])

    assert first.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "500m"
    assert second.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
    assert second.environment["NVIDIA_VISIBLE_DEVICES"] == uuid_of(NodeName(NODE), 1)
