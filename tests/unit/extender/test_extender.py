"""The extender's verdicts, scores, soft holds and Bindings."""

import asyncio
from typing import Any

import msgspec
import pytest

from services.extender.pod_requests import GANG, PREFERRED
from services.extender.scheduler_api import ExtenderArgs
from services.extender.service import AGAIN_S, FLUSH_S, HOLD_S, MOST_NODES, VOLUME_HOLD_S
from shared.model.budgets.quota import QuotaExcess
from shared.model.devices.device import DeviceUse, numa_cpus_name
from shared.model.errors import UnavailableError
from shared.model.events.request_reply import PodBindingReply
from shared.model.leases.ledger import LedgerNode
from shared.model.names import OFFER, NodeName
from tests.support.build import TRIGGER, devices, facts
from tests.support.extender import ExtenderWorld, args
from tests.support.waiting import until


def test_each_refused_node_has_the_words_of_explain_without_devices() -> None:
    verdict = ExtenderWorld().filter("big", 90_000, "n0 n2 unknown")

    assert verdict.node_names == []
    assert verdict.failed_and_unresolvable_nodes == {
        "n0": "Insufficient GPU memory",
        "n2": "Insufficient GPU memory",
        "unknown": "node(s) were not known to Leasehold",
    }


def test_required_affinity_between_pods_is_left_to_kube_scheduler() -> None:
    terms = [{"labelSelector": {}, "topologyKey": "kubernetes.io/hostname"}]
    rule = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}

    verdict = ExtenderWorld().filter("a", 1_000, affinity=rule)

    assert verdict.node_names == ["n0", "n1", "n2"]


def test_a_hard_spread_is_left_to_kube_scheduler() -> None:
    spread = {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}

    verdict = ExtenderWorld().filter("a", 1_000, topologySpreadConstraints=[spread])

    assert verdict.node_names == ["n0", "n1", "n2"]


def test_the_only_one_of_500_nodes_that_fits_is_offered_in_a_small_reply() -> None:
    world = ExtenderWorld()
    names = [f"node-{number:03d}" for number in range(500)]
    for name in names:
        large = name == "node-321"
        given = tuple((each, DeviceUse()) for each in devices(1, name, memory_mib=40_000 + large))
        node = LedgerNode(facts=facts(name), version=1, devices=given, served=(TRIGGER,))
        world.mirror.put_node(node)

    verdict = world.filter("a", 40_001, " ".join(names))

    assert verdict.node_names == ["node-321"]
    assert len(verdict.failed_and_unresolvable_nodes) == 499
    assert len(msgspec.json.encode(verdict)) < 32_000


def filled(nodes: int) -> tuple[ExtenderWorld, list[str]]:
    """Return an extender with these nodes of one GPU each, of which the last ones are fullest."""
    world = ExtenderWorld()
    names = [f"node-{number:03d}" for number in range(nodes)]
    for number, name in enumerate(names):
        use = DeviceUse(memory_mib=10 * number, shares=1)
        given = tuple((each, use) for each in devices(1, name))
        node = LedgerNode(facts=facts(name), version=1, devices=given, served=(TRIGGER,))
        world.mirror.put_node(node)
    return world, names


def test_of_many_nodes_the_best_are_offered_and_the_others_are_not_refused() -> None:
    world, names = filled(300)

    verdict = world.filter("a", 1_000, " ".join(names))

    assert sorted(verdict.node_names) == names[-MOST_NODES:]
    assert verdict.failed_and_unresolvable_nodes == {}
    [best] = [
        each.host
        for each in world.extender.prioritize(args("a", 1_000, " ".join(verdict.node_names)))
        if each.score == 10
    ]
    assert best == names[-1]


