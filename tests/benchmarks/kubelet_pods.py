"""What reading the kubelet's list of pods takes: `python -m tests.benchmarks.kubelet_pods`.

A simulated kubelet serves its list over TLS; connections are kept. Ceiling: a median of 10 ms.
"""

import argparse
import asyncio
import statistics
import time

from services.node_agent.kubelet.pod_list import KubeletPods
from services.node_agent.settings import AgentSettings, kubelet_credentials
from shared.kubernetes.client import KubernetesClient
from tests.support.simcluster.kubelet import one_kubelet, pod

CEILING_MS = 10.0


async def measure(pods: int, times: int) -> float:
    """Return the median of one reading, in ms."""
    async with one_kubelet() as node:
        for n in range(pods):
            node.create(pod(f"p{n}"))
        for n in range(pods):
            await node.phase(f"p{n}", "Running")
        settings = AgentSettings(kubelet_dir=node.kubelet.files.root)
        async with KubernetesClient(kubelet_credentials(settings)) as kube:
            listing = KubeletPods(kube, lambda: kubelet_credentials(settings))
            took: list[float] = []
            for _ in range(times):
                began = time.perf_counter()
                assert len(await listing.list_pods()) == pods
                took.append((time.perf_counter() - began) * 1e3)
    print(
        f"{pods} pods: first {took[0]:.1f} ms, then median {statistics.median(took[1:]):.1f} ms, "
        f"worst {max(took[1:]):.1f} ms (server and client in one process)"
    )
    return statistics.median(took[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=30)
    parser.add_argument("--times", type=int, default=200)
    options = parser.parse_args()
    median_ms = asyncio.run(measure(options.pods, options.times))
    raise SystemExit(median_ms > CEILING_MS)


if __name__ == "__main__":
    main()
