"""Pods whose node kube-scheduler chooses, as the watcher publishes them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from msgspec import structs

from services.planner.plan import has_claims_alone
from services.watcher.pod_group_sources import PodGroupConditions
from services.watcher.pod_tracker import RESYNC_SHARDS, PodTracker
from services.watcher.service import Watcher
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiPod
from shared.model.events.pod_events import PodHandedOver
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.claim import CLAIMS_FIELD
from shared.model.requests.request import GpuRequest, PodRequest
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_parser import PodParser
from tests.support.clock import FastClock

PARSER = PodParser(frozenset({"leasehold"}), Rules())
WAITING = ObservedPod(
    pod=PodUid("u1"),
    namespace=Namespace("ns"),
    name="p",
    resource_version="5",
    ours=True,
    created_at=100.0,
    request=PodRequest(priority=1),
)


def handed_over(pods: PodTracker, now: ObservedPod) -> list[tuple[str, str]]:
    """Return the pods and the reasons of the events that follow from a pod's new state."""
    events = pods.update(now, None)
    assert all(isinstance(event, PodHandedOver) for event in events)
    return [(e.queued.pod, e.reason) for e in events if isinstance(e, PodHandedOver)]


HANDED_OVER = structs.replace(WAITING, by_kube_scheduler=True, handed_over="spec.volumes[0]")


def test_pods_that_kube_scheduler_places_are_published_when_its_reason_changes() -> None:
    pods = PodTracker()
    refused = structs.replace(HANDED_OVER, reason="no claim", shown=1)

    assert handed_over(pods, HANDED_OVER) == [("u1", "")]
    assert handed_over(pods, HANDED_OVER) == []
    assert handed_over(pods, refused) == [("u1", "no claim")]
    assert handed_over(pods, structs.replace(refused, resource_version="9")) == []
    assert pods.pending == {}
    assert pods.resync_unexplained(1) == []


def test_pods_that_kube_scheduler_places_are_published_again_until_they_have_a_node() -> None:
    pods = PodTracker()
    refused = structs.replace(HANDED_OVER, reason="no claim")
    pods.update(refused, None)
    again: list[Sequence[object]] = [
        pods.resync(1),
        [event for shard in range(RESYNC_SHARDS) for event in pods.resync_shard(1, shard)],
        pods.requeue([WAITING.pod], 1),
    ]

    for events in again:
        [event] = events
        assert isinstance(event, PodHandedOver)
        assert (event.queued.by_kube_scheduler, event.reason) == (True, "no claim")
        assert event.queued.handed_over == "spec.volumes[0]"
    pods.update(structs.replace(refused, node=NodeName("a")), refused)
    assert pods.resync(2) == pods.requeue([WAITING.pod], 2) == []


@pytest.mark.parametrize(
    ("request_", "bound"),
    [
        (PodRequest(), [True]),
        (None, [True]),
        (PodRequest(containers=(GpuRequest(container="main", gpus=1),)), []),
    ],
)
def test_the_wait_of_a_pod_that_gets_no_lease_ends_once_it_has_a_node(
    request_: PodRequest | None, bound: list[bool]
) -> None:
    pods = PodTracker()
    waiting = structs.replace(HANDED_OVER, request=request_, reason="no device")
    pods.update(waiting, None)

    events = pods.update(structs.replace(waiting, node=NodeName("a")), waiting)

    assert [event.bound for event in events if isinstance(event, PodHandedOver)] == bound
    assert len(events) == len(bound)


async def test_the_end_of_a_wait_is_published_once_more_after_events_that_are_late() -> None:
    names = ("pod", "node", "group", "namespace", "quota", "claim", "class", "storage")
    watcher = Watcher(
        lister=cast("Any", None),
        clock=FastClock(rate=1_000.0),
        group_conditions=PodGroupConditions(cast("Any", None)),
        **{f"{name}_source": cast("Any", None) for name in names},
    )
    watcher.pods.update(HANDED_OVER, None)
    bound = structs.replace(HANDED_OVER, node=NodeName("a"))
    [ended] = watcher.pods.update(bound, HANDED_OVER)
    assert isinstance(ended, PodHandedOver)
    elsewhere = replace(ended, queued=replace(ended.queued, pod=PodUid("u2")))
    watcher.claiming.ended_waits.add(elsewhere)

    async with asyncio.timeout(30):
        again = await anext(watcher.resync_stale())

    assert again == [ended, elsewhere]
    assert ended.bound
    assert watcher.pods.ended_waits.take_due() == []


def test_a_pod_of_kube_scheduler_with_an_invalid_request_waits_with_its_reason() -> None:
    pods = PodTracker()
    invalid = structs.replace(HANDED_OVER, request=None, priority=7, reason="cores 101")

    [event] = pods.update(invalid, None)

    assert isinstance(event, PodHandedOver)
    assert event.queued.request == PodRequest(priority=7)
    assert event.reason == "cores 101"


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        ({"volumes": [{"name": "v", "iscsi": {"x": "y"}}]}, "spec.volumes[0].iscsi"),
        ({}, ""),
    ],
)
def test_the_fields_for_which_kube_scheduler_places_a_pod_are_named(
    spec: dict[str, Any], fields: str
) -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes"}
    raw = msgspec.json.encode(
        {
            "metadata": {"uid": "u"},
            "spec": {"schedulerName": "leasehold-full", "containers": [{"name": "c"}], **spec},
            "status": {"conditions": [condition]},
        }
    )

    seen = PARSER.parse(msgspec.json.decode(raw, type=ApiPod))

    assert (seen.handed_over, seen.reason) == (fields, "0/3 nodes")
    assert seen.request is not None
    assert seen.request.node_requirements.unsupported == ()


def test_a_pod_with_an_invalid_request_names_no_claims_for_which_others_would_be_evicted() -> None:
    invalid = structs.replace(
        WAITING,
        request=None,
        request_error="no such card",
        by_kube_scheduler=True,
        handed_over=CLAIMS_FIELD,
    )

    [event] = PodTracker().update(invalid, None)

    assert isinstance(event, PodHandedOver)
    assert not has_claims_alone(event.queued)
    valid = structs.replace(invalid, request=PodRequest(), request_error="")
    [event] = PodTracker().update(valid, None)
    assert isinstance(event, PodHandedOver)
    assert has_claims_alone(event.queued)
