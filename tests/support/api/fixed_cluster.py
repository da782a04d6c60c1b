"""A cluster at a fixed time, for pictures of the page: only a change of the page changes them."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

import msgspec

from services.api.api_call import ApiCall
from services.api.http.http_server import HttpServer
from services.api.http.pod_objects import PodObjects
from services.api.http.read_api import ReadApi
from services.api.projection.pod_object import PodObjectView, pod_object
from services.api.reports.history import sample_of
from services.api.service import ApiService
from shared.credentials.authorization import AnonymousAuthenticator
from shared.kubernetes.pod_status import PodEvent
from shared.ledger.connection_pool import LedgerClock
from shared.model.budgets.budget import (
    UNITS_PER_GPU_MINUTE,
    Account,
    Accounts,
    BudgetWindow,
    ChargeEntry,
)
from shared.model.budgets.cost_records import CostMark
from shared.model.clock import SystemClock
from shared.model.devices.device import Device, DeviceMode, MigLayout, MigProfile
from shared.model.events.node_events import ShareActivated
from shared.model.events.pod_events import BudgetChanged, LeaseResized, PlacementChosen, PodBound
from shared.model.leases.lease import Lease, LeaseState, MigPlacement, ShareMeasurement, ShareSize
from shared.model.leases.ledger import WaitingPod
from shared.model.leases.preemption import PreemptionState
from shared.model.names import DeviceUuid, Namespace, NodeName
from shared.model.requests.placement import Refusal
from shared.runtime import health
from tests.support import build
from tests.support.api.board import budget, eviction, node_totals
from tests.support.api.board import usage as usage_of

NOW = 1_787_000_000.0
MODELS = {
    "gpu-a": ("Tesla T4", 15_360),
    "gpu-b": ("NVIDIA A100-SXM4-40GB", 40_960),
    "gpu-c": ("NVIDIA A100-SXM4-80GB", 81_920),
}
LAYOUT = MigLayout(
    name="mixed",
    profiles=(
        MigProfile(name="3g.40gb", memory_mib=40_192, count=1),
        MigProfile(name="1g.10gb", memory_mib=9_728, count=3),
    ),
)
MIG_DEVICE = DeviceUuid("GPU-gpu-c-3")


class FixedClock(SystemClock):
    """A wall clock that stands still."""

    def now(self) -> float:
        """Return the time of the pictures."""
        return NOW


def lease(
    number: int, place: tuple[str, int], mib: int, cores: int = 0, state: str = "active"
) -> Lease:
    """A lease of one of three namespaces."""
    node, gpu = place
    is_mig = place == ("gpu-c", 3)
    position = number % 4
    profile = LAYOUT.positions[position].name
    share = build.share(
        f"GPU-{node}-{gpu}",
        gpu,
        device_mib=MODELS[node][1],
        memory_mib=mib,
        cores_percent=cores,
        slot=None if is_mig else number % 10,
        mig=MigPlacement(layout=LAYOUT.name, position=position, profile=profile)
        if is_mig
        else None,
        fence=number,
    )
    return build.lease(
        f"uid-{number}",
        node,
        share,
        namespace=("default", "research", "vision")[number % 3],
        name=f"train-{number}",
        state=LeaseState(state),
        dialect="volcano-vgpu",
        created_at=NOW - 600.0 * (number + 1),
        expires_at=NOW + 30 if state == "reserved" else 0.0,
    )


LEASES: Mapping[str, Sequence[Lease]] = {
    "gpu-a": (
        lease(4, ("gpu-a", 3), 5_500, 30, "bound"),
        lease(9, ("gpu-a", 1), 12_000, 80),
        *(lease(number, ("gpu-a", 2), 3_000, 20) for number in (10, 11, 12)),
    ),
    "gpu-b": (
        lease(8, ("gpu-b", 0), 24_000, 50),
        lease(7, ("gpu-b", 1), 20_480, 50),
        lease(5, ("gpu-b", 2), 16_384, 25),
        lease(6, ("gpu-b", 2), 8_192, 25),
    ),
    "gpu-c": (
        lease(13, ("gpu-c", 0), 81_920, 100),
        *(lease(number, ("gpu-c", 1), 8_192 + 4_096 * number, 10) for number in range(3)),
        lease(3, ("gpu-c", 1), 10_240, 10, "reserved"),
        lease(16, ("gpu-c", 3), 40_192, 42),
        lease(17, ("gpu-c", 3), 9_728, 14),
    ),
}


def device(node: str, index: int) -> Device:
    """A GPU of a node; one is unhealthy, one is in MIG mode."""
    model, memory_mib = MODELS[node]
    made = build.device(f"GPU-{node}-{index}", index, model=model, memory_mib=memory_mib)
    if made.uuid == MIG_DEVICE:
        return replace(made, mode=DeviceMode.MIG, layouts=(LAYOUT,))
    if (node, index) == ("gpu-a", 0):
        fault = "XidError: Xid 79, the GPU has fallen off the bus"
        return replace(made, healthy=False, fault=fault)
    return made


EVICTION = eviction(
    "uid-evicted",
    NOW - 5,
    name="batch-1",
    namespace=Namespace("default"),
    node=NodeName("gpu-c"),
    for_namespace="research",
    for_name="evaluate-1",
)


def activated(lease: Lease) -> ShareActivated:
    """The container of a lease has its share."""
    return ShareActivated(node=lease.node, allocation=build.allocation_of(lease, device_ids=()))


def usage(lease: Lease, percent: int = 100) -> ShareMeasurement:
    """The measured usage of a lease; one of them is idle."""
    (share,) = lease.shares
    number = int(lease.name.rpartition("-")[2])
    return build.measurement(
        lease,
        memory_mib=share.memory_mib * (20 + 4 * number) * percent // 10_000,
        cores_percent=0 if number == 7 else 5 + number,
        processes=1,
        idle_since=NOW - 3 * 3_600 if number == 7 else None,
    )


async def no_agents(_: Iterable[NodeName]) -> Mapping[NodeName, None]:
    """The usage of no node."""
    return {}


def waiting(number: int, reason: str, hint: str) -> WaitingPod:
    """A waiting pod of the namespace research."""
    name = f"evaluate-{number}"
    return WaitingPod(
        queued=build.pod_queued(f"uid-wait-{number}", namespace="research", name=name),
        refusal=Refusal(reason=reason, hint=hint),
        capacity=1,
        waiting_since=NOW - 1_340 / number,
    )


def reported(namespace: str, state: str, used: int, remaining: int) -> BudgetChanged:
    """A budget; amounts are GPU-minutes."""
    return budget(
        namespace,
        state,
        NOW,
        window="2026-08",
        used_units=used * UNITS_PER_GPU_MINUTE,
        remaining_units=remaining * UNITS_PER_GPU_MINUTE,
        current_rate_milli_gpu=1_200,
        exhausted_at=NOW + 3_000,
    )


class NoPreemptions:
    async def state(self, **_: float) -> PreemptionState:
        return PreemptionState()


class FixedBudgets:
    """The account of the namespace research: an hour's window of 600 GPU-minutes."""

    async def load(self, wanted: Mapping[Namespace, int | None]) -> list[Account]:
        """Return an account for each namespace."""
        start_ms = round((NOW - 3_600 * 9) * 1000)
        window = BudgetWindow(
            id="2026-08",
            start_ms=start_ms,
            end_ms=start_ms + 12 * 3_600_000,
            limit_units=600 * UNITS_PER_GPU_MINUTE,
            used_units=540 * UNITS_PER_GPU_MINUTE,
        )
        return [Account(namespace=name, windows=(window,)) for name in wanted]

    async def revisions(self) -> dict[Namespace, int]:
        """Return no account: namespaces are listed with what they lease now."""
        return {}

    async def all_accounts(self, _: object) -> Accounts:
        """Return no account."""
        return Accounts(now_ms=round(NOW * 1000), accounts=())

    async def costs(self, _from_ms: int, _to_ms: int) -> CostMark:
        """Return nothing recorded."""
        return CostMark()

    async def entries(self, _: object, *, after: str) -> list[ChargeEntry]:
        """Return a charge of 20 minutes for every 20 minutes, all at once."""
        if not after:
            return []
        start_ms = (NOW - 3_600 * 9) * 1000
        return [
            ChargeEntry(
                window="2026-08",
                kind="charge",
                units=20 * UNITS_PER_GPU_MINUTE,
                to_ms=round(start_ms + 1_200_000 * number),
            )
            for number in range(1, 28)
        ]


