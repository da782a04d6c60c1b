"""kube-scheduler gives the answers of the table of affinity and spread, to which the placer's
answers are compared in tests/unit/placing/test_pod_rules.py."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shared.kubernetes.errors import InvalidError
from tests.real.control_plane import ControlPlane, Json, control_plane, missing
from tests.real.one_by_one import FENCE, answer_for, create_node, create_pod, path_of, remove
from tests.real.one_by_one import NAMESPACES as PATH
from tests.real.recording_extender import Recorder
from tests.support.affinity_case import NAMESPACES, TAINTED
from tests.support.affinity_cases import CASES

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.asyncio(loop_scope="session"),
]

NOT_STORED = {"two selectors over one label"}
"""Cases that no API server of today stores; older ones may have."""
REASONS = {TAINTED: "node(s) had untolerated taint(s)"}
"""Leasehold names the taint, as kube-schedulers before 1.35 did."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plane(notes: Recorder) -> AsyncIterator[ControlPlane]:
    async with control_plane() as started:
        for name, labels in {**NAMESPACES, FENCE: {}}.items():
            if name != "default":
                await started.create(PATH, {"metadata": {"name": name}})
            await started.kube.patch_merge(f"{PATH}/{name}", {"metadata": {"labels": labels}})
        started.start_scheduler(extenders=[notes.configuration])
        yield started


@pytest.mark.parametrize("name", CASES.keys() - NOT_STORED)
async def test_kube_scheduler_finds_the_nodes_of_the_table(
    plane: ControlPlane, notes: Recorder, name: str
) -> None:
    case = CASES[name]
    nodes = [await create_node(plane, manifest) for manifest in case.nodes]
    pods = [await create(plane, manifest) for manifest in (*case.running, case.pod)]
    try:
        answer = await answer_for(plane, notes, pods[-1], nodes[-1]["metadata"]["name"])
    finally:
        await remove(plane, pods, nodes)

    assert answer.fits == set(case.fits.split()), answer
    assert set(answer.reasons or ()) == {REASONS.get(text, text) for text in case.reasons}, answer


async def test_an_api_server_refuses_two_constraints_over_one_label(plane: ControlPlane) -> None:
    [name] = NOT_STORED

    with pytest.raises(InvalidError, match="Duplicate value"):
        await create(plane, CASES[name].pod)


async def create(plane: ControlPlane, manifest: Json) -> Json:
    """Create a pod in the state that the case gives it."""
    metadata = dict(manifest["metadata"])
    metadata.pop("uid")
    deleted = metadata.pop("deletionTimestamp", "")
    grace_s = metadata.pop("deletionGracePeriodSeconds", None)
    pod = await create_pod(plane, {**manifest, "metadata": metadata})
    if deleted:
        await plane.kube.delete(path_of(pod), grace_s=grace_s)
    return pod
