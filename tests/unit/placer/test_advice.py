"""Whoever does what a hint says gets a pod that runs: over random clusters, pods and dialects."""

import copy
import re
from dataclasses import replace
from itertools import cycle
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.placer.rounds.decisions import DecisionContext
from services.placer.rounds.gang_decisions import decide_gang
from services.placer.rounds.refusal_texts import gang_does_not_fit
from shared.dialects.dialect import PodManifest, Rules
from shared.kubernetes.types import ApiPod
from shared.model.change import Change, Place
from shared.model.devices.device import DeviceMode, DeviceUse, Isolation
from shared.model.devices.node import Taint
from shared.model.leases.ledger import LedgerNode
from shared.model.requests.placement import Refusal
from shared.model.requests.request import Gang, PodRequest, Term
from shared.placing.advice import Advice
from shared.placing.explained import place_explained
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.placement import place
from shared.pods.pod_parser import PodParser
from tests.support.build import device, dice, ledger_node, mig_layout, pod_queued, use
from tests.support.choices import among
from tests.support.dialects import mixes
from tests.support.effort import tries
from tests.support.placer.placing import index_of

Pod = dict[str, Any]
SCHEDULERS = frozenset({"leasehold", "volcano", "koord-scheduler", "hami-scheduler", "default"})
TAINTS = (
    Taint(key="team", value="a", effect="NoSchedule"),
    Taint(key="node.kubernetes.io/unreachable", effect="NoExecute"),
)
ISOLATED = {"koordinator.sh/gpu-isolation-provider": "HAMi-core"}
SERVED = (
    *("volcano.sh/vgpu-number", "volcano.sh/gpu-number", "tencent.com/vcuda-core"),
    *("nvidia.com/gpu", "koordinator.sh/gpu.shared", "leasehold.dev/share"),
)
STRICT = "strict"
"""A namespace whose pods have strict isolation."""
MODELS = ("Tesla T4", "NVIDIA A100-SXM4-40GB")
LAYOUTS = (mig_layout("small", (700, 3)), mig_layout("mixed", (1500, 1), (700, 2)))
CHOICES: tuple[dict[str, str], ...] = (
    {},
    {"nvidia.com/use-gputype": "A100", "nvidia.com/nouse-gputype": "T4"},
    {"nvidia.com/nouse-gputype": "T4,A100"},
    {"nvidia.com/use-gpuuuid": "GPU-n0-0"},
    {"volcano.sh/vgpu-nouse-gpuuuid": "GPU-n0-0"},
    {"nvidia.com/numa-bind": "true"},
    {"leasehold.dev/isolation": "strict"},
    {
        "scheduling.koordinator.sh/device-allocate-hint": '{"gpu": {"requiredTopologyScope": '
        '"NUMANode", "selector": {"matchLabels": {"node.koordinator.sh/gpu-model": "A30"}}}}'
    },
    {
        "scheduling.k8s.io/group-name": "g",
        "volcano.sh/vgpu-podgroup-policy": "spread",
    },
)


LABELS = st.sampled_from([{}, ISOLATED, ISOLATED | {"zone": "a"}, {"zone": "b"}])
ANNOTATIONS = st.sampled_from(CHOICES)
SELECTORS = st.sampled_from([{}, {}, {}, {"zone": "a"}, {"zone": "c", "x": ""}])


