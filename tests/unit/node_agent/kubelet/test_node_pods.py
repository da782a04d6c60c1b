"""Which pods of the node still run, by its kubelet and its processes."""

import shutil
from pathlib import Path

import pytest

from services.node_agent.kubelet.node_pods import NodePods
from shared.model.names import PodUid
from tests.support.node_agent.agent import lease_of
from tests.support.node_agent.node import FakeKubelet, entry_of, kubelet_pod, node_of

CACHED = PodUid("0b7a4d0e-7f0c-4d55-9f5b-2f2f0f9d7a11")
RUNNING = PodUid("1c8b5e1f-7f0c-4d55-9f5b-2f2f0f9d7a22")


def add_process(proc: Path, pid: str, cgroup: str) -> None:
    (proc / pid).mkdir()
    (proc / pid / "cgroup").write_text(f"0::{cgroup}\n")


def node_pods(proc: Path, *starting: PodUid) -> NodePods:
    kubelet = FakeKubelet(kubelet_pod("running", RUNNING), running=frozenset({CACHED}))
    node = node_of(kubelet)
    for pod in starting:
        node.checkpoint.note_call(entry_of(lease_of(pod)), node.clock.now(), starts=True)
    return NodePods(node, proc)


async def test_a_pod_has_ended_if_it_has_no_processes_and_is_not_about_to_start_any(
    tmp_path: Path,
) -> None:
    add_process(tmp_path, "17", f"/kubepods/pod{RUNNING}/{64 * 'a'}")

    assert await node_pods(tmp_path).list_running() == {RUNNING}
    assert await node_pods(tmp_path, CACHED).list_running() == {CACHED, RUNNING}


async def test_processes_that_were_found_while_pods_were_listed_prove_that_later_ones_would_be(
    tmp_path: Path,
) -> None:
    pods = node_pods(tmp_path)
    add_process(tmp_path, "17", f"/kubepods/pod{RUNNING}/{64 * 'a'}")
    await pods.list_pods()
    shutil.rmtree(tmp_path / "17")

    assert await pods.list_running() == set()


@pytest.mark.parametrize("own", ["/", f"/kubepods/pod{RUNNING}/{64 * 'a'}"])
async def test_an_agent_that_finds_only_its_own_processes_believes_the_runtime(
    tmp_path: Path, own: str
) -> None:
    add_process(tmp_path, "1", own)
    add_process(tmp_path, "self", own)
    pods = node_pods(tmp_path)
    await pods.list_pods()

    assert await pods.list_running() >= {CACHED}