def filled() -> ApiService:
    """The page's state at that moment."""
    board = ApiService(
        None,  # type: ignore[arg-type]
        FixedClock(),
        read_usage=no_agents,
        preemptions=NoPreemptions(),  # type: ignore[arg-type]
        ledger_clock=LedgerClock(),
    )
    projection = board.projection
    projection.update_nodes(
        [],
        [
            node_totals(*leases, name=node, devices=[device(node, index) for index in range(4)])
            for node, leases in LEASES.items()
        ],
    )

    def measure(node: str, percent: int = 100) -> None:
        active = (lease for lease in LEASES[node] if lease.state is LeaseState.ACTIVE)
        reply = usage_of(*(usage(lease, percent) for lease in active))
        projection.update_measured(NodeName(node), reply, now=NOW, idle_after_s=600)

    for node in LEASES:
        measure(node)
    reason = "0/3 nodes are available: 2 Insufficient GPU memory, 1 GPU is unhealthy."
    projection.update_waiting(
        waiting(number, reason, "in container main set nvidia.com/gpumem: 40960, or wait")
        for number in (1, 2)
    )
    projection.update_budgets(
        [reported("research", "warning", 540, 60), reported("vision", "ok", 9, 0)]
    )
    for number, described in enumerate(LEASES["gpu-b"]):
        for after_s, event in (
            (
                0.0,
                build.pod_queued(described.pod, namespace=described.namespace, name=described.name),
            ),
            (0.03, PlacementChosen(lease=described)),
            (0.09, PodBound(lease=described)),
            (1.4 + number, activated(described)),
        ):
            projection.add_events([event], NOW - 60 + 10 * number + after_s)
    resized = LeaseResized(
        lease=LEASES["gpu-b"][0],
        container="main",
        before=ShareSize(memory_mib=20_480, cores_percent=50),
        after=ShareSize(memory_mib=24_000, cores_percent=50),
    )
    projection.add_events([resized], NOW)
    projection.update_preemptions(PreemptionState(evictions=(EVICTION,)))
    for number, before_s in enumerate(range(3600, 0, -30)):
        measure("gpu-b", 100 - number % 60)
        sample = sample_of(list(projection.devices.values()), ["NoMemory"] * 2, {})
        board.history.add(sample, NOW - before_s)
    board.synced = True
    return board


