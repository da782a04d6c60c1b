"""Pods with mistakes, and a program that does what the hints about them say, literally."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jsonpatch
import msgspec

from services.watcher.pod_groups import PodGroupIndex
from services.webhook.pod_admission import DeviceMaximum
from shared.dialects.dialect import Rules
from shared.dialects.kai.elsewhere import as_resources
from shared.dialects.vocabulary import meant, request_one, unknown_gpus
from shared.kubernetes.types import ApiPod
from shared.model.budgets.charges import charge_of
from shared.model.budgets.quota import Quota, QuotaExcess, QuotaUsage
from shared.model.change import Hint, words
from shared.model.devices.device import DeviceMode
from shared.model.devices.node import Taint
from shared.model.errors import RequestError
from shared.model.leases.ledger import LedgerNode
from shared.model.names import Namespace
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import PodRequest
from shared.placing.explained import place_explained
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.placement import where_placed
from shared.placing.refusal.quota_refusals import PodOnNodes, QuotaRefusals, quota_hint
from shared.pods.manifest_patches import json_patch
from shared.pods.pod_parser import PodParser
from tests.support.build import (
    PLENTY,
    device,
    devices,
    dice,
    ledger_node,
    mig_layout,
    pod_queued,
    use,
)
from tests.support.placer.placing import index_of
from tests.support.placer.quotas import Team
from tests.support.webhook.reviews import applied, decided, reviewed

Pod = dict[str, Any]
SCHEDULERS = frozenset(
    {"leasehold", "volcano", "koord-scheduler", "hami-scheduler", "kai-scheduler"}
)
SERVED = (
    *("volcano.sh/vgpu-number", "volcano.sh/gpu-number", "tencent.com/vcuda-core"),
    *("nvidia.com/gpu", "koordinator.sh/gpu.shared", "leasehold.dev/share"),
)
Limits = dict[str, str]
NVIDIA = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}
VGPU = {
    "volcano.sh/vgpu-number": "1",
    "volcano.sh/vgpu-memory": "3000",
    "volcano.sh/vgpu-cores": "30",
}
KOORDINATOR = {
    "koordinator.sh/gpu.shared": "1",
    "koordinator.sh/gpu-core": "50",
    "koordinator.sh/gpu-memory": "3000Mi",
}
TENCENT = {"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "12"}
RIGHT: tuple[Limits, ...] = (
    NVIDIA,
    {"nvidia.com/gpu": "2"},
    {"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "20"},
    VGPU,
    {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory-percentage": "20"},
    {"volcano.sh/gpu-memory": "3000"},
    {"volcano.sh/gpu-number": "1"},
    KOORDINATOR,
    {"koordinator.sh/gpu": "50"},
    {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory-ratio": "50"},
    TENCENT,
    {"tencent.com/vcuda-core": "100"},
)
"""What pods request without a mistake, in the words of every system."""
T4_MIB = 15360
NAMESPACE = Namespace("team-a")
LARGEST = DeviceMaximum(memory_mib=40960, memory_units=40960)
LABELS = {"koordinator.sh/gpu-isolation-provider": "HAMi-core"}
MOST_HINTS = 6
"""A pod with as many mistakes as a person makes at once runs before."""


@cache
def cluster(*taints: Taint) -> NodeIndex:
    """Return nodes on which nothing runs; no test reserves anything there."""
    return index_of(*nodes(*taints))


def occupied(*names: str, free_mib: int = 0) -> NodeIndex:
    """Return the same nodes, some of them with so much free memory on each device."""
    return index_of(
        *(full(node, free_mib) if node.facts.name in names else node for node in nodes())
    )


def serving(*names: str) -> NodeIndex:
    """Return the same nodes, whose agents serve only some resources."""
    return index_of(*(replace(node, served=names) for node in nodes()))


def full(node: LedgerNode, free_mib: int = 0) -> LedgerNode:
    held = ((device, use(device.memory_mib - free_mib)) for device, _ in node.devices)
    return replace(node, devices=tuple(held))


def nodes(*taints: Taint) -> list[LedgerNode]:
    layouts = (
        mig_layout("small", ("1g.5gb", 4864, 7)),
        mig_layout("mixed", ("3g.20gb", 19968, 2)),
        mig_layout("large", ("7g.40gb", 40192, 1)),
    )
    a100 = device(
        "GPU-b-0", 0, model="NVIDIA A100-SXM4-40GB", memory_mib=40960, mode=DeviceMode.MIG,
        layouts=layouts,
    )  # fmt: skip
    plenty = PLENTY | {"tencent.com/vcuda-memory": 4 * T4_MIB // 256}
    gpus = devices(4, "a", model="Tesla T4", memory_mib=T4_MIB)
    whole = device("GPU-c-0", 0, model="NVIDIA A100-SXM4-40GB", memory_mib=40960)
    return [
        ledger_node(
            name, *held, served=SERVED, allocatable=plenty,
            labels=LABELS | {"kubernetes.io/hostname": name}, taints=taints,
        )
        for name, held in (("a", gpus), ("b", (a100,)), ("c", (whole,)))
    ]  # fmt: skip


@dataclass(frozen=True)
class Followed:
    """A pod whose hints were followed until it ran, or until it can only wait."""

    pod: Pod
    hints: list[Hint] = field(default_factory=list)
    runs_as: PodRequest | None = None

    @property
    def request(self) -> PodRequest:
        """Return the request of a pod that runs."""
        assert self.runs_as is not None, f"no way out:\n  {self.trail}"
        return self.runs_as

    @property
    def waits(self) -> str:
        """Return for what a pod waits that its author cannot change, or an empty text."""
        if self.runs_as is not None:
            return ""
        kinds = [kind for kind, words in WAITS.items() if words in self.hints[-1].text.lower()]
        assert len(kinds) == 1, f"no way out:\n  {self.trail}"
        return kinds[0]

    @property
    def trail(self) -> str:
        return "\n  ".join(hint.text for hint in self.hints)


WAITS = {
    "held by others": "wait until other pods of namespace team-a have ended",
    "full": "wait until pods have ended where the quota allows the pod",
    "forbidden": "waiting does not help: ask an administrator to raise its gpuquota",
    "the least": "the pod cannot request so little: ask an administrator",
    "no budget": "`leasehold budget team-a` shows why, and until when",
}
"""Hints without a change, in small letters: no manifest of the pod would run."""


def follow(pod: Pod, *taints: Taint, **circumstances: Any) -> Followed:
    """Do what the hints about a pod say until it is placed. Fails at a circle and at a dead end."""
    followed = follow_or_wait(pod, *taints, **circumstances)
    assert followed.request
    return followed


def follow_or_wait(
    pod: Pod,
    *taints: Taint,
    team: Team | None = None,
    index: NodeIndex | None = None,
    **facts: Any,
) -> Followed:
    """Do what the hints about a pod say until it is placed, or one of `WAITS` is all they say.

    `facts` are what else admission knows, such as its namespace's `budget`.
    """
    index = index or cluster(*taints)
    hints: list[Hint] = []
    while len(hints) <= MOST_HINTS:
        outcome = _try(pod, index, team, **facts)
        if isinstance(outcome, PodRequest):
            return Followed(pod, hints, outcome)
        trail = "\n  ".join([*(hint.text for hint in hints), outcome.text])
        assert outcome.text not in {hint.text for hint in hints}, f"a circle:\n  {trail}"
        hints.append(outcome)
        if not outcome.changes:
            waiting = Followed(pod, hints)
            assert waiting.waits
            return waiting
        for change in outcome.changes:
            parts = re.split(r"[.\[\]]", change.name)
            assert any(part and part in outcome.text for part in parts), (
                f"{words((change,))} is not in {outcome.text!r}"
            )
        operations = msgspec.to_builtins(json_patch(pod, outcome.changes))
        assert operations, f"nothing changes:\n  {trail}"
        pod = jsonpatch.apply_patch(pod, operations)
    raise AssertionError("too many hints:\n  " + "\n  ".join(hint.text for hint in hints))


def _try(pod: Pod, index: NodeIndex, team: Team | None, **facts: Any) -> PodRequest | Hint:
    """Return the request of a pod that runs, or what is said about it."""
    try:
        decision = decided(pod, largest=LARGEST, **facts)
    except RequestError as error:
        return Hint(str(error), error.changes)
    if not decision.allowed:
        return Hint(decision.message, decision.changes)
    if decision.changes:
        return Hint("; ".join(decision.warnings), decision.changes)
    if not decision.requests_gpu:
        return _without_gpu(pod)
    request = _request(applied(pod, decision))
    return _place(request, index, team or Team(Quota(namespace=NAMESPACE)))


def _place(request: PodRequest, index: NodeIndex, team: Team) -> PodRequest | Hint:
    """Place a pod as a placer does: what the quota refuses is tried elsewhere."""
    refusals = QuotaRefusals()
    pods = request.gang.min_member if request.gang else 1
    event = replace(pod_queued("p", request), namespace=NAMESPACE)
    excesses: list[QuotaExcess] = []
    others: list[Refusal | None] = []

    def place(wanted: PodRequest) -> tuple[Placement, ...] | Refusal:
        result = place_explained(wanted, index, dice())
        others.append(result if isinstance(result, Refusal) else None)
        return result

    for _ in range(MOST_HINTS):
        others.append(None)
        answer = (
            refusals.place_within(event, place, index, where_placed)
            if refusals.has_refused(event)
            else place(request)
        )
        if isinstance(answer, Refusal):
            if not excesses:
                advice = index.explanations[placement_key(request)].advice
                return Hint(answer.text, advice.changes)
            hint = quota_hint(
                NAMESPACE, excesses, others[-1], PodOnNodes(request, index, where_placed)
            )
            assert hint.text == answer.hint
            return Hint(answer.text, hint.changes)
        facts = index.mirror.nodes[answer[0].node].facts
        beyond = team.excesses(answer[0].shares, facts, pods)
        if not beyond:
            return request
        excesses += beyond
        refusals.add(event, beyond, 0)
    raise AssertionError(f"placed again and again beyond its quota: {excesses}")


def _without_gpu(pod: Pod) -> Hint:
    """Return what `explain` says about a pod that is none of Leasehold's."""
    for container in reviewed(pod).containers:
        for name in unknown_gpus(container.amounts):
            instead = meant(name, container.amounts[name], container.name)
            if instead is not None:
                return Hint(f"{name}: {instead.text}", instead.changes)
    container = reviewed(pod).containers[0]
    if (instead := as_resources(reviewed(pod))) is not None:
        return instead
    return request_one(container.zeros, container.name)


