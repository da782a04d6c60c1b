"""Admission, watcher, placer and `explain --request` read a pod in KAI's words alike."""

import json
import random

import msgspec
import pytest

from services.cli.request.command import PodReport, parse_example_node, report_of
from services.webhook.pod_admission import SchedulerChoice
from shared.dialects.dialect import Rules
from shared.kubernetes.manifests import pods_in
from shared.kubernetes.types import ApiPod
from shared.model.requests.placement import Placement
from shared.model.requests.request import PodRequest
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_parser import parse_manifest
from tests.support.build import devices, ledger_node
from tests.support.dialects.kai_pods import GUIDE, SCHEDULER, kai_pod
from tests.support.placer.placing import Cluster
from tests.support.webhook.reviews import Obj, applied, container, decided
from tests.unit.dialects.kai.test_words import TRIGGER, any_words

SERVED = frozenset({SCHEDULER})
EXAMPLE = parse_example_node("T4", now_s=0.0)
MIB = 15_360
MANY = 200


def watched(obj: Obj) -> ObservedPod:
    meta = {"name": "pod", "namespace": "ns", "uid": "u1"} | obj["metadata"]
    pod = msgspec.json.decode(msgspec.json.encode(obj | {"metadata": meta}), type=ApiPod)
    return parse_manifest(pod, Rules())


def explained(obj: Obj) -> PodReport:
    [written] = pods_in(json.dumps({"apiVersion": "v1", "kind": "Pod", **obj}), "pod.json")
    return report_of(written, Rules(), SERVED, EXAMPLE)


def placed(request: PodRequest) -> list[tuple[str, int, int, int]] | None:
    """Return container, index, MiB and percent of the cores of each share, or None if it waits."""
    node = ledger_node("n1", *devices(8, memory_mib=MIB), served=(TRIGGER,))
    outcome = Cluster(node).place(request)
    if not isinstance(outcome, Placement):
        return None
    return [
        (share.container, share.index, share.memory_mib, share.cores_percent)
        for share in outcome.shares
    ]


def assert_read_alike(obj: Obj) -> bool:
    """Return whether the pod is one with GPUs that are there."""
    decision = decided(obj, schedulers=SchedulerChoice(served=SERVED))
    seen = watched(obj)
    report = explained(obj)
    assert decision.allowed == (not seen.request_error) == (not report.fault), obj
    if not decision.allowed:
        assert seen.request_error in decision.message
        assert report.fault == seen.request_error
        return False
    completed = applied(obj, decision)
    assert watched(completed).request == seen.request
    assert explained(completed).containers == report.containers
    request = seen.request
    assert request is not None
    assert decision.requests_gpu == bool(request.containers) == bool(report.containers)
    if not request.containers:
        return False
    [wanted] = request.containers
    limits = {
        item["name"]: item["resources"].get("limits", {}).get(TRIGGER)
        for kind in ("initContainers", "containers")
        for item in completed["spec"].get(kind, ())
    }
    assert {name for name, amount in limits.items() if amount} == {wanted.container}
    assert limits[wanted.container] == str(wanted.gpus)
    shares = placed(request)
    assert (shares is None) == bool(report.refusal)
    if shares is None:
        return False
    [granted] = report.containers
    assert granted.devices
    assert shares == [
        (granted.container, share.index, share.memory_mib, share.cores_percent)
        for share in granted.devices
    ]
    return True


@pytest.mark.parametrize("example", GUIDE)
def test_words_38_each_example_of_the_guide_is_read_alike(example: str) -> None:
    assert assert_read_alike(GUIDE[example][0])


def test_words_38_any_set_of_words_is_read_alike() -> None:
    choice = random.Random(38)  # noqa: S311 - the same words each time
    pods = (
        kai_pod(container("main"), container("side"), notes=any_words(choice)) for _ in range(MANY)
    )

    assert sum(map(assert_read_alike, pods)) > MANY // 10
