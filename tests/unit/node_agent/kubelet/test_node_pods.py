"""Which pods of the node still run, by its kubelet and its processes."""

import shutil
from pathlib import Path

import pytest

from services.node_agent.kubelet.node_pods import DENIED_S, RESTART_S, RETRY_S, NodePods
from services.node_agent.kubelet.pods import KubeletPod
from shared.kubernetes.errors import UnreachableError, parse_error
from shared.model.errors import LeaseholdError, UnavailableError
from shared.model.names import PodUid
from tests.support.clock import FakeClock
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

    assert (await node_pods(tmp_path).find_running()).uids == {RUNNING}
    assert (await node_pods(tmp_path, CACHED).find_running()).uids == {CACHED, RUNNING}


async def test_processes_that_were_found_while_pods_were_listed_prove_that_later_ones_would_be(
    tmp_path: Path,
) -> None:
    pods = node_pods(tmp_path)
    add_process(tmp_path, "17", f"/kubepods/pod{RUNNING}/{64 * 'a'}")
    await pods.list_pods()
    shutil.rmtree(tmp_path / "17")

    assert (await pods.find_running()).uids == set()


@pytest.mark.parametrize("own", ["/", f"/kubepods/pod{RUNNING}/{64 * 'a'}"])
async def test_an_agent_that_finds_only_its_own_processes_believes_the_runtime(
    tmp_path: Path, own: str
) -> None:
    add_process(tmp_path, "1", own)
    add_process(tmp_path, "self", own)
    pods = node_pods(tmp_path)
    await pods.list_pods()

    assert (await pods.find_running()).uids >= {CACHED}


class UnreadableKubelet(FakeKubelet):
    """Fails to list pods with a test's error."""

    failure: LeaseholdError | None = None

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        self.list_calls += 1
        if self.failure is not None:
            raise self.failure
        return await super().list_pods()


def response(code: int, text: str) -> LeaseholdError:
    return parse_error("GET", "/pods", code, text.encode())


def unreadable_pods(proc: Path) -> tuple[UnreadableKubelet, NodePods, FakeClock]:
    kubelet = UnreadableKubelet(kubelet_pod("running", RUNNING))
    clock = FakeClock()
    return kubelet, NodePods(node_of(kubelet, clock=clock), proc), clock


@pytest.mark.parametrize(
    ("failure", "was_read", "passes_s"),
    [
        (response(500, "Authorization error (user=agent, verb=get, resource=nodes)"), True, 1e9),
        (response(403, "Forbidden (user=agent, verb=get, resource=nodes)"), True, 60),
        (response(401, "Unauthorized"), True, 1e9),
        (response(401, "Unauthorized"), False, 150),
        (response(404, "404 page not found"), True, 0),
    ],
)
async def test_a_list_that_an_outage_makes_unreadable_is_no_missing_permission(
    tmp_path: Path, failure: LeaseholdError, was_read: bool, passes_s: float
) -> None:
    kubelet, pods, clock = unreadable_pods(tmp_path)
    if was_read:
        assert await pods.list_pods()
    kubelet.failure = failure

    for _ in range(40):
        began = clock.ticks()
        assert await pods.list_pods() == ()
        assert "since 2026-08-17 " in pods.unreadable_reason
        passes = clock.ticks() - FakeClock().ticks() < passes_s
        assert pods.is_passing is passes
        assert ("is asked again every 5 s" in pods.unreadable_reason) is passes
        clock.advance(RETRY_S)
        assert clock.ticks() > began

    kubelet.failure = None
    assert await pods.list_pods()
    assert (pods.unreadable_reason, pods.is_passing) == ("", False)


async def test_a_denial_counts_from_the_end_of_the_outage(tmp_path: Path) -> None:
    kubelet, pods, clock = unreadable_pods(tmp_path)
    for failure in (response(403, ""), response(500, ""), response(403, "")):
        kubelet.failure = failure
        await pods.list_pods()
        clock.advance(DENIED_S[403] - 1)

    await pods.list_pods()
    assert pods.is_passing


async def test_a_silent_kubelet_may_be_restarting_and_is_then_asked_no_more_by_each_call(
    tmp_path: Path,
) -> None:
    kubelet, pods, clock = unreadable_pods(tmp_path)
    kubelet.failure = UnreachableError("GET", "/pods", "connection refused")

    with pytest.raises(UnavailableError, match="connection refused"):
        await pods.list_pods()
    assert "may be restarting" in await pods.blind_reason()
    clock.advance(RESTART_S)
    assert await pods.list_pods() == await pods.list_pods() == ()
    assert pods.is_passing
    assert await pods.blind_reason() == ""
    assert kubelet.list_calls == 2


async def test_silent_pod_resources_make_the_agent_blind_until_they_respond(
    tmp_path: Path,
) -> None:
    kubelet, pods, _ = unreadable_pods(tmp_path)
    kubelet.silent_reason = "PodResources: no answer"
    kubelet.error = "PodResources: no answer"

    assert await pods.blind_reason() == "PodResources: no answer"
    kubelet.error = ""
    assert await pods.blind_reason() == ""


@pytest.mark.parametrize("passes", [True, False])
async def test_without_visible_processes_nothing_is_known_of_them_during_an_outage(
    tmp_path: Path, *, passes: bool
) -> None:
    kubelet, pods, clock = unreadable_pods(tmp_path)
    kubelet.failure = response(403, "Forbidden")
    await pods.list_pods()
    if not passes:
        clock.advance(DENIED_S[403])
        await pods.list_pods()
        assert (await pods.find_running()).uids == set()
        return
    with pytest.raises(UnavailableError, match="run the agent with hostPID"):
        await pods.find_running()
