"""The NUMA nodes that device IDs show, by the leases of the pods that come next."""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from msgspec import structs

from services.node_agent.allocate import numa_alignment
from services.node_agent.allocate.admission_window import AdmissionWindow
from services.node_agent.allocate.numa_alignment import (
    ALIGN_S,
    IDLE_S,
    NumaAlignment,
    shown_numa_nodes,
)
from services.node_agent.kubelet.pods import AllocatableResources, PodResources
from services.node_agent.kubelet.registration import DevicePlugins
from shared.dialects.advertised import NumaNodes
from shared.model.devices.device import Device, numa_cpus_name
from shared.model.names import DeviceUuid
from tests.support.build import device
from tests.support.clock import FakeClock
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.node import node_of, snapshot_of

UUIDS = [share(n).device for n in range(4)]
GPU_0, GPU_1, GPU_2, GPU_3 = UUIDS


class KubeletCpus:
    """A kubelet that can give six CPUs exclusively, of which it has given some to pods."""

    policy = "single-numa-node"

    def __init__(self, **given: int) -> None:
        self.given = {("default", pod): frozenset({cpu}) for pod, cpu in given.items()}

    async def list_allocatable(self) -> AllocatableResources:
        return AllocatableResources(numa={}, cpus=frozenset({1, 2, 3, 5, 6, 7}))

    async def list_holdings(self) -> PodResources:
        return PodResources(cpus=self.given)

    async def topology_policy(self) -> str:
        return self.policy


def devices(*numa: int | None) -> dict[DeviceUuid, Device]:
    return {
        uuid: replace(device(uuid, n), numa=node)
        for n, (uuid, node) in enumerate(zip(UUIDS, numa, strict=True))
    }


TWO_NODES = devices(0, 0, 1, 1)
OWN = {GPU_0: (0,), GPU_1: (0,), GPU_2: (1,), GPU_3: (1,)}


@pytest.mark.parametrize(
    ("found", "gpus_of_pods", "shown"),
    [
        pytest.param(TWO_NODES, [], OWN, id="no pod comes"),
        pytest.param(TWO_NODES, [[2]], {GPU_2: (1,)}, id="only the pod's GPU shows its NUMA node"),
        pytest.param(
            TWO_NODES,
            [[1, 2]],
            {GPU_1: (0, 1), GPU_2: (0, 1)},
            id="GPUs of two NUMA nodes: the kubelet may choose either",
        ),
        pytest.param(TWO_NODES, [[0], [1]], {GPU_0: (0,), GPU_1: (0,)}, id="two pods"),
        pytest.param(
            TWO_NODES,
            [[0], [0, 3]],
            {GPU_0: (0, 1), GPU_3: (0, 1)},
            id="two pods on one GPU",
        ),
        pytest.param(
            devices(0, None, 1, 1), [[0, 1]], {}, id="a NUMA node of the pod is not known"
        ),
        pytest.param(
            devices(1, None, 1, None), [], {GPU_0: (1,), GPU_2: (1,)}, id="only some are known"
        ),
        pytest.param(
            devices(0, 0, 0, 0), [[2]], dict.fromkeys(UUIDS, (0,)), id="there is nothing to choose"
        ),
    ],
)
def test_ids_show_the_numa_nodes_of_the_coming_pods_gpus(
    found: dict[DeviceUuid, Device],
    gpus_of_pods: list[list[int]],
    shown: dict[DeviceUuid, NumaNodes],
) -> None:
    leases = [
        lease_of(f"pod-{n}", *(share(gpu) for gpu in gpus)) for n, gpus in enumerate(gpus_of_pods)
    ]

    assert shown_numa_nodes(found, leases) == shown


async def test_devices_are_reported_with_the_cpus_for_leases_on_their_numa_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for numa, cpus in enumerate(("0-2,9\n", "3-5\n")):
        (tmp_path / str(numa)).write_text(cpus)
    monkeypatch.setattr(numa_alignment, "CPU_LIST", f"{tmp_path}/{{}}")
    found = devices(0, 1, 2, None)
    kubelet = KubeletCpus(without=2, leased=1, elsewhere=3)
    node = node_of(kubelet, snapshot=snapshot_of(*found.values()))
    for pod, resources in (("leased", {numa_cpus_name(0): 2}), ("elsewhere", {"cpu": 1000})):
        lease = lease_of(f"uid-{pod}", share(0), name=pod)
        node.leases.observe([structs.replace(lease, resources=resources)])
    plugins = DevicePlugins(node, tmp_path, mock.Mock(), mock.Mock())
    alignment = NumaAlignment(node, plugins, AdmissionWindow(node))

    plugins.kubelet.touch()

    await alignment.refresh()
    assert not alignment.is_known, "it has not registered: the policy is not known"
    monkeypatch.setattr(DevicePlugins, "registrations", 1)
    await alignment.refresh()
    assert not alignment.is_known, "the kubelet has just started: it may not list all pods"
    assert alignment.described(node.devices) != node.devices
    node.report_due.clear()

    def kubelet_started(at: float) -> None:
        os.utime(plugins.kubelet, (at, at))

    kubelet_started(0)
    await alignment.refresh()

    assert alignment.is_known
    assert node.report_due.is_set()
    described = [(d.one_numa, d.numa_cpus) for d in alignment.described(node.devices)]
    assert described == [(True, 1), (True, 1), (True, None), (False, None)]

    kubelet.given = {}
    for started, free in ((time.time(), 1), (0, 2)):
        kubelet_started(started)
        await alignment.refresh()
        assert alignment.described(node.devices)[0].numa_cpus == free
    assert alignment.is_known


