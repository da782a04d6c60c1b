"""What a refused pod's owner reads, and how nodes beside the common path are found."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model.budgets.quota import QuotaExcess
from shared.model.devices.node import AGENT_STARTING, AGENT_STOPPING, Taint
from shared.model.leases.ledger import LedgerNode
from shared.model.names import Namespace, NodeName
from shared.model.requests.placement import DeviceVerdict, NodeVerdict, Placement, Refusal
from shared.model.requests.request import (
    DeviceSelection,
    GpuRequest,
    NodeRequirements,
    NodeTerm,
    PodClaim,
    PodRequest,
    SharingPolicy,
    VolumeRequirement,
    VolumeRule,
)
from shared.placing.explained import place_explained
from shared.placing.index.node_index import NodeIndex
from shared.placing.refusal.quota_refusals import over_quota
from tests.support.build import V100_MIB, device, dice, gpu, ledger_node, request, use
from tests.support.effort import tries
from tests.support.placer.placing import Cluster, index_of, refused


def decision(wanted: PodRequest, index: NodeIndex) -> tuple[Placement, ...] | Refusal:
    return place_explained(wanted, index, dice(3))


def chosen(wanted: PodRequest, index: NodeIndex) -> list[str]:
    outcome = decision(wanted, index)
    return [] if isinstance(outcome, Refusal) else [placement.node for placement in outcome]


def test_reasons_are_counted_as_the_scheduler_counts_them() -> None:
    full = (device(), use(32000))
    tainted = Taint(key="key", value="value", effect="NoSchedule")

    refusal = refused(
        request(gpu(memory=1000)),
        ledger_node("n1", full),
        ledger_node("n2", full),
        ledger_node("n3", device(), taints=(tainted,)),
    )

    assert refusal.reason == (
        "0/3 nodes are available: 2 Insufficient GPU memory, "
        "1 node(s) had untolerated taint {key: value}."
    )
    assert refusal.counts == (("InsufficientGpuMemory", 2), ("UntoleratedTaint", 1))
    assert not refusal.permanent


def test_the_nearest_nodes_are_spelled_out_with_numbers_and_a_hint() -> None:
    refusal = refused(
        request(gpu(memory=5000)),
        ledger_node("far", (device("GPU-far"), use(32000))),
        ledger_node("near", (device("GPU-near", 3), use(30000))),
    )

    assert refusal.nearest_nodes[0] == NodeVerdict(
        node=NodeName("near"),
        reason="Insufficient GPU memory (1 GPU requested, 0 fit)",
        devices=(
            DeviceVerdict(
                device=device("GPU-near").uuid,
                index=3,
                reason="5000 MiB are requested, 2768 of 32768 MiB are free",
            ),
        ),
    )
    assert refusal.hint == (
        "in container main set volcano.sh/vgpu-memory: 2768, as node near has room for it now; or "
        "wait until pods on node near have ended"
    )


FULL = (device("GPU-full"), use(V100_MIB))
UNSERVED = ledger_node("a", device())
UNSERVED = replace(
    UNSERVED, facts=replace(UNSERVED.facts, unserved_resources=("volcano.sh/vgpu-number",))
)


RESTARTS = (
    "wait until the agent of node {} has registered with its kubelet, which takes seconds; if it "
    "lasts, have an administrator check that agent"
)
SICK = replace(device(), healthy=False, fault="XID 79 (the GPU has fallen off the bus)")
SHUT = ("volcano.sh/vgpu-number",)
IN_ZONE_A = NodeRequirements(selector=(("zone", "a"),))


def without_allocatable(node: LedgerNode) -> LedgerNode:
    """Return a node whose kubelet has none of the resource that its agent serves."""
    return replace(node, facts=replace(node.facts, unserved_resources=SHUT))


HINTS: dict[str, tuple[PodRequest, list[LedgerNode], str]] = {
    "only nodes that are blocked for that reason count": (
        request(gpu(memory=5000)),
        [
            ledger_node("full", (device("GPU-full"), use(30000))),
            ledger_node("closed", device("GPU-empty"), unschedulable=True),
        ],
        "in container main set volcano.sh/vgpu-memory: 2768, as node full has room for it now; "
        "or wait until pods on node full have ended",
    ),
    "fewer GPUs, on a node where they are free": (
        request(gpu(gpus=3, memory=5000)),
        [
            ledger_node("busy", device("GPU-a", 0), (device("GPU-b", 1), use(30000))),
            ledger_node("idle", device("GPU-c", 0), device("GPU-d", 1)),
        ],
        "waiting does not help: in container main set volcano.sh/vgpu-number: 2, as node idle has "
        "room for it now",
    ),
    "nobody is advised to request nothing": (
        request(gpu(memory=5000)),
        [ledger_node("full", FULL)],
        "wait until pods on node full have ended",
    ),
    "a device without a free slot": (
        request(gpu(memory=5000)),
        [ledger_node("full", FULL, (device("GPU-b", 1, slots=1), use(0, shares=1)))],
        "wait until pods on node full have ended",
    ),
    "a resource that is not served": (
        request(gpu(memory=1)),
        [ledger_node("n1", device(), served=())],
        "ask an administrator: run a node agent whose --systems and --gpu-strategy serve "
        "volcano.sh/vgpu-number; if one should, its log names what its kubelet cannot allocate",
    ),
    "an agent that has just started": (
        request(gpu(memory=1)),
        [ledger_node("n1", device(), served=(AGENT_STARTING,))],
        "wait until the kubelet of node n1 has listed its pods, at most 15 s after it started",
    ),
    "an agent that ends": (
        request(gpu(memory=1)),
        [ledger_node("n1", device(), served=(AGENT_STOPPING,))],
        RESTARTS.format("n1"),
    ),
    "an agent that is not registered, and another node": (
        request(gpu(memory=1), node_requirements=IN_ZONE_A),
        [
            without_allocatable(ledger_node("n1", device(), labels={"zone": "a"})),
            ledger_node("n2", device("b"), labels={"zone": "b"}),
        ],
        f"{RESTARTS.format('n1')}; or change the node selector zone to b, as node n2 has room for "
        "it now",
    ),
    "a node whose GPUs are all sick, and another node": (
        request(gpu(memory=1), node_requirements=IN_ZONE_A),
        [
            without_allocatable(ledger_node("n1", SICK, labels={"zone": "a"})),
            ledger_node("n2", device("b"), labels={"zone": "b"}),
        ],
        "ask an administrator: check node n1: device 0: XID 79 (the GPU has fallen off the bus). "
        "Its agent probes them again, and the pod gets one that has recovered; or change the node "
        "selector zone to b, as node n2 has room for it now",
    ),
    "a cordoned GPU, and another node": (
        request(gpu(memory=1), node_requirements=IN_ZONE_A),
        [
            ledger_node("n1", device(), labels={"zone": "a"}, excluded_devices=(0,)),
            ledger_node("n2", device("b"), labels={"zone": "b"}),
        ],
        "ask an administrator: uncordon a GPU of node n1 (`leasehold gpus` shows why it is "
        "cordoned); or change the node selector zone to b, as node n2 has room for it now",
    ),
    "a GPU by name whose agent ends, and another node": (
        request(gpu(memory=1), selection=DeviceSelection(uuids=("GPU-a",))),
        [
            ledger_node("n1", device("GPU-a"), served=(AGENT_STOPPING,)),
            ledger_node("n2", device("b")),
        ],
        f"{RESTARTS.format('n1')}; or remove the annotation volcano.sh/vgpu-use-gpuuuid, as node "
        "n2 (Tesla V100-SXM2-32GB) has room for it now",
    ),
    "memory without the trigger": (
        request(gpu(memory=1), triggers=("volcano.sh/gpu-memory",), dialect="volcano-gpushare"),
        [ledger_node("n1", device(), served=("leasehold.dev/share",))],
        "waiting does not help: in container main set leasehold.dev/share: 1, as node n1 has "
        "room for it now",
    ),
    "the trigger where units are served": (
        request(gpu(memory=1), triggers=("leasehold.dev/share",), dialect="volcano-gpushare"),
        [ledger_node("n1", device(), served=("volcano.sh/gpu-memory",))],
        "ask an administrator: start the node agent of node n1 with --gpu-strategy auto: it "
        "serves other resources than leasehold.dev/share, for clusters without the webhook",
    ),
    "a type that no node has": (
        request(gpu(memory=1), selection=DeviceSelection(types=("A100",))),
        [ledger_node("n1", device())],
        "waiting does not help: remove the annotation nvidia.com/use-gputype and remove the "
        "annotation nvidia.com/nouse-gputype, as node n1 (Tesla V100-SXM2-32GB) has room for "
        "it now",
    ),
    "a label that no node has, and no room": (
        request(gpu(memory=1), node_requirements=NodeRequirements(selector=(("zone", "x"),))),
        [ledger_node("n1", (device(), use(V100_MIB)), labels={"zone": "b"})],
        "waiting alone does not help: change the node selector zone to b, and wait until pods "
        "on node n1 have ended",
    ),
    "a taint": (
        request(gpu(memory=1)),
        [ledger_node("n1", device(), taints=(Taint(key="team", effect="NoSchedule", value="a"),))],
        "waiting does not help: tolerate the taint team=a:NoSchedule, as node n1 has room for "
        "it now",
    ),
    "a cordon": (
        request(gpu(memory=1)),
        [ledger_node("n1", device(), unschedulable=True)],
        "ask an administrator: kubectl uncordon n1",
    ),
    "a volume in another zone": (
        request(
            gpu(memory=1),
            node_requirements=NodeRequirements(
                volumes=(
                    VolumeRequirement(
                        rule=VolumeRule.NODE_AFFINITY,
                        terms=((NodeTerm(key="zone", operator="In", values=("b",)),),),
                    ),
                )
            ),
            claims=(PodClaim(name="data", bound=True), PodClaim(name="home", bound=True)),
        ),
        [ledger_node("n1", device(), labels={"zone": "a"})],
        "ask an administrator: add a node that reaches the volume of PersistentVolumeClaims data, "
        "home: `kubectl describe pv` shows its node affinity",
    ),
    "a claim that does not exist": (
        request(
            gpu(memory=1),
            node_requirements=NodeRequirements(
                waits_for='persistentvolumeclaim "home" not found: create it in namespace team'
            ),
        ),
        [ledger_node("n1", device())],
        "create it in namespace team",
    ),
    "no storage": (
        request(
            gpu(memory=1),
            node_requirements=NodeRequirements(
                volumes=(VolumeRequirement(rule=VolumeRule.STORAGE),)
            ),
            claims=(PodClaim(name="data", provisions=True),),
        ),
        [ledger_node("n1", device())],
        "ask an administrator: add storage for PersistentVolumeClaim data where nodes have room: "
        "`kubectl get csistoragecapacities -A` shows what is free",
    ),
    "a resource that no node has": (
        request(resources={"nvidia.com/GPU": 1}),
        [ledger_node("n1", device())],
        "no node of this cluster has nvidia.com/GPU: did you mean nvidia.com/gpu? Otherwise "
        "ask an administrator: add a node that has it",
    ),
    "a node without allocatable": (
        request(gpu(), triggers=("volcano.sh/vgpu-number",)),
        [UNSERVED],
        RESTARTS.format("a"),
    ),
}


@pytest.mark.parametrize(("wanted", "nodes", "hint"), HINTS.values(), ids=HINTS)
def test_a_hint_names_what_to_do(wanted: PodRequest, nodes: list[LedgerNode], hint: str) -> None:
    assert refused(wanted, *nodes).hint == hint


def test_the_text_of_a_refusal_consists_of_sentences() -> None:
    assert Refusal(reason="a", hint="b").text == "a. B."
    assert Refusal(reason="a.", hint="b?").text == "a. B?"
    assert Refusal(reason="", hint="b").text == "B."
    assert Refusal(reason="a").text == "a"


def test_all_gpus_of_a_node_are_sick_before_its_kubelet_has_none_to_allocate() -> None:
    node = without_allocatable(ledger_node("n1", SICK))

    refusal = refused(request(gpu(memory=1)), node)

    assert dict(refusal.counts) == {"GpuUnhealthy": 1}
    assert not refusal.permanent
    [verdict] = refusal.nearest_nodes
    assert [each.reason for each in verdict.devices] == [
        "it is unhealthy: XID 79 (the GPU has fallen off the bus)"
    ]


def test_gpus_whose_cores_shares_fill_are_not_said_to_be_in_exclusive_use() -> None:
    filled = ledger_node("n1", (device(), use(2000, 100, 2)))

    refusal = refused(request(gpu(memory=1, cores_percent=0)), filled)

    assert "node(s) had GPUs whose cores are all reserved" in refusal.reason
    assert refusal.nearest_nodes[0].devices[0].reason == "all of its cores are reserved"


@pytest.mark.parametrize(
    ("wanted", "permanent"),
    [
        (request(gpu(memory=40_000)), True),
        (request(gpu(memory=32_768)), False),
        (request(gpu(memory=1), resources={"cpu": 1_000_000}), True),
        (
            request(
                gpu(memory=1), node_requirements=NodeRequirements(unsupported=("podAffinity",))
            ),
            True,
        ),
        (request(gpu(memory=1), triggers=("volcano.sh/other",)), False),
    ],
)
def test_a_refusal_is_permanent_if_no_end_of_other_pods_helps(
    wanted: PodRequest, permanent: bool
) -> None:
    assert refused(wanted, ledger_node("n1", (device(), use(32768)))).permanent == permanent


def test_a_refusal_by_an_empty_cluster_is_not_permanent() -> None:
    refusal = refused(request(gpu(memory=1)))

    assert refusal.reason == "0/0 nodes are available: there is no node."
    assert not refusal.permanent


def test_details_of_a_refusal_follow_the_nodes_that_they_are_about() -> None:
    names = ("n1", "n2", "n3", "n4")
    devices = {name: device(f"GPU-{name}") for name in names}
    index = index_of(
        *(
            ledger_node(name, (devices[name], use(30_000 + 10 * at)))
            for at, name in enumerate(names)
        )
    )
    wanted = request(gpu(memory=20_000))
    fence = 1
    amounts = [29_000, 31_000, 28_000, 28_000, 29_500]

    for name, memory_mib in zip(("n1", "n1", "n4", "n2", "n2"), amounts, strict=True):
        before = decision(wanted, index)
        fence += 1
        index.mirror.update_device_use(devices[name].uuid, use(memory_mib, fence=fence))

        after = decision(wanted, index)

        assert after == decision(wanted, NodeIndex(index.mirror))
        assert after != before


def test_preferred_nodes_come_first_and_soft_taints_last() -> None:
    soft = Taint(key="slow", effect="PreferNoSchedule")
    index = index_of(
        ledger_node("soft", (device("GPU-1"), use(20000)), taints=(soft,)),
        ledger_node("plain", device("GPU-2")),
        ledger_node("liked", device("GPU-3"), labels={"zone": "a"}),
    )
    preference_weight = NodeRequirements(
        preferred=((10, (NodeTerm(key="zone", operator="Exists"),)),)
    )

    assert chosen(request(gpu(memory=1), node_requirements=preference_weight), index)[0] == "liked"
    assert chosen(request(gpu(memory=1)), index)[0] != "soft"


def test_a_node_with_free_cores_is_found_among_many_without() -> None:
    busy = [ledger_node(f"n{n}", (device(f"GPU-{n}"), use(20000 + n, 90))) for n in range(100)]
    index = index_of(*busy, ledger_node("calm", (device("GPU-c"), use(10, 10))))

    assert [chosen(request(gpu(memory=1, cores_percent=50)), index) for _ in range(3)] == [
        ["calm"]
    ] * 3


def test_a_node_without_allocatable_of_the_resource_gets_no_pod() -> None:
    served = ledger_node("a", device())
    without_agent = replace(
        served, facts=replace(served.facts, unserved_resources=("volcano.sh/vgpu-number",))
    )
    wanted = request(gpu(), triggers=("volcano.sh/vgpu-number",))

    restarted = replace(without_agent, newly_served=("volcano.sh/vgpu-number",))

    assert chosen(wanted, index_of(served)) == ["a"]
    assert dict(refused(wanted, without_agent).counts) == {"NodeAgentRestarting": 1}
    assert dict(refused(wanted, replace(served, served=())).counts) == {"ResourceNotServed": 1}
    assert chosen(wanted, index_of(restarted)) == ["a"]


def test_an_unhealthy_device_is_not_blamed_on_the_annotation_that_its_agent_wrote() -> None:
    sick = replace(device(), healthy=False, fault="XID 79 (the GPU has fallen off the bus)")

    refusal = refused(
        request(gpu(memory=5000)), ledger_node("n1", sick, excluded_devices=(sick.index,))
    )

    assert refusal.counts == (("GpuUnhealthy", 1),)
    [verdict] = refusal.nearest_nodes[0].devices
    assert verdict.reason == "it is unhealthy: XID 79 (the GPU has fallen off the bus)"
    assert refusal.hint == (
        "ask an administrator: check node n1: device 0: XID 79 (the GPU has fallen off the bus). "
        "Its agent probes them again, and the pod gets one that has recovered"
    )


def test_the_hint_names_the_faults_of_devices_and_no_pods_of_others() -> None:
    sick = replace(device(), healthy=False, fault="cordoned: XidError: Xid 94, memory error")
    unknown = replace(device("b", index=1), healthy=False, fault="pods team/a use parts of it")

    refusal = refused(request(gpu(memory=5000)), ledger_node("n1", sick, unknown))

    assert refusal.hint == (
        "ask an administrator: check node n1: device 0: cordoned: XidError: Xid 94, memory error; "
        "device 1: it is unhealthy. Its agent probes them again, and the pod gets one that has "
        "recovered"
    )
    assert [each.reason for each in refusal.nearest_nodes[0].devices] == [
        "it is unhealthy: cordoned: XidError: Xid 94, memory error",
        "it is unhealthy",
    ]


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        (
            (gpu("a", memory=9000), gpu("b", memory=9000)),
            "in container a set volcano.sh/vgpu-memory: 7312 and in container b set "
            "volcano.sh/vgpu-memory: 7312",
        ),
        (
            (gpu("a", memory=1, cores_percent=60), gpu("b", memory=1, cores_percent=60)),
            "in container a set volcano.sh/vgpu-cores: 48 and in container b set "
            "volcano.sh/vgpu-cores: 48",
        ),
        (
            tuple(gpu(name, memory=1) for name in "abc"),
            "raise --device-split-count of the agent of node n1",
        ),
        (
            (gpu("a", memory=1, sharing=SharingPolicy.EXCLUSIVE), gpu("b", memory=1)),
            "add a node that fits the pod",
        ),
        ((gpu(memory=16_000),), "in container main set volcano.sh/vgpu-memory: 15360"),
    ],
)
def test_a_pod_that_would_not_fit_an_empty_node_is_not_advised_to_wait(
    wanted: tuple[GpuRequest, ...], hint: str
) -> None:
    card = device(memory_mib=15_360, slots=2)
    for state, waiting in (
        (card, "waiting does"),
        ((card, use(4_000, 50, 1)), "waiting alone does"),
    ):
        refusal = refused(request(*wanted), ledger_node("n1", state))

        assert hint in refusal.hint
        assert refusal.hint.startswith((f"{waiting} not help: ", "ask an administrator: "))
        assert refusal.permanent


def test_containers_that_fit_side_by_side_on_an_idle_gpu_wait_for_it() -> None:
    card = device(memory_mib=15_360)
    pod = request(gpu("a", memory=7_000), gpu("b", memory=7_000))

    refusal = refused(pod, ledger_node("n1", (card, use(4_000))))

    assert not refusal.permanent
    assert refusal.hint.endswith("or wait until pods on node n1 have ended")
    assert refusal.nearest_nodes[0].devices[0].reason == (
        "7000 MiB are requested beside 7000 for earlier containers, 11360 of 15360 MiB are free"
    )


@pytest.mark.parametrize(
    ("excess", "hint"),
    [
        (
            QuotaExcess(measure="memoryMiB", limit=6_000, used=0, requested=6_001),
            "request at most 6000 MiB of GPU memory in the whole pod; or ask an administrator",
        ),
        (
            QuotaExcess(measure="milliGPU", limit=500, used=900, requested=600),
            "request at most 0.5 GPUs in the whole pod, and wait until other pods of ",
        ),
        (
            QuotaExcess(measure="pool", label="pool", values=("a",)),
            "ask an administrator to raise its GPUQuota",
        ),
    ],
)
def test_a_quota_that_an_empty_namespace_would_exceed_is_not_waited_for(
    excess: QuotaExcess, hint: str
) -> None:
    never = over_quota(Namespace("team"), [excess], None)
    later = QuotaExcess(measure="cores", limit=2, used=2, requested=1)

    assert never.hint.startswith(("waiting does not help: ", "waiting alone does not help: "))
    assert hint in never.hint
    assert over_quota(Namespace("team"), [later], None).hint == (
        "wait until other pods of namespace team have ended; or ask an administrator to raise its "
        "GPUQuota (kubectl get gpuquota team)"
    )


def test_too_little_cpu_of_an_empty_node_is_stated_as_what_it_has_in_all() -> None:
    node = ledger_node("n1", device(), allocatable={"cpu": 4_000, "pods": 10}, used={"cpu": 1_000})

    impossible = refused(request(gpu(memory=1), resources={"cpu": 5_000}), node)
    possible = refused(request(gpu(memory=1), resources={"cpu": 4_000}), node)

    assert impossible.hint == (
        "waiting alone does not help: request at most 4 of cpu in all containers together, and "
        "wait until pods on node n1 have ended"
    )
    assert possible.hint == (
        "request at most 3 of cpu in all containers together, as node n1 has room for it now; or "
        "wait until pods on node n1 have ended"
    )


def test_nodes_that_could_fit_are_nearer_than_those_that_never_can() -> None:
    small = device("GPU-small", memory_mib=15_360)
    large = device("GPU-large", memory_mib=40_960)

    refusal = refused(
        request(gpu(memory=30_000)),
        ledger_node("small", small),
        ledger_node("large", (large, use(39_000))),
    )

    assert [verdict.node for verdict in refusal.nearest_nodes] == ["large", "small"]
    assert not refusal.permanent
    assert "node large" in refusal.hint


@settings(deadline=None, max_examples=tries(60))
@given(
    st.lists(st.sampled_from([4_000, 9_000, 20_000]), min_size=1, max_size=3),
    st.lists(st.sampled_from([8_000, 16_000, 30_000]), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_a_hint_to_wait_is_given_only_where_an_empty_cluster_fits_the_pod(
    sizes: list[int], cards: list[int], used: list[int]
) -> None:
    wanted = request(*(gpu(f"c{n}", memory=mib) for n, mib in enumerate(sizes)))
    devices = [device(f"GPU-{n}", memory_mib=mib) for n, mib in enumerate(cards)]

    outcome = Cluster(
        *(
            ledger_node(f"n{n}", (card, use(used[n] * card.memory_mib // 3)))
            for n, card in enumerate(devices)
        )
    ).place(wanted)

    empty = Cluster(*(ledger_node(f"n{n}", each) for n, each in enumerate(devices))).place(wanted)
    if isinstance(outcome, Refusal):
        assert outcome.permanent == isinstance(empty, Refusal)
        assert ("not help" in outcome.hint) == outcome.permanent
