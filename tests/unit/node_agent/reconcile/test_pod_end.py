"""Whether a pod has ended, by what is seen of it."""

import itertools
from typing import Any

import pytest

from services.node_agent.kubelet.pods import Holding, PodResources, RunningPods
from services.node_agent.reconcile.pod_end import (
    KubeletListing,
    NodeObservation,
    PodEnd,
    PodObservation,
    end_of,
    ends_of_pods,
)
from services.node_agent.records.known_leases import KnownLeases
from shared.model.names import NodeName
from tests.support.node_agent.agent import lease_of
from tests.support.node_agent.node import entry_of, kubelet_pod
from tests.support.simcluster.kubelet import NODE

NOTHING_LEFT = PodObservation(
    processes=False, starts=False, listed=KubeletListing.ABSENT, holds=False, leased=False
)


def seen(**facts: Any) -> PodObservation:
    defaults = {name: getattr(NOTHING_LEFT, name) for name in PodObservation.__slots__}
    return PodObservation(**(defaults | facts))


@pytest.mark.parametrize(
    ("witnesses", "end"),
    [
        (seen(), PodEnd.ENDED),
        (seen(listed=KubeletListing.LIVE), PodEnd.ENDED),
        (seen(listed=KubeletListing.TERMINAL, holds=True, leased=True), PodEnd.ENDED),
        (seen(listed=KubeletListing.TERMINAL, holds=None, starts=None), PodEnd.ENDED),
        (seen(listed=KubeletListing.TERMINAL, processes=True), PodEnd.RUNS),
        (seen(listed=KubeletListing.LIVE, processes=True), PodEnd.RUNS),
        (seen(processes=True), PodEnd.RUNS),
        (seen(starts=True), PodEnd.RUNS),
        (seen(starts=True, holds=None), PodEnd.RUNS),
        (seen(listed=KubeletListing.LIVE, holds=True), PodEnd.RUNS),
        (seen(holds=True), PodEnd.RUNS),
        (seen(listed=KubeletListing.LIVE, leased=True), PodEnd.RUNS),
        (seen(leased=True), PodEnd.UNKNOWN),
        (seen(listed=KubeletListing.LIVE, holds=None), PodEnd.UNKNOWN),
        (seen(listed=KubeletListing.LIVE, starts=None), PodEnd.UNKNOWN),
        (seen(starts=None, holds=True), PodEnd.UNKNOWN),
    ],
)
def test_several_witnesses_decide_together(witnesses: PodObservation, end: PodEnd) -> None:
    assert end_of(witnesses) is end


def test_nothing_is_over_that_may_still_use_its_devices() -> None:
    for processes, starts, listed, holds, leased in itertools.product(
        (True, False), (True, False, None), KubeletListing, (True, False, None), (True, False)
    ):
        witnesses = seen(
            processes=processes, starts=starts, listed=listed, holds=holds, leased=leased
        )
        if end_of(witnesses) is PodEnd.ENDED:
            assert not processes
            assert listed is KubeletListing.TERMINAL or (starts, holds, leased) == (
                False,
                False,
                False,
            )


@pytest.mark.parametrize(
    ("containers", "end"),
    [({"c1"}, PodEnd.RUNS), ({"sandbox"}, PodEnd.ENDED), ({"sandbox", "c1"}, PodEnd.RUNS)],
)
def test_the_sandbox_of_a_terminal_pod_does_not_count_as_running(
    containers: set[str], end: PodEnd
) -> None:
    lease = lease_of("u1")
    pod = kubelet_pod("pod", "u1", phase="Succeeded", container_ids={"c1": "main"})
    running = RunningPods(processes={lease.pod: containers})

    ends = ends_of_pods(
        [entry_of(lease)], NodeObservation(pods=[pod], running=running), KnownLeases(NodeName(NODE))
    )

    assert ends == {lease.pod: end}


@pytest.mark.parametrize(
    ("ids", "recorded", "listed_uid", "end"),
    [
        ({"x"}, "x", "u1", PodEnd.RUNS),
        ({"y"}, "x", "u1", PodEnd.ENDED),
        ({"x"}, "x", "u2", PodEnd.ENDED),
        ({"x"}, "x", "", PodEnd.RUNS),
        ({"y"}, "x", "", PodEnd.ENDED),
    ],
)
def test_devices_of_a_later_pod_of_the_same_name_are_not_held_by_the_earlier_one(
    ids: set[str], recorded: str, listed_uid: str, end: PodEnd
) -> None:
    lease = lease_of("u1")
    holding = Holding("default", "pod", "main", "r", frozenset(ids))
    sight = NodeObservation(
        pods=[kubelet_pod("pod", listed_uid)] if listed_uid else [],
        pod_resources=PodResources(holdings=(holding,)),
        running=RunningPods(),
    )
    entry = entry_of(lease, device_ids=(recorded,))

    ends = ends_of_pods([entry], sight, KnownLeases(NodeName(NODE), synced=True))

    assert ends == {lease.pod: end}


def test_before_its_first_list_of_leases_the_agent_believes_in_no_end() -> None:
    lease = lease_of("u1")
    sight = NodeObservation(pod_resources=PodResources(), running=RunningPods())
    leases = KnownLeases(NodeName(NODE))

    assert ends_of_pods([entry_of(lease)], sight, leases) == {lease.pod: PodEnd.UNKNOWN}
    leases.observe([lease])
    leases.end([lease.pod])
    assert ends_of_pods([entry_of(lease)], sight, leases) == {lease.pod: PodEnd.ENDED}