async def test_looks_are_rare_while_nothing_is_aligned_until_a_kubelet_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    until_tick = mock.Mock(return_value=60.0)
    monkeypatch.setattr(numa_alignment, "until_tick", until_tick)
    monkeypatch.setattr(DevicePlugins, "registrations", 1)
    kubelet = KubeletCpus()
    node = node_of(kubelet, snapshot=snapshot_of(*TWO_NODES.values()))
    node.leases.observe([])
    plugins = DevicePlugins(node, tmp_path, mock.Mock(), mock.Mock())
    alignment = NumaAlignment(node, plugins, AdmissionWindow(node))

    for policy, registrations in (("none", 1), ("none", 2), ("best-effort", 2)):
        kubelet.policy = policy
        await alignment.refresh()
        monkeypatch.setattr(DevicePlugins, "registrations", registrations)
        plugins.registered.set()
        async with asyncio.timeout(5):
            await alignment.wait()

    assert until_tick.mock_calls == [mock.call(IDLE_S), mock.call(ALIGN_S), mock.call(ALIGN_S)]


async def test_pods_do_not_come_whose_cpus_the_kubelet_has_given_to_others_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for numa, cpus in enumerate(("1-3\n", "5-7\n")):
        (tmp_path / str(numa)).write_text(cpus)
    monkeypatch.setattr(numa_alignment, "CPU_LIST", f"{tmp_path}/{{}}")
    monkeypatch.setattr(DevicePlugins, "registrations", 1)
    kubelet = KubeletCpus()
    node = node_of(kubelet, snapshot=snapshot_of(*TWO_NODES.values()))
    plugins = DevicePlugins(node, tmp_path, mock.Mock(), mock.Mock())
    plugins.kubelet.touch()
    os.utime(plugins.kubelet, (0, 0))
    alignment = NumaAlignment(node, plugins, AdmissionWindow(node))
    await alignment.refresh()
    one, two, elsewhere, running = (
        structs.replace(lease_of(name, share(0), name=name), resources={numa_cpus_name(numa): 1})
        for name, numa in (("one", 0), ("two", 0), ("elsewhere", 1), ("running", 0))
    )
    node.leases.observe([running])
    coming = [one, two, elsewhere]

    assert await alignment.short_of_cpus(coming) == ()
    node.report_due.clear()
    kubelet.given = {("default", "without"): frozenset({2})}
    assert await alignment.short_of_cpus([lease_of("shared", share(0))]) == ()
    assert not node.report_due.is_set(), "it takes no CPUs exclusively"
    assert await alignment.short_of_cpus(coming) == (two.pod,)
    assert node.report_due.is_set(), "placers learn of it at once"
    kubelet.given["default", "more"] = frozenset({3})
    assert await alignment.short_of_cpus(coming) == (one.pod, two.pod)


async def test_no_pod_waits_for_the_policy_where_no_gpu_has_a_numa_node(tmp_path: Path) -> None:
    known = []
    starting = []
    clock = FakeClock()
    for numa in (None, 0):
        snapshot = snapshot_of(*devices(None, None, None, numa).values())
        node = node_of(KubeletCpus(), snapshot=snapshot, clock=clock)
        plugins = DevicePlugins(node, tmp_path, mock.Mock(), mock.Mock())
        alignment = NumaAlignment(node, plugins, AdmissionWindow(node))
        known.append(alignment.is_known)
        starting.append(alignment.is_starting)
    clock.advance(60)

    assert known == [True, False]
    assert [*starting, alignment.is_starting] == [False, True, False]


async def test_a_list_that_another_call_replaced_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = node_of(KubeletCpus(), snapshot=snapshot_of(*TWO_NODES.values()))
    plugins = DevicePlugins(node, tmp_path, mock.Mock(), mock.Mock())
    window = AdmissionWindow(node)
    window.aligns_numa = True
    coming = lease_of("coming", share(3))
    pods = {"now": [coming]}
    monkeypatch.setattr(window, "coming", lambda: {lease.pod: lease for lease in pods["now"]})
    alignment = NumaAlignment(node, plugins, window)
    answers = [asyncio.Event(), asyncio.Event()]
    calls = iter(answers)

    async def is_taken() -> bool:
        if answer := next(calls, None):
            await answer.wait()
        return True

    monkeypatch.setattr(alignment, "_is_taken", is_taken)
    first = asyncio.create_task(alignment.align())
    await asyncio.sleep(0)
    pods["now"] = []
    second = asyncio.create_task(alignment.align())
    await asyncio.sleep(0)
    for answer, task in ((answers[1], second), (answers[0], first)):
        answer.set()
        await task

    for pods["now"] in ([coming], []):
        await alignment.align()
        assert plugins.numa == shown_numa_nodes(TWO_NODES, pods["now"])


async def test_a_kubelet_that_shows_no_new_list_is_waited_for_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa_alignment, "TAKEN_S", 0.0)
    clock = FakeClock()
    node = node_of(KubeletCpus(), snapshot=snapshot_of(*TWO_NODES.values()), clock=clock)
    plugins = DevicePlugins(node, tmp_path, mock.Mock(), mock.Mock())
    monkeypatch.setattr(plugins, "are_shown", lambda _: False)
    window = AdmissionWindow(node)
    window.aligns_numa = True
    alignment = NumaAlignment(node, plugins, window)

    taken = []
    for seconds in (0, 10, 10):
        clock.advance(seconds)
        taken.append(await alignment.align())

    assert taken == [False, False, True]