class FixedPods(PodObjects):
    """Each pod is a Job's, and has one container and two Events."""

    @property
    def is_available(self) -> bool:
        """Return True: the pods are made up."""
        return True

    async def read(self, call: ApiCall, namespace: Namespace, name: str) -> PodObjectView:
        """Return the pod of a name: its UID ends with the name's number."""
        kind = "wait-" if name.startswith("evaluate") else ""
        at = datetime.fromtimestamp(NOW - 4_790, UTC)
        container = {"name": "main", "image": "registry.example/train:1"}
        limits = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "20480"}
        owner = {"kind": "Job", "name": "train", "uid": "1", "controller": True}
        pod = {
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": f"uid-{kind}{name.rpartition('-')[2]}",
                "creationTimestamp": at,
                "ownerReferences": [owner],
            },
            "spec": {
                "schedulerName": "leasehold",
                "priority": 0,
                "nodeSelector": {"pool": "training"},
                "containers": [{**container, "resources": {"limits": limits}}],
            },
            "status": {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": at}],
                "containerStatuses": [{"name": "main", "state": {"running": {"startedAt": at}}}],
            },
        }
        events = (
            PodEvent(type="Normal", reason="Scheduled", message="bound", last_timestamp=at),
            PodEvent(type="Warning", reason="BackOff", message="pulling the image again", count=3),
        )
        return pod_object(msgspec.json.encode(pod), events)


@asynccontextmanager
async def fixed_page() -> AsyncIterator[str]:
    """Serve the page of the cluster; yields its URL."""
    api = ReadApi(filled(), FixedBudgets(), None, pods=FixedPods(None))  # type: ignore[arg-type]
    pages = HttpServer(api, AnonymousAuthenticator())
    async with health.served(pages.application(), "127.0.0.1:0") as address:
        yield f"http://{address}"
