"""Containers that may open GPUs without a lease, as the usage monitor reports them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from services.node_agent.container_runtime.bundles import read_bundle
from services.node_agent.kubelet.pods import ClaimHolding, KubeletPod
from services.node_agent.usage import container_views
from services.node_agent.usage.container_views import LABELS_AGAIN_S, MOST_READ, READ_AGAIN_S
from services.node_agent.usage.monitor import MAX_UNLISTED, REPORT_AGAIN_S, UsageMonitor
from services.node_agent.usage.report_limits import MOST_AT_ONCE
from shared.kubernetes.types import ApiObject, ObjectMeta
from shared.model.errors import UnavailableError
from shared.model.events.node_events import ViolationReason
from shared.model.leases.lease import ClaimAllocation, Lease
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.claim import device_name
from simcluster.node_agent.gpus import uuid_of
from tests.support.build import device
from tests.support.clock import FakeClock
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.bundles import ALL_DEVICES, CONTAINERD, Bundles, hook_mount, node
from tests.support.node_agent.monitor_world import FakeDriver, list_instances
from tests.support.node_agent.node import FakeKubelet, entry_of, node_of, snapshot_of
from tests.support.simcluster.kubelet import NODE

VISIBLE = ViolationReason.VISIBLE
PRIVILEGED = ViolationReason.PRIVILEGED
GPUS = [uuid_of(NodeName(NODE), index) for index in range(4)]


def uid(number: int) -> PodUid:
    return PodUid(f"0b7a4d0e-7f0c-4d55-9f5b-{number:012x}")


def container_id(number: int) -> str:
    return f"{number:064x}"


@dataclass
class FakeNamespaces:
    """The API server's namespaces, of which a test sets the labels."""

    labels: dict[str, Mapping[str, str]] = field(default_factory=dict)
    down: bool = False
    reads: int = 0

    async def read(self, path: str, kind: type[ApiObject]) -> ApiObject:
        self.reads += 1
        if self.down:
            raise UnavailableError("the API server does not respond")
        name = path.removeprefix("/api/v1/namespaces/")
        return ApiObject(ObjectMeta(name=name, labels=dict(self.labels.get(name, {}))))


class SeenNode:
    """A node with four GPUs, whose runtime starts containers that a test adds."""

    def __init__(self, root: Path) -> None:
        self.bundles = Bundles(root)
        self.bundles.proc.mkdir()
        self.kubelet = FakeKubelet()
        self.clock = FakeClock()
        self.driver = FakeDriver()
        self.namespaces = FakeNamespaces()
        self.node = node_of(self.kubelet, clock=self.clock, kubernetes=self.namespaces)
        gpus = [device(uuid, index) for index, uuid in enumerate(GPUS)]
        self.node.snapshot = snapshot_of(*gpus)
        self.monitor = self.started()

    def started(self) -> UsageMonitor:
        """Start the agent's monitor, which knows nothing yet."""
        self.monitor = UsageMonitor(
            self.node,
            sample=self.driver.sample,
            list_instances=list_instances,
            proc=self.bundles.proc,
            bundles=[self.bundles.root / CONTAINERD],
        )
        return self.monitor

    def run(
        self, number: int, *, namespace: str = "default", listed: bool = True, **facts: Any
    ) -> KubeletPod:
        """Start a pod with one container, of which `facts` say what its runtime gave it."""
        ids = {container_id(number): "main"} if listed else {}
        pod = KubeletPod(
            uid=uid(number), namespace=Namespace(namespace), name=f"pod-{number}", phase="Running",
            container_ids=ids,
        )  # fmt: skip
        self.kubelet.pods.append(pod)
        self.bundles.add(pod.uid, container_id(number), **facts)
        return pod

    def lease(self, lease: Lease) -> None:
        """Record a lease, and that the kubelet got its devices."""
        for container in lease.containers:
            entry = entry_of(lease, container=container)
            self.node.checkpoint.by_key[entry.key] = entry
        self.node.leases.observe([lease])

    async def scan(self) -> list[tuple[str, str]]:
        """Scan once, 5 s after the last time; return the reason and the pod of each violation."""
        self.clock.advance(5)
        await self.monitor.scan()
        return [(one.reason, one.name) for one in self.monitor.snapshot.violations]

    async def reported(self) -> list[str]:
        """Scan once; return the pods of which something new is reported."""
        await self.scan()
        queue = self.monitor._queue
        return [] if queue.empty() else [one.name for one in queue.get_nowait()]


@pytest.fixture
def seen(tmp_path: Path) -> SeenNode:
    return SeenNode(tmp_path)


