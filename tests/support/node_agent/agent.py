"""A node agent in this process, beside a simulated kubelet, with leases that a test sets."""

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from services.node_agent.agent_timing import DEFAULT_TIMING, AgentTiming
from services.node_agent.gpu_access import open_gpus
from services.node_agent.service import NodeAgent
from services.node_agent.views.advertisement import NodeAdvertisement
from services.node_agent.wiring import node_agent
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.events.event import Event
from shared.model.events.node_events import DeviceReported, ShareActivated, ShareRefused
from shared.model.events.pod_events import LeaseChanged
from shared.model.events.request_reply import (
    ClaimRestoreRequest,
    LeasesReply,
    LeasesRequest,
    TerminationRequest,
)
from shared.model.leases.lease import Lease, LeaseState, Share
from shared.model.names import Namespace, NodeName, PodUid
from shared.runtime.service import roles_of
from shared.runtime.telemetry import Tracing
from simcluster.apimachinery.objects import Json
from simcluster.kubelet.settings import NodeSettings
from simcluster.node_agent.agent import BACKOFF_S, SimulatedAgentSettings, simulated_gpus
from simcluster.node_agent.gpus import HANG_LIMIT_S, uuid_of
from tests.support.clock import FastClock
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.kubelet import FAST, NODE, Node, one_kubelet, pod
from tests.support.waiting import until

NUMBER = "volcano.sh/vgpu-number"
MEMORY = "volcano.sh/gpu-memory"
RESTART_S = 0.05


async def _restarted(loop: Callable[[], Awaitable[None]], pause_s: float) -> None:
    """Run a loop of the agent again after a known error, as the runtime does."""
    while True:
        with contextlib.suppress(LeaseholdError):
            await loop()
        await asyncio.sleep(pause_s)


@dataclass(slots=True)
class FakeLeaseReplies:
    """Replies to lease requests as the binder does, or is unavailable."""

    leases: dict[PodUid, Lease] = field(default_factory=dict)
    lost: dict[PodUid, Lease] = field(default_factory=dict)
    """Leases of claims that are restored once their claims are named."""
    unavailable: bool = False
    requests: list[LeasesRequest] = field(default_factory=list)
    restored: list[ClaimRestoreRequest] = field(default_factory=list)
    """What was requested of claims."""

    async def request(
        self,
        request: LeasesRequest | ClaimRestoreRequest,
        reply_type: type[LeasesReply],
        *,
        timeout_s: float,
    ) -> LeasesReply:
        if isinstance(request, ClaimRestoreRequest):
            self.restored.append(request)
        else:
            self.requests.append(request)
        if self.unavailable:
            raise UnavailableError(f"no reply to {request.subject}")
        if isinstance(request, ClaimRestoreRequest):
            lost = self.lost.pop(request.claim.pod, None)
            lease = self.grant(lost) if lost else self.leases.get(request.claim.pod)
            return LeasesReply(leases=(lease,) if lease else ())
        wanted = request.pods or tuple(self.leases)
        return LeasesReply(leases=tuple(self.leases[pod] for pod in wanted if pod in self.leases))

    def grant(self, lease: Lease) -> Lease:
        self.leases[lease.pod] = lease
        return lease


def share(index: int = 0, memory_mib: int = 1000, **changes: Any) -> Share:
    """Return a slotted share of the node's GPU with this index, for the container `main`."""
    facts: dict[str, Any] = {
        "container": "main",
        "device": uuid_of(NodeName(NODE), index),
        "index": index,
        "device_mib": 15_360,
        "memory_mib": memory_mib,
        "cores_percent": 10,
        "slot": 0,
        "fence": 1,
    }
    return Share(**(facts | changes))


