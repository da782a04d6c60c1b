"""The NUMA nodes that device IDs show, by the leases of the pods that come next."""

from dataclasses import replace

import pytest

from services.node_agent.allocate.numa_alignment import shown_numa_nodes
from shared.dialects.advertised import NumaNodes
from shared.model.device import Device
from shared.model.names import DeviceUuid
from tests.support.build import device
from tests.support.node_agent.agent import lease_of, share

UUIDS = [share(n).device for n in range(4)]
GPU_0, GPU_1, GPU_2, GPU_3 = UUIDS


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