@pytest.mark.parametrize(
    ("facts", "numbers"),
    [
        ({"devices": [node(number) for number in range(4)]}, "0, 1, 2, 3"),
        ({"mountinfo": hook_mount("/dev/nvidia2")}, "2"),
    ],
    ids=["CDI or an NRI plugin", "NVIDIA's hook"],
)
async def test_a_container_that_may_open_gpus_without_a_lease_is_reported_by_the_next_scan(
    seen: SeenNode, facts: dict[str, Any], numbers: str
) -> None:
    seen.run(1, **facts)
    seen.run(2)

    assert await seen.scan() == [(VISIBLE, "pod-1")]
    ((violation,),) = [await seen.monitor.violations()]
    assert (violation.namespace, violation.pod, violation.container) == ("default", uid(1), "main")
    assert violation.message.startswith(f"container main can open GPU {numbers} without a lease")
    metrics = generate_latest(seen.monitor).decode()
    assert 'leasehold_violations{reason="GpuVisibleWithoutLease"} 1.0' in metrics
    assert "leasehold_node_containers_seen 2.0" in metrics


async def test_a_container_with_a_lease_is_not_reported_nor_when_it_or_the_agent_restarts(
    seen: SeenNode,
) -> None:
    pod = seen.run(1, devices=[node(0), node(2)])
    seen.lease(lease_of(pod.uid, share(0), share(2), name=pod.name))

    assert await seen.scan() == []
    seen.bundles.remove(container_id(1))
    seen.bundles.add(pod.uid, container_id(9), devices=[node(0), node(2)])
    seen.kubelet.pods[:] = [replace(pod, container_ids={container_id(9): "main"})]
    assert await seen.scan() == []
    seen.started()
    assert await seen.scan() == []


@pytest.mark.parametrize("known", ["synced", "found"])
async def test_nothing_is_reported_before_leases_and_checkpoint_are_known(
    seen: SeenNode, known: str
) -> None:
    seen.run(1, devices=[node(0)])
    if known == "synced":
        seen.node.leases.synced = False
    else:
        seen.node.checkpoint.lost = True

    assert await seen.scan() == []
    seen.node.leases.synced = True
    seen.node.checkpoint.lost = False
    assert await seen.scan() == [(VISIBLE, "pod-1")]


async def test_a_container_that_got_its_gpu_by_a_lease_is_not_reported_once_the_lease_is_lost(
    seen: SeenNode,
) -> None:
    """While the ledger is rebuilt, for example, some of its leases are missing."""
    pod = seen.run(1, devices=[node(0)])
    entry = entry_of(lease_of(pod.uid, share(0), name=pod.name))
    seen.node.checkpoint.by_key[entry.key] = entry

    assert await seen.scan() == []


async def test_gpus_beside_those_of_the_lease_are_reported(seen: SeenNode) -> None:
    pod = seen.run(1, devices=[node(0), node(3)])
    seen.lease(lease_of(pod.uid, share(0), name=pod.name))

    assert await seen.scan() == [(VISIBLE, "pod-1")]
    assert "can open GPU 3 without" in seen.monitor.snapshot.violations[0].message


async def test_the_lease_of_another_container_is_not_enough(seen: SeenNode) -> None:
    pod = seen.run(1, devices=[node(0)])
    seen.lease(lease_of(pod.uid, share(0, container="other"), name=pod.name))

    assert await seen.scan() == [(VISIBLE, "pod-1")]


async def test_a_claim_with_a_lease_is_for_all_containers_of_its_pods(seen: SeenNode) -> None:
    pods = [seen.run(number, devices=[node(1)]) for number in (1, 2, 3)]
    allocation = ClaimAllocation(generation="g", consumers=tuple(pod.uid for pod in pods[:2]))
    lease = lease_of("claim-1", share(1, container="gpu"), name="shared", claim=allocation)
    seen.lease(lease)

    assert await seen.scan() == [(VISIBLE, "pod-3")]


@pytest.mark.parametrize("suffix", ["", "-1g-10gb-0"], ids=["whole", "instance"])
async def test_a_claim_that_the_kubelet_prepared_counts_without_a_lease(
    seen: SeenNode, suffix: str
) -> None:
    pod = seen.run(1, devices=[node(1)])
    seen.kubelet.claims = frozenset(
        {
            ClaimHolding(
                namespace=pod.namespace, pod=pod.name, claim="admin",
                device=device_name(GPUS[1]) + suffix,
            )
        }
    )  # fmt: skip

    assert await seen.scan() == []


async def test_a_gpu_that_leasehold_does_not_serve_is_nobodys(seen: SeenNode) -> None:
    seen.run(1, devices=[node(7)])

    assert await seen.scan() == []


async def test_a_privileged_container_is_reported_as_such(seen: SeenNode) -> None:
    seen.run(1, rules=[ALL_DEVICES])

    assert await seen.scan() == [(PRIVILEGED, "pod-1")]
    (violation,) = seen.monitor.snapshot.violations
    assert "container main is privileged, so it can open every GPU" in violation.message
    assert "label namespace default leasehold.dev/sees-devices=true" in violation.message


