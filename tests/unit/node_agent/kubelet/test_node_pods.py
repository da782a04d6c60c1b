"""Which pods of the node still run, by its kubelet and its processes."""

from pathlib import Path

from services.node_agent.kubelet.node_pods import NodePods
from services.node_agent.kubelet.pods import KubeletPod, PodResources
from shared.model.names import PodUid
from tests.support.clock import FakeClock

CACHED = PodUid("0b7a4d0e-7f0c-4d55-9f5b-2f2f0f9d7a11")
STARTED = PodUid("1c8b5e1f-7f0c-4d55-9f5b-2f2f0f9d7a22")


class CachingKubelet:
    """Shows the pods that ran some seconds ago."""

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        return ()

    async def list_running(self) -> frozenset[PodUid]:
        return frozenset({CACHED})

    async def list_holdings(self) -> PodResources:
        return PodResources()


async def test_a_pod_that_has_just_started_runs_although_the_kubelet_does_not_show_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "cgroup").write_text(f"0::/kubepods/pod{STARTED}/{64 * 'a'}\n")
    kubelet = CachingKubelet()
    pods = NodePods(kubelet, kubelet, implied=lambda: (), proc=tmp_path, clock=FakeClock())

    assert await pods.list_running() == {CACHED, STARTED}