@st.composite
def _uses(draw: Any, memory_mib: int) -> DeviceUse:
    share = draw(among(0, 0, 10, 50, 90, 99, 100))
    if not share:
        return DeviceUse()
    tags = draw(among((), (), ("ns/g",)))
    cores = draw(among(0, 30, 99, 100))
    return use(memory_mib * share // 100, cores, 1, 1, *tags)


@st.composite
def _nodes(draw: Any, name: str) -> LedgerNode:
    unit = draw(among(1, 1, 1, 10))
    mode = draw(among(DeviceMode.HAMI_CORE, DeviceMode.HAMI_CORE, DeviceMode.MIG))
    cards = [
        device(
            f"GPU-{name}-{index}",
            index,
            memory_mib=draw(among(1000, 2000, 3000)),
            unit_mib=unit,
            slots=draw(among(1, 10)),
            healthy=draw(st.integers(0, 7)) > 0,
            model=draw(among(*MODELS)),
            mode=mode,
            layouts=LAYOUTS if mode is DeviceMode.MIG else (),
            numa=draw(among(None, 0, 1)),
            isolation=draw(among(*3 * [Isolation.SHARED], *Isolation)),
        )
        for index in range(draw(among(0, 1, 2, 2, 3, 4)))
    ]
    return ledger_node(
        name,
        *(
            (card, draw(_uses(card.memory_mib)) if mode is DeviceMode.HAMI_CORE else DeviceUse())
            for card in cards
        ),
        labels=draw(LABELS),
        taints=draw(among((), (), (), (), TAINTS[:1], TAINTS[:1], TAINTS)),
        unschedulable=draw(st.integers(0, 15)) == 0,
        allocatable={
            "cpu": draw(among(2_000, 8_000)),
            "memory": 2**33,
            "pods": 9,
            "tencent.com/vcuda-memory": sum(card.memory_mib for card in cards) // 256,
        },
        used={"cpu": draw(among(0, 1_500))},
        excluded_devices=draw(among((), (), (0,))),
        served=draw(among(*8 * [SERVED], SERVED[:1], ("volcano.sh/gpu-memory",))),
    )


@st.composite
def clusters(draw: Any) -> list[LedgerNode]:
    return [draw(_nodes(f"n{number}")) for number in range(draw(st.integers(1, 4)))]


@st.composite
def pods(draw: Any) -> Pod:
    """A manifest in any dialect, with requirements on nodes and devices."""
    made: PodManifest = draw(mixes.mixed).manifest
    notes = {**made.annotations, **draw(ANNOTATIONS)}
    containers: list[Any] = [
        {
            "name": each.name,
            **({"restartPolicy": "Always"} if each.sidecar else {}),
            "resources": {"limits": {name: str(amount) for name, amount in each.limits.items()}},
        }
        for each in made.containers
    ]
    containers[-1]["resources"]["limits"]["cpu"] = draw(among("100m", "1", "3"))
    inits = sum(each.init for each in made.containers)
    spec = {
        "schedulerName": made.scheduler or "leasehold",
        "containers": containers[inits:],
        "initContainers": containers[:inits],
        "nodeSelector": draw(SELECTORS),
        "tolerations": [],
    }
    if draw(st.integers(0, 7)) == 0:
        term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["d"]}]}
        required = {"nodeSelectorTerms": [term]}
        affinity = {"requiredDuringSchedulingIgnoredDuringExecution": required}
        spec["affinity"] = {"nodeAffinity": affinity}
    namespace = draw(among("ns", "ns", "ns", STRICT))
    meta = {"name": "p", "namespace": namespace, "uid": "u", "resourceVersion": "1"}
    return {"metadata": {**meta, "annotations": notes}, "spec": spec}


def read(pod: Pod) -> PodRequest | None:
    """The request as a watcher reads it, or None if it is invalid."""
    parser = PodParser(SCHEDULERS, Rules(strict_namespaces=(STRICT,)))
    return parser.parse(msgspec.convert(pod, ApiPod)).request


def emptied(nodes: list[LedgerNode]) -> list[LedgerNode]:
    return [
        replace(node, used={}, devices=tuple((card, DeviceUse()) for card, _ in node.devices))
        for node in nodes
    ]


def runs(pod: Pod, nodes: list[LedgerNode]) -> bool:
    request = read(pod)
    if request is None:
        return False
    return not isinstance(place(request, index_of(*nodes), dice()), NoFit)