@pytest.mark.parametrize(
    "spec",
    [
        {"affinity": {"nodeAffinity": {PREFERRED: [{"weight": 1, "preference": {}}]}}},
        {"affinity": {"podAntiAffinity": {PREFERRED: [{"weight": 1}]}}},
        {"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]},
    ],
)
def test_all_nodes_are_offered_to_a_pod_that_prefers_some(spec: Any) -> None:
    world, names = filled(300)

    verdict = world.filter("a", 1_000, " ".join(names), **spec)

    assert verdict.node_names == names


def test_a_node_with_devices_claimed_for_the_pod_is_offered_among_many() -> None:
    world, names = filled(300)

    verdict = world.filter("a", 1_000, " ".join(names), annotations={OFFER: "node-000@1"})

    assert "node-000" in verdict.node_names


def test_a_pod_is_read_anew_once_it_has_changed() -> None:
    world = ExtenderWorld()
    offered = [
        world.filter("a", mib, resource_version=version).node_names
        for mib, version in ((1_000, "1"), (90_000, "1"), (90_000, "2"))
    ]

    assert offered == [["n0", "n1", "n2"], ["n0", "n1", "n2"], []]


@pytest.mark.parametrize(
    ("spec", "way_out"),
    [
        ({}, "leave schedulerName out"),
        (
            {"volumes": [{"name": "v", "iscsi": {"x": "y"}}]},
            "a gang cannot have spec.volumes[0].iscsi",
        ),
    ],
)
def test_a_pod_of_a_gang_is_refused_with_the_way_out(spec: dict[str, Any], way_out: str) -> None:
    annotations = {"scheduling.k8s.io/group-name": "g"}

    verdict = ExtenderWorld().filter("a", 1_000, annotations=annotations, **spec)

    assert set(verdict.failed_and_unresolvable_nodes.values()) == {f"{GANG}: {way_out}"}


@pytest.mark.parametrize(
    ("volumes", "held_s"),
    [([], HOLD_S), ([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}], VOLUME_HOLD_S)],
)
def test_the_share_of_the_best_node_is_held_for_a_moment(volumes: Any, held_s: float) -> None:
    world = ExtenderWorld()
    world.extender.prioritize(args("a", 30_000, "n0 n1", volumes=volumes))

    during = world.filter("b", 30_000, "n0")
    world.clock.advance(held_s + 0.1)
    after = world.filter("b", 30_000, "n0")

    assert (during.node_names, after.node_names) == ([], ["n0"])


async def test_the_chosen_share_is_requested_from_a_binder() -> None:
    world = ExtenderWorld()
    world.filter("a", 1_000)

    assert await world.bind("a", "n1") == ""

    [request] = world.binders.requests
    assert request.queued.by_kube_scheduler
    assert request.placement.node == "n1"
    assert [share.memory_mib for share in request.placement.shares] == [1_000]


async def test_the_cpus_beside_the_gpu_are_held_and_requested() -> None:
    world = ExtenderWorld()
    name = numa_cpus_name(1)
    [device] = devices(1, "n1", numa=1, numa_cpus=5)
    world.mirror.put_node(
        LedgerNode(
            facts=facts("n1"), version=2, devices=((device, DeviceUse()),), served=(TRIGGER,)
        )
    )
    gpu = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "1000"}
    resources = {"limits": {"cpu": "3", "memory": "1Mi", **gpu}}
    containers = [{"name": "main", "resources": resources}]
    world.extender.prioritize(args("a", 0, "n1", containers=containers))

    assert world.mirror.nodes[NodeName("n1")].free_resources[name] == 2
    assert world.filter("b", 0, "n1", containers=containers).node_names == []
    assert await world.bind("a", "n1") == ""

    [request] = world.binders.requests
    assert request.placement.numa_cpus == {name: 3}


