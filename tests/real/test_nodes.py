"""kube-scheduler and the placer leave the same nodes for a pod: the table of cases, one by one."""

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from shared.kubernetes.types import ApiNode, ApiPod
from shared.model.names import Namespace
from tests.real.control_plane import ControlPlane, control_plane, missing
from tests.real.one_by_one import (
    FENCE,
    NAMESPACES,
    answer_for,
    create_node,
    create_pod,
    remove,
    stored,
)
from tests.real.recording_extender import Recorder
from tests.support.node_case_objects import NAMESPACE, fitting, node_manifests, pod_manifests
from tests.support.node_cases import LABELS, NODE_CASES, NodeCase

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="session"),
]

LABELS_OF_NAMESPACES: dict[Namespace, dict[str, str]] = {
    Namespace(NAMESPACE): {"team": "ml"},
    Namespace("other"): {},
    Namespace(FENCE): {},
}
NEWEST = list(LABELS)[-1]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plane(notes: Recorder) -> AsyncIterator[ControlPlane]:
    async with control_plane() as started:
        for name, labels in LABELS_OF_NAMESPACES.items():
            await started.create(NAMESPACES, {"metadata": {"name": name, "labels": labels}})
        started.start_scheduler(extenders=[notes.configuration])
        yield started


@pytest.mark.parametrize("case", NODE_CASES.values(), ids=NODE_CASES)
async def test_pods_fit_the_nodes_that_kube_scheduler_leaves(
    plane: ControlPlane, notes: Recorder, case: NodeCase
) -> None:
    nodes = [await create_node(plane, manifest) for manifest in node_manifests(case)]
    pods = [await create_pod(plane, manifest) for manifest in pod_manifests(case)]
    try:
        theirs = await answer_for(plane, notes, pods[-1], NEWEST)
        pods[-1] = await stored(plane, pods[-1])
    finally:
        await remove(plane, pods, nodes)
    ours = fitting(
        [msgspec.convert(pod, ApiPod) for pod in pods],
        [msgspec.convert(node, ApiNode) for node in nodes],
        LABELS_OF_NAMESPACES,
    )

    assert (" ".join(sorted(theirs.fits)), ours) == (case.fits, case.fits), theirs