def advice_of(request: PodRequest, index: NodeIndex) -> Advice:
    return index.explanations[placement_key(request)].advice


def changed(pod: Pod, changes: tuple[Change, ...]) -> Pod:
    """Do what the hint says, and nothing else."""
    pod = copy.deepcopy(pod)
    spec = pod["spec"]
    notes = pod["metadata"]["annotations"]
    containers = [*spec["initContainers"], *spec["containers"]]
    for change in changes:
        target: dict[str, Any] = {}
        match change.place:
            case Place.RESOURCE:
                [named] = [each for each in containers if each["name"] == change.container]
                target = named["resources"]["limits"]
            case Place.TOTAL:
                limits = [each["resources"]["limits"] for each in containers]
                [*whole, target] = [each for each in limits if change.name in each]
                if whole:
                    lower_beside_whole_gpus([*whole, target], change)
                    continue
            case Place.ANNOTATION:
                target = notes
            case Place.SELECTOR:
                target = spec["nodeSelector"]
            case Place.TOLERATION:
                value, _, effect = change.value.partition(":")
                spec["tolerations"] += [{"key": change.name, "value": value, "effect": effect}]
                continue
            case Place.FIELD:
                del spec["affinity"]
                continue
        if change.value:
            target[change.name] = change.value
        else:
            target.pop(change.name, None)
    return pod


def lower_beside_whole_gpus(limits: list[dict[str, str]], change: Change) -> None:
    """Take away as much memory beside whole GPUs, where it has no effect, as the total requires."""
    excess = sum(int(each[change.name]) for each in limits) - int(change.value)
    for each in limits:
        if int(each["tencent.com/vcuda-core"]) >= 100:
            less = min(excess, int(each[change.name]))
            each[change.name] = str(int(each[change.name]) - less)
            excess -= less
    assert excess <= 0


ONE = (
    *("nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores"),
    *("volcano.sh/vgpu-memory", "volcano.sh/vgpu-memory-percentage", "volcano.sh/vgpu-cores"),
    *("volcano.sh/gpu-memory", "volcano.sh/gpu-number", "volcano.sh/vgpu-number"),
    *("tencent.com/vcuda-memory", "nvidia.com/gpu", "koordinator.sh/gpu.shared"),
    *("koordinator.sh/gpu-core", "koordinator.sh/gpu-memory-ratio"),
)
LEAST = dict.fromkeys(ONE, "1") | {"koordinator.sh/gpu-memory": "1Mi", "cpu": "1m"}


def least(pod: Pod) -> Pod:
    """The same pod with the least of everything that it requests, and no choice of nodes."""
    pod = copy.deepcopy(pod)
    spec = pod["spec"]
    for container in (*spec["initContainers"], *spec["containers"]):
        limits = container["resources"]["limits"]
        limits |= {name: LEAST[name] for name in limits if name in LEAST}
        core = "tencent.com/vcuda-core"
        if core in limits:
            limits[core] = "1" if int(limits[core]) < 100 else "100"
    spec |= {"nodeSelector": {}, "tolerations": [{"key": "team", "operator": "Exists"}]}
    spec.pop("affinity", None)
    notes = pod["metadata"]["annotations"]
    # The ledger does not know whether these are the pod's own, or an administrator's.
    kept = {"leasehold.dev/isolation", "hami.io/gpu-scheduler-policy"}
    pod["metadata"]["annotations"] = {key: notes[key] for key in kept & notes.keys()}
    return pod


def node_of_blocks(blocks: int, *memory_mib: int) -> LedgerNode:
    """A node with such GPUs, and so many blocks of 256 MiB in its status."""
    cards = [device(f"GPU-{n}", n, memory_mib=mib) for n, mib in enumerate(memory_mib)]
    allocatable = {"cpu": 8_000, "pods": 9, "tencent.com/vcuda-memory": blocks}
    known = [(card, DeviceUse()) for card in cards]
    return ledger_node("n0", *known, allocatable=allocatable, served=SERVED)