@pytest.mark.parametrize("facts", [{"rules": [ALL_DEVICES]}, {"devices": [node(0)]}])
async def test_exempt_namespaces_are_not_reported(seen: SeenNode, facts: dict[str, Any]) -> None:
    seen.namespaces.labels["monitoring"] = {"leasehold.dev/sees-devices": "true"}
    for number, name in enumerate(("kube-system", "leasehold-agents", "monitoring")):
        seen.run(number, namespace=name, **facts)

    assert await seen.scan() == []
    assert seen.namespaces.reads == 1
    await seen.scan()
    assert seen.namespaces.reads == 1
    seen.clock.advance(LABELS_AGAIN_S)
    seen.namespaces.labels.clear()
    assert [pod for _, pod in await seen.scan()] == ["pod-2"]


async def test_what_is_not_known_of_a_namespace_is_waited_for(seen: SeenNode) -> None:
    seen.run(1, devices=[node(0)])
    seen.namespaces.down = True

    assert await seen.scan() == []
    seen.namespaces.down = False
    assert await seen.scan() == [(VISIBLE, "pod-1")]


async def test_a_container_that_ended_with_its_lease_is_not_reported(
    seen: SeenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at the containers and one at the leases, a pod may end."""
    seen.run(1, devices=[node(0)])
    list_holdings = seen.kubelet.list_holdings

    async def end_meanwhile() -> Any:
        seen.bundles.remove(container_id(1))
        return await list_holdings()

    monkeypatch.setattr(seen.kubelet, "list_holdings", end_meanwhile)

    assert await seen.scan() == []


async def test_a_container_that_the_kubelet_lists_later_is_reported_then(seen: SeenNode) -> None:
    pod = seen.run(1, devices=[node(0)], listed=False)

    assert await seen.scan() == []
    seen.kubelet.pods[:] = [replace(pod, container_ids={container_id(1): "main"})]
    assert await seen.scan() == [(VISIBLE, "pod-1")]


async def test_the_kubelets_list_is_not_read_again_and_again_for_a_sandbox(
    seen: SeenNode,
) -> None:
    seen.run(1, rules=[ALL_DEVICES], listed=False)

    for _ in range(3 * MAX_UNLISTED):
        assert await seen.scan() == []

    assert seen.kubelet.list_calls == MAX_UNLISTED


async def test_a_container_is_read_once_and_then_rarely(
    seen: SeenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def counted(bundle: Path, proc: Path) -> Any:
        reads.append(bundle.name)
        return read_bundle(bundle, proc)

    monkeypatch.setattr(container_views, "read_bundle", counted)
    for number in range(MOST_READ + 10):
        seen.run(number)

    await seen.scan()
    assert len(reads) == MOST_READ
    await seen.scan()
    await seen.scan()
    assert len(reads) == MOST_READ + 10
    seen.clock.advance(READ_AGAIN_S)
    seen.bundles.add(uid(3), container_id(3), devices=[node(0)])
    scans = [await seen.scan() for _ in range(12)]
    assert [(VISIBLE, "pod-3")] in scans
    assert len(reads) == 2 * (MOST_READ + 10)


async def test_many_pods_are_reported_in_turn_and_each_once_in_five_minutes(
    seen: SeenNode,
) -> None:
    for number in range(30):
        seen.run(number, namespace="flood", devices=[node(0)])
    seen.run(99, namespace="quiet", devices=[node(0)])

    first, *later = [await seen.reported() for _ in range(-(-31 // MOST_AT_ONCE))]

    assert len(first) == MOST_AT_ONCE
    assert "pod-99" in first
    assert len(set(first).union(*later)) == len(first) + sum(map(len, later)) == 31
    assert await seen.reported() == []
    seen.clock.advance(REPORT_AGAIN_S)
    assert len(await seen.reported()) == MOST_AT_ONCE


async def test_the_containers_of_a_pod_are_one_report(seen: SeenNode) -> None:
    pod = seen.run(1, devices=[node(0)])
    names = {container_id(1): "main"}
    for number in range(2, 7):
        seen.bundles.add(pod.uid, container_id(number), devices=[node(1)])
        names[container_id(number)] = f"side-{number}"
    seen.kubelet.pods[:] = [replace(pod, container_ids=names)]

    assert await seen.scan() == [(VISIBLE, "pod-1")]
    (violation,) = seen.monitor.snapshot.violations
    assert violation.message.startswith(
        "container main, side-2, side-3 and 3 more can open GPU 0, 1 without a lease"
    )


async def test_a_runtime_whose_files_are_elsewhere_is_seen_as_no_container(
    seen: SeenNode, tmp_path: Path
) -> None:
    seen.run(1, devices=[node(0)])
    (tmp_path / CONTAINERD).rename(tmp_path / "elsewhere")

    assert await seen.scan() == []
    assert "leasehold_node_containers_seen 0.0" in generate_latest(seen.monitor).decode()
