"""Pods that are created again as a backup or `kubectl get -o yaml` has them."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from services.binder.bind.binding_sender import binding_annotations
from services.webhook.admission import AdmissionDecision
from services.webhook.pod_admission import SchedulerChoice
from shared.dialects import DIALECTS, SCHEDULERS
from shared.dialects.dialect import ContainerManifest, Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.dialects.reserved import AUTHOR_ANNOTATIONS, EXEMPT, VISIBLE, is_of_leasehold
from shared.model.events.event import ADMISSION
from shared.model.leases.lease import Lease
from shared.model.leases.lease_copy import ANNOTATION
from shared.model.leases.preemption import PREEMPT_AT
from shared.model.names import ENDS_AT_ANNOTATION, MAX_RUN_TIME, OFFER, Namespace, PodUid
from shared.model.requests.claim import RETRIED_AT
from shared.model.requests.placement import Refusal
from shared.placing.explained import place_explained
from shared.placing.index.node_index import NodeIndex
from shared.placing.mirror.cluster_mirror import ClusterMirror
from tests.support.build import dice, ledger_node
from tests.support.dialects import guides
from tests.support.dialects.mixes import BY_NAME, ExpectedPod
from tests.support.dialects.recount import LABELS, NODES, SERVED
from tests.support.effort import tries
from tests.support.webhook.reviews import Obj, applied, container, decided, env, gpu, pod, reviewed

NOW = 1_787_000_000.0
BY_SERVICES = {
    OFFER: "node-0",
    PREEMPT_AT: "2026-11-28T18:00:00Z",
    RETRIED_AT: "1787000000",
    ENDS_AT_ANNOTATION: "2026-11-28T18:00:00Z",
    ADMISSION: "1-2",
    EXEMPT: "true",
    **{key: "x" for dialect in DIALECTS.values() for key in dialect.agent_annotations},
}
SERVED_SCHEDULERS = frozenset(SCHEDULERS)
HANDOVER = SchedulerChoice(served=SERVED_SCHEDULERS, handover="kube", all_pods=True)
POLICIES: tuple[Obj, ...] = (
    {},
    {"runtime_class": "nvidia", "in_budget_class": "guaranteed", "out_of_budget_class": "rest"},
    {"schedulers": replace(HANDOVER, served=SERVED_SCHEDULERS | {"kube"})},
)


@cache
def index() -> NodeIndex:
    """Return idle nodes of all kinds."""
    mirror = ClusterMirror()
    nodes = (ledger_node(name, *of, labels=LABELS, served=SERVED) for name, of in NODES.items())
    mirror.reset(list(nodes))
    return NodeIndex(mirror)


def lease_of(admitted: Obj) -> Lease | None:
    """Place an admitted pod, if it fits."""
    wanted = parse_pod_request(reviewed(admitted), Rules())
    request = structs.replace(wanted, resources={"pods": 1})
    answer = place_explained(request, index(), dice(1))
    if isinstance(answer, Refusal):
        return None
    return Lease(
        pod=PodUid("u1"),
        namespace=Namespace("ns"),
        name="pod",
        node=answer[0].node,
        shares=answer[0].shares,
        dialect=request.dialect,
        memo=request.memo,
    )


def exported(admitted: Obj, *, with_node: bool = True) -> Obj:
    """Return a pod that was admitted, bound and started, as the API server shows it."""
    lease = lease_of(admitted)
    shown: Obj = json.loads(json.dumps(admitted))
    bound = binding_annotations(lease, NOW) if lease else {ANNOTATION: "{}"}
    notes = {**shown["metadata"].get("annotations", {}), **bound, **BY_SERVICES}
    shown["metadata"] |= {"annotations": notes, "creationTimestamp": "2026-11-28T17:00:00Z"}
    shown["status"] = {"phase": "Running", "qosClass": "BestEffort"}
    if with_node:
        shown["spec"]["nodeName"] = str(lease.node) if lease else "node-0"
    return shown


def assert_same(obj: Obj, *, with_node: bool = True, **policy: Any) -> AdmissionDecision:
    """Assert that a pod is admitted again with the same result, and return the second decision."""
    policy = {"schedulers": SchedulerChoice(served=SERVED_SCHEDULERS)} | policy
    first = applied(obj, decided(obj, **policy))
    copy = exported(first, with_node=with_node)

    again = decided(copy, **policy)
    second = applied(copy, again)

    assert second["spec"] == first["spec"]
    assert second["metadata"].get("labels") == first["metadata"].get("labels")
    assert second["metadata"]["annotations"] == first["metadata"].get("annotations", {})
    return again


def manifest(expected: ExpectedPod) -> Obj:
    """Return a random pod in JSON, with a container that would see devices."""

    def written(each: ContainerManifest) -> Obj:
        limits = {name: str(amount) for name, amount in each.limits.items()}
        made = container(each.name, limits)
        return made | ({"restartPolicy": "Always"} if each.sidecar else {})

    of = expected.manifest
    obj = pod(
        *(written(each) for each in of.containers if not each.init), notes=dict(of.annotations)
    )
    obj["spec"]["containers"].append(container("side", **env(VISIBLE, "all")))
    obj["spec"]["initContainers"] = [written(each) for each in of.containers if each.init]
    if of.scheduler in SERVED_SCHEDULERS:
        obj["spec"]["schedulerName"] = of.scheduler
    return obj


@pytest.mark.parametrize("name", BY_NAME)
def test_a_pod_of_any_dialect_that_is_created_again_is_admitted_as_before(name: str) -> None:
    admitted = 0

    @settings(max_examples=tries(25), deadline=None)
    @given(BY_NAME[name], st.sampled_from(POLICIES), st.booleans())
    def again(expected: ExpectedPod, policy: Obj, with_node: bool) -> None:
        nonlocal admitted
        obj = manifest(expected)
        if decided(obj, **policy).allowed:
            admitted += 1
            assert_same(obj, with_node=with_node, **policy)

    again()
    assert admitted > tries(10)


GUIDES = (
    guides.VOLCANO_GPU_POD_1,
    guides.VOLCANO_VGPU_POD,
    guides.VOLCANO_HAMI_POD,
    guides.VOLCANO_MIG_POD,
    guides.KOORDINATOR_POD,
    guides.GPUSHARING_POD,
)


@pytest.mark.parametrize("text", GUIDES)
def test_the_pods_of_the_guides_are_admitted_again(text: str) -> None:
    assert_same(yaml.safe_load(text))


def test_what_is_removed_is_warned_of_by_name() -> None:
    warnings = assert_same(pod(gpu(), notes={MAX_RUN_TIME: "2h", "mine": "stays"})).warnings

    assert any(ANNOTATION in text and "Leasehold" in text for text in warnings)
    assert any("nodeName" in text and "another node" in text for text in warnings)


def test_a_node_is_removed_from_copies_only_of_pods_that_leasehold_places() -> None:
    placed = pod(gpu(), nodeName="node-0")
    others = pod(container(), nodeName="node-0")
    others["metadata"]["annotations"] = {ANNOTATION: "{}"}

    assert "bypasses every scheduler" in decided(placed).message
    assert applied(others, decided(others))["spec"]["nodeName"] == "node-0"


def test_a_pod_with_claims_that_is_created_again_is_scheduled_again() -> None:
    claims = {"resources": {"claims": [{"name": "gpu"}]}}
    new = pod(container("main") | claims, schedulerName="default-scheduler")
    copy = pod(container("main") | claims, schedulerName="default-scheduler", nodeName="node-0")
    copy["status"] = {"phase": "Running"}
    by_name = copy | {"status": {"phase": "Pending"}}

    again = decided(copy, claims=True)

    assert applied(copy, again)["spec"] == applied(new, decided(new, claims=True))["spec"]
    assert any("nodeName node-0 was removed" in text for text in again.warnings)
    assert "bypasses every scheduler" in decided(by_name, claims=True).message
    assert applied(copy, decided(copy))["spec"]["nodeName"] == "node-0", "claims are not served"


def test_no_annotation_of_leasehold_is_taken_for_a_misspelled_one_of_an_author() -> None:
    own = filter(is_of_leasehold, (ANNOTATION, *BY_SERVICES))

    assert all(decided(pod(gpu(), notes={key: "x"})).allowed for key in own)
    assert all(decided(pod(gpu(), notes={key: "2h"})).allowed for key in AUTHOR_ANNOTATIONS[1:])