def _request(pod: Pod) -> PodRequest:
    meta = {"name": "p", "namespace": "team-a", "uid": "u", "resourceVersion": "1"}
    written = copy.deepcopy(pod)
    written["metadata"] = pod["metadata"] | meta
    observed = PodParser(SCHEDULERS, Rules()).parse(msgspec.convert(written, ApiPod))
    in_gang = PodGroupIndex().with_gang(observed) or observed
    assert in_gang.request is not None, in_gang.request_error
    assert in_gang.request.containers, "the pod would run without a GPU"
    return in_gang.request


def domains(texts: Mapping[str, object]) -> set[str]:
    """Return the prefixes of keys; both that Koordinator had are one."""
    return {key.partition("/")[0].replace("kubernetes.io", "koordinator.sh") for key in texts}


def added_names(hints: Sequence[Hint]) -> Iterator[str]:
    for hint in hints:
        yield from (change.name for change in hint.changes if change.value and "/" in change.name)


def charge(request: PodRequest) -> QuotaUsage:
    """Return what a pod counts for a quota where a placer places it in the cluster."""
    answer = place_explained(request, cluster(), dice())
    assert not isinstance(answer, Refusal), answer.text
    shares = answer[0].shares
    return charge_of(shares, {share.device: share.device_mib for share in shares})