def vcuda_pod(core: int, memory: int) -> Pod:
    amounts = {"tencent.com/vcuda-core": str(core), "tencent.com/vcuda-memory": str(memory)}
    container = {"name": "c0", "resources": {"limits": amounts}}
    spec = {"containers": [container], "initContainers": [], "nodeSelector": {}, "tolerations": []}
    meta = {"name": "p", "namespace": "ns", "uid": "u", "resourceVersion": "1", "annotations": {}}
    return {"metadata": meta, "spec": {"schedulerName": "leasehold", **spec}}


def nearly_full() -> LedgerNode:
    """A node whose GPU has 500 MiB left beside another pod."""
    node = node_of_blocks(12, 3000)
    [(card, _)] = node.devices
    return replace(node, devices=((card, use(2500, 10, 1, 1)),))


def whole_mutex_pod() -> Pod:
    pod = vcuda_pod(100, 1)
    pod["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1"}
    pod["metadata"]["annotations"] = {"hami.io/gpu-scheduler-policy": "mutex"}
    return pod


def reads_more_annotations(request: PodRequest, followed: Pod) -> bool:
    """Whether a pod in another system's words chooses GPUs by annotations without effect before."""
    now = read(followed)
    assert now is not None
    return now.dialect != request.dialect and now.selection != request.selection


def hint_of(pod: Pod, nodes: list[LedgerNode]) -> str:
    """Return the hint of a pod that does not run; empty if it does."""
    request = read(pod)
    assert request is not None
    answer = place_explained(request, index_of(*nodes), dice())
    return answer.hint if isinstance(answer, Refusal) else ""


@settings(max_examples=max(tries(400), settings().max_examples), deadline=None)
@given(clusters(), pods())
@example([node_of_blocks(3, 1000)], vcuda_pod(200, 4))  # the node has too few blocks, too
@example([node_of_blocks(3, 1000)], vcuda_pod(50, 8))
@example([node_of_blocks(2, 3000)], vcuda_pod(50, 20))
@example([nearly_full()], whole_mutex_pod())  # a part would need an idle GPU, too
def test_whoever_does_what_the_hint_says_gets_a_pod_that_runs(
    nodes: list[LedgerNode], pod: Pod
) -> None:
    request = read(pod)
    if request is None:
        return
    index = index_of(*nodes)
    answer = place_explained(request, index, dice())
    if not isinstance(answer, Refusal):
        return

    advice = advice_of(request, index)

    assert answer.hint == advice.text
    if advice.changes:
        followed = changed(pod, advice.changes)
        there = emptied(nodes) if advice.ends else nodes
        if reads_more_annotations(request, followed):
            assert advice.text not in hint_of(followed, there)
        else:
            assert runs(followed, there)
    if advice.waiting:
        assert runs(pod, emptied(nodes))
    if advice.administrator:
        assert not runs(least(pod), emptied(nodes))


@settings(max_examples=tries(300), deadline=None)
@given(clusters(), st.lists(pods(), min_size=1, max_size=2), st.integers(2, 4))
@example([nearly_full()], [vcuda_pod(50, 8), vcuda_pod(50, 7)], 2)
def test_a_gang_with_the_minimum_that_its_hint_names_runs(
    nodes: list[LedgerNode], written: list[Pod], size: int
) -> None:
    requests = [request for request in map(read, written) if request is not None]
    if not requests:
        return
    gang = Gang(name="ns/g", min_member=size)
    members = [
        pod_queued(f"m{n}", structs.replace(request, gang=gang))
        for n, request in zip(range(size), cycle(requests), strict=False)
    ]
    decision = decide_gang(members, size, context_of(nodes))
    if decision.refusal is None:
        return

    refusal = gang_does_not_fit(gang, live=0, decision=decision, refusal=decision.refusal)

    lowered = re.search(r"lower the gang's minimum to (\d+)", refusal.hint)
    if lowered is not None:
        assert decide_gang(members, int(lowered[1]), context_of(nodes)).refusal is None
    else:
        assert decide_gang(members, 1, context_of(nodes)).refusal is not None
    if refusal.hint.startswith("waiting does not help: if no other pod ran"):
        assert decide_gang(members, size, context_of(emptied(nodes))).refusal is not None
    if refusal.hint.endswith("wait until other pods have ended"):
        assert decide_gang(members, size, context_of(emptied(nodes))).refusal is None


