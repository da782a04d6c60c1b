"""Pods with mistakes, and a program that does what the hints about them say, literally."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonpatch
import msgspec

from services.webhook.pod_admission import DeviceMaximum
from shared.dialects.dialect import Rules
from shared.dialects.kai.elsewhere import as_resources
from shared.dialects.vocabulary import meant, request_one, unknown_gpus
from shared.kubernetes.types import ApiPod
from shared.model.budgets.quota import Quota
from shared.model.change import Hint, words
from shared.model.devices.device import DeviceMode
from shared.model.devices.node import Taint
from shared.model.errors import RequestError
from shared.model.requests.placement import Refusal
from shared.model.requests.request import PodRequest
from shared.placing.explained import place_explained
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.pods.manifest_patches import json_patch
from shared.pods.pod_parser import PodParser
from tests.support.build import PLENTY, device, devices, dice, ledger_node, mig_layout
from tests.support.placer.placing import index_of
from tests.support.webhook.reviews import applied, decided, reviewed

Pod = dict[str, Any]
SCHEDULERS = frozenset({"leasehold", "volcano", "koord-scheduler", "hami-scheduler"})
SERVED = (
    *("volcano.sh/vgpu-number", "volcano.sh/gpu-number", "tencent.com/vcuda-core"),
    *("nvidia.com/gpu", "koordinator.sh/gpu.shared", "leasehold.dev/share"),
)
T4_MIB = 15360
LARGEST = DeviceMaximum(memory_mib=40960, memory_units=40960)
LABELS = {"koordinator.sh/gpu-isolation-provider": "HAMi-core"}
MOST_HINTS = 6
"""A pod with as many mistakes as a person makes at once runs before."""


def cluster(*taints: Taint) -> NodeIndex:
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
    nodes = [
        ledger_node(
            name, *held, served=SERVED, allocatable=plenty,
            labels=LABELS | {"kubernetes.io/hostname": name}, taints=taints,
        )
        for name, held in (("a", gpus), ("b", (a100,)), ("c", (whole,)))
    ]  # fmt: skip
    return index_of(*nodes)


@dataclass(frozen=True)
class Followed:
    """A pod whose hints were followed until it ran."""

    request: PodRequest
    hints: list[Hint] = field(default_factory=list)


def follow(pod: Pod, *taints: Taint, quota: Quota | None = None) -> Followed:
    """Do what the hints about a pod say until it is placed. Fails at a circle and at a dead end."""
    index = cluster(*taints)
    hints: list[Hint] = []
    while len(hints) <= MOST_HINTS:
        outcome = _try(pod, index, quota)
        if isinstance(outcome, PodRequest):
            return Followed(outcome, hints)
        trail = "\n  ".join([*(hint.text for hint in hints), outcome.text])
        assert outcome.text not in {hint.text for hint in hints}, f"a circle:\n  {trail}"
        assert outcome.changes, f"no way out:\n  {trail}"
        for change in outcome.changes:
            parts = re.split(r"[.\[\]]", change.name)
            assert any(part and part in outcome.text for part in parts), (
                f"{words((change,))} is not in {outcome.text!r}"
            )
        hints.append(outcome)
        operations = msgspec.to_builtins(json_patch(pod, outcome.changes))
        assert operations, f"nothing changes:\n  {trail}"
        pod = jsonpatch.apply_patch(pod, operations)
    raise AssertionError("too many hints:\n  " + "\n  ".join(hint.text for hint in hints))


def _try(pod: Pod, index: NodeIndex, quota: Quota | None) -> PodRequest | Hint:
    """Return the request of a pod that runs, or what is said about it."""
    try:
        decision = decided(pod, largest=LARGEST, quota=quota)
    except RequestError as error:
        return Hint(str(error), error.changes)
    if not decision.allowed:
        return Hint(decision.message, decision.changes)
    if decision.changes:
        return Hint("; ".join(decision.warnings), decision.changes)
    if not decision.requests_gpu:
        return _without_gpu(pod)
    request = _request(applied(pod, decision))
    answer = place_explained(request, index, dice())
    if isinstance(answer, Refusal):
        advice = index.explanations[placement_key(request)].advice
        return Hint(answer.text, advice.changes)
    return request


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
    assert observed.request is not None, observed.request_error
    assert observed.request.containers, "the pod would run without a GPU"
    return observed.request


def domains(texts: Mapping[str, object]) -> set[str]:
    """Return the prefixes of keys; both that Koordinator had are one."""
    return {key.partition("/")[0].replace("kubernetes.io", "koordinator.sh") for key in texts}


def added_names(hints: Sequence[Hint]) -> Iterator[str]:
    for hint in hints:
        yield from (change.name for change in hint.changes if change.value and "/" in change.name)