async def test_a_binder_gets_the_required_anti_affinity_of_the_pod() -> None:
    world = ExtenderWorld()
    noisy = {"matchLabels": {"app": "noisy"}}
    terms = [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": noisy},
        {"topologyKey": "zone", "labelSelector": noisy, "namespaceSelector": {"matchLabels": {}}},
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    world.filter("a", 1_000, affinity={"podAntiAffinity": required})

    assert await world.bind("a", "n1") == ""

    [request] = world.binders.requests
    assert [(each.topology_key, each.namespaces) for each in request.repels] == [
        ("kubernetes.io/hostname", ("default",)),
        ("zone", ()),
    ]
    assert [each.all_namespaces for each in request.repels] == [False, True]


async def test_what_is_held_is_requested_although_the_ledger_already_counts_it() -> None:
    world = ExtenderWorld()
    world.extender.prioritize(args("a", 30_000, "n0"))
    [device] = world.mirror.nodes[NodeName("n0")].devices
    use = DeviceUse(memory_mib=30_000, shares=1, fence=1)
    world.mirror.update_device_use(device.uuid, use)

    assert await world.bind("a", "n0") == ""

    [request] = world.binders.requests
    assert [share.memory_mib for share in request.placement.shares] == [30_000]


async def test_a_pod_that_another_replica_filtered_is_read() -> None:
    world = ExtenderWorld()
    world.pods.pods["a"] = args("a", 1_000).pod

    assert await world.bind("a", "n1") == ""
    assert "deleted" in await world.bind("b", "n1")


async def test_after_a_loss_of_the_share_others_of_the_node_are_tried_once() -> None:
    world = ExtenderWorld()
    world.filter("a", 1_000)
    refused = PodBindingReply(reason="n1: it has no room", no_capacity=True)
    world.binders.replies = [refused, refused]

    binding = asyncio.create_task(world.bind("a", "n1"))
    await until(lambda: world.clock.sleepers)
    world.clock.advance(AGAIN_S)

    assert await binding == "n1: it has no room"
    assert len(world.binders.requests) == 2


async def test_a_pod_with_a_lease_elsewhere_is_offered_that_node_only() -> None:
    world = ExtenderWorld()
    world.filter("a", 1_000)
    world.binders.replies = [PodBindingReply(reason="elsewhere", node=NodeName("n2"))]

    assert await world.bind("a", "n1") == "elsewhere"

    assert world.filter("a", 1_000).node_names == ["n2"]


async def test_an_exceeded_quota_refuses_until_something_is_freed() -> None:
    world = ExtenderWorld()
    world.filter("a", 1_000)
    excess = QuotaExcess(measure="memoryMiB", limit=500, used=0, requested=1_000)
    world.binders.replies = [PodBindingReply(reason="quota", quotas=(excess,))]

    error = await world.bind("a", "n1")
    during = world.filter("a", 1_000)
    world.mirror.capacity += 1
    after = world.filter("a", 1_000)

    assert "the GPU quota of namespace default blocks the pod" in error
    assert set(during.failed_and_unresolvable_nodes.values()) == {error}
    assert after.node_names == ["n0", "n1", "n2"]


async def test_no_binder_is_an_error_and_holds_nothing() -> None:
    world = ExtenderWorld()
    world.filter("a", 30_000)
    world.binders.replies = [UnavailableError("no reply")]

    assert await world.bind("a", "n1") == "no reply"

    assert world.filter("b", 30_000).node_names == ["n0", "n1", "n2"]


async def test_a_refusal_is_published_when_its_reason_or_the_capacity_changes() -> None:
    world = ExtenderWorld()
    published = world.extender.filtered_out()
    for capacity in (1, 1, 2):
        world.mirror.capacity = capacity
        world.filter("a", 90_000)
    waiting = asyncio.ensure_future(anext(published))
    await until(lambda: world.clock.sleepers)
    world.clock.advance(FLUSH_S)
    [event] = await waiting

    assert event.capacity == 2
    assert event.refusal.counts == (("InsufficientGpuMemory", 3),)
    world.filter("a", 90_000)
    assert not world.extender._refused


def test_without_a_snapshot_there_is_no_verdict() -> None:
    verdict = ExtenderWorld(capacity=-1).filter("a", 1_000)

    assert "no snapshot of the ledger yet" in verdict.error


def test_a_configuration_that_sends_whole_nodes_is_named() -> None:
    world = ExtenderWorld()
    given = args("a", 1_000)

    verdict = world.extender.filter(ExtenderArgs(pod=given.pod, node_names=None))

    assert "nodeCacheCapable" in verdict.error


def test_another_schedulers_pod_is_refused() -> None:
    world = ExtenderWorld()
    given = args("a", 1_000, schedulerName="default-scheduler")

    verdict = world.extender.filter(given)

    [text] = set(verdict.failed_and_unresolvable_nodes.values())
    assert "default-scheduler is not leasehold-full" in text