@pytest.mark.parametrize(
    ("blocks", "unsure"), [((5, 5), ""), ((5, 4), ", which may not be enough, as its pods differ")]
)
def test_a_gang_whose_pods_differ_is_not_promised_that_waiting_is_enough(
    blocks: tuple[int, int], unsure: str
) -> None:
    gang = Gang(name="ns/g", min_member=2)
    requests = [read(vcuda_pod(50, each)) for each in blocks]
    members = [
        pod_queued(f"m{n}", structs.replace(request, gang=gang))
        for n, request in enumerate(requests)
        if request is not None
    ]
    decision = decide_gang(members, 2, context_of([nearly_full()]))
    assert decision.refusal is not None

    refusal = gang_does_not_fit(gang, live=0, decision=decision, refusal=decision.refusal)

    assert refusal.hint == f"wait until other pods have ended{unsure}"


def context_of(nodes: list[LedgerNode], now: float = inf) -> DecisionContext:
    return DecisionContext(index_of(*nodes), dice(), now=lambda: now)


NOW = 1_800_000_000
WHOLE = vcuda_pod(100, 1)


def claimed(nodes: list[LedgerNode], until: list[int]) -> list[LedgerNode]:
    """The same nodes, with devices reserved for planned starts so many seconds from now; 0: not."""
    after = cycle(until)

    def reserved(used: DeviceUse) -> DeviceUse:
        seconds = next(after)
        if not seconds or used.layout:
            return used
        return structs.replace(used, exclusive=True, claimed_by=True, claimed_until=NOW + seconds)

    return [
        replace(node, devices=tuple((card, reserved(used)) for card, used in node.devices))
        for node in nodes
    ]


@settings(max_examples=tries(150), deadline=None)
@given(clusters(), pods(), st.lists(st.sampled_from([0, 100, 900, 9000]), min_size=1, max_size=4))
@example([node_of_blocks(9, 1000)], WHOLE, [9000])
def test_who_sets_the_run_time_of_a_hint_gets_reserved_devices(
    nodes: list[LedgerNode], pod: Pod, until: list[int]
) -> None:
    request = read(pod)
    reserved = claimed(nodes, until)
    if request is None:
        return
    found = context_of(reserved, NOW).choose(pod_queued("m", request))
    hint = found.hint if isinstance(found, Refusal) else ""
    named = re.search(r"set spec.activeDeadlineSeconds to (\d+) or less", hint)
    event(f"names a run time: {named is not None}")
    assert (named is not None) >= (pod is WHOLE)
    if named is not None:
        ending = structs.replace(request, term=Term(max_run_s=int(named[1])))
        placed = context_of(reserved, NOW).choose(pod_queued("m", ending))
        assert not isinstance(placed, Refusal)


@pytest.mark.parametrize(
    ("term", "named"),
    [(Term(), True), (Term(max_run_s=86_400), True), (Term(runs_on=True), False)],
)
def test_a_shorter_run_time_is_named_only_to_pods_that_can_end(term: Term, named: bool) -> None:
    request = read(WHOLE)
    assert request is not None
    nodes = claimed([node_of_blocks(9, 1000)], [9000])

    found = context_of(nodes, NOW).choose(pod_queued("m", structs.replace(request, term=term)))

    assert isinstance(found, Refusal)
    assert ("set spec.activeDeadlineSeconds to 7680 or less" in found.hint) is named