def lease_of(uid: str, *shares: Share, name: str = "pod", **changes: Any) -> Lease:
    """Return a bound lease of the Volcano vGPU dialect."""
    facts: dict[str, Any] = {
        "pod": PodUid(uid),
        "namespace": Namespace("default"),
        "name": name,
        "node": NodeName(NODE),
        "shares": shares or (share(),),
        "dialect": "volcano-vgpu",
        "state": LeaseState.BOUND,
        "version": 2,
        "created_at": 1_787_000_000.0,
    }
    return Lease(**(facts | changes))


def healthy_counts(advertised: NodeAdvertisement) -> dict[str, int]:
    """Return the number of devices that are allocatable, by served resource."""
    return {
        resource: sum(served.healthy for served in ids.values())
        for resource, ids in advertised.served.items()
    }


@dataclass(slots=True)
class OneNodeCluster:
    """An API server, a kubelet and an agent, and the events that the agent published."""

    api: ApiUnderTest
    node: Node
    root: Path
    ledger: FakeLeaseReplies = field(default_factory=FakeLeaseReplies)
    agent: NodeAgent | None = None
    events: list[Event] = field(default_factory=list)
    timing: AgentTiming = DEFAULT_TIMING
    rate: float = 1.0
    """How much faster than the machine's the agent's clock is."""
    gpus: str | None = "2xT4"
    """Layout of simulated GPUs, or None for those that NVML has."""
    backoff_s: float = BACKOFF_S
    """First backoff of a GPU that was cordoned."""
    hang_limit_s: float = HANG_LIMIT_S
    """Time limit of a probe while a GPU hangs."""
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> SimulatedAgentSettings:
        facts: dict[str, Any] = {
            "node": NODE,
            "kubelet_dir": self.node.kubelet.files.root,
            "kubeconfig": self.api.kubeconfig,
            "gpus": self.gpus or "1xT4",
            "state_dir": self.root / "agent",
            "fault_file": self.root / "faults.json",
        }
        return SimulatedAgentSettings(**(facts | self.changes))

    @asynccontextmanager
    async def running(self, *, registered: bool = True) -> AsyncIterator[NodeAgent]:
        """Run an agent; it is stopped without a drain."""
        tracing = Tracing("node-agent", None)
        settings = self.settings
        bus: Any = self.ledger
        gpus = (
            open_gpus(settings)
            if self.gpus is None
            else simulated_gpus(settings, backoff_s=self.backoff_s, hang_limit_s=self.hang_limit_s)
        )
        async with node_agent(
            settings,
            gpus,
            bus=bus,
            tracing=tracing,
            clock=FastClock(self.rate),
            timing=self.timing,
        ) as agent:
            self.agent = agent
            tasks = [
                asyncio.create_task(
                    _restarted(
                        getattr(agent, role.method),
                        role.every_s / self.rate if isinstance(role.every_s, float) else RESTART_S,
                    )
                )
                for role in roles_of(agent)
                if role.kind == "loops"
            ]
            tasks += [
                asyncio.create_task(self._collect(source))
                for source in (agent.shares, agent.reports, agent.violations, agent.health)
            ]
            try:
                if registered:
                    await until(lambda: self.is_served(agent))
                yield agent
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self.agent = None

    def is_served(self, agent: NodeAgent) -> bool:
        """Return whether pods can come: the kubelet has the devices, and the agent its records."""
        return (
            agent.plugins.unready_reason() is None
            and bool(agent.node.devices)
            and (self.ledger.unavailable or not agent.checkpoint.lost)
            and all(
                self.node.amount(resource) == str(count)
                for resource, count in healthy_counts(agent.node.shown).items()
            )
        )

    def inject(self, **faults: str) -> None:
        """Give GPUs these faults, by index as in `gpu0`, and no other GPU any."""
        named = {name.removeprefix("gpu"): text for name, text in faults.items()}
        (self.root / "faults.json").write_text(json.dumps(named))

    async def _collect(self, source: Any) -> None:
        async for events in source():
            self.events.extend(events)

    async def push_lease(self, lease: Lease) -> None:
        """Send a lease to the agent, as the binder does."""
        assert self.agent is not None
        await self.agent.observe_leases([LeaseChanged(lease=lease)])

    def events_of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def activated(self) -> list[ShareActivated]:
        return self.events_of(ShareActivated)

    @property
    def refused(self) -> list[ShareRefused]:
        return self.events_of(ShareRefused)

    @property
    def reported(self) -> list[DeviceReported]:
        return self.events_of(DeviceReported)

    def bind(self, obj: Json, *shares: Share, lease_known: bool = True, **changes: Any) -> Lease:
        """Create a pod bound to the node, and its lease, which the agent knows if `lease_known`."""
        created = self.node.create(obj)["metadata"]
        facts = {"name": created["name"], **changes}
        lease = self.ledger.grant(lease_of(created["uid"], *shares, **facts))
        if lease_known and self.agent is not None:
            self.agent.leases.observe([lease])
        return lease

    async def run_pod(
        self, name: str, *shares: Share, phase: str = "Running", **changes: Any
    ) -> Lease:
        """Bind a pod that requests a device, and wait until it runs."""
        lease = self.bind(pod(name, limits={NUMBER: 1}), *shares, **changes)
        await self.node.phase(name, phase)
        return lease

    async def delete_pod(self, name: str) -> None:
        """Delete a pod without grace, and wait until it is gone; its lease stays."""
        self.node.store.delete("pods", "default", name, grace_s=0)
        await until(lambda: not self.node.exists(name))

    async def release(self, lease: Lease) -> None:
        """End a lease, as the binder does."""
        self.ledger.leases.pop(lease.pod, None)
        await self.push_lease(structs.replace(lease, state=LeaseState.RELEASED, version=9))

    async def terminated(self, pod: PodUid) -> bool:
        """Return whether the agent reports that a pod's containers have ended."""
        assert self.agent is not None
        request = TerminationRequest(node=NodeName(NODE), pod=pod)
        return (await self.agent.report_terminated(request)).terminated

    async def fail_pod(self, name: str, *shares: Share, **changes: Any) -> Lease:
        """Bind a pod that requests a device, and wait until the kubelet has failed it."""
        return await self.run_pod(name, *shares, phase="Failed", **changes)

    def env(self, pod: str, container: str = "main") -> dict[str, str]:
        return dict(self.node.container(pod, container).env)

    def region_of(self, lease: Lease) -> Path:
        """Return where the region of a pod's container is."""
        name = Path(self.env(lease.name)["CUDA_DEVICE_MEMORY_SHARED_CACHE"]).name
        return self.root / "agent" / "containers" / f"{lease.pod}_main" / name

    def annotation(self, pod: str, key: str) -> str:
        return str(self.node.pod(pod)["metadata"].get("annotations", {}).get(key, ""))

    def message(self, pod: str) -> str:
        return str(self.node.pod(pod)["status"].get("message", ""))


OWN_FACTS = ("timing", "rate", "backoff_s", "hang_limit_s")


@asynccontextmanager
async def one_node_cluster(
    gpus: str | None = "2xT4", settings: NodeSettings = FAST, **changes: Any
) -> AsyncIterator[OneNodeCluster]:
    """Start an API server and a kubelet; the agent is started by the test.

    `changes` are of the cluster's own facts, and of the agent's settings.
    """
    own = {name: changes.pop(name) for name in OWN_FACTS if name in changes}
    root = Path(tempfile.mkdtemp(prefix="lh-"))
    try:
        async with (
            api_server() as api,
            one_kubelet(settings, store=api.store, directory=root / "k") as node,
        ):
            yield OneNodeCluster(api, node, root, gpus=gpus, changes=changes, **own)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def make_process(cluster: OneNodeCluster, pid: int, uid: PodUid, container_id: str) -> None:
    """Have the node's `/proc` show a process of a container."""
    folder = cluster.root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(f"0::/kubepods/pod{uid}/{container_id}\n")
    (folder / "status").write_text("NSpid:\t1\n")
    (folder / "stat").write_text(f"{pid} (x) S " + "0 " * 48)
