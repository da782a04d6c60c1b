"""Annotations that are changed too late, on a real API server with the manifests' policies."""

import asyncio
import subprocess

import pytest

from services.webhook.registration import admission_policies
from shared.model.names import EXPECTED_RUN_TIME, ISOLATION, MAX_RUN_TIME
from tests.real.control_plane import ControlPlane, control_plane, missing
from tests.real.leasehold import collection
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

PODS = "/api/v1/namespaces/default/pods"


async def annotate(plane: ControlPlane, *words: str) -> str:
    """Return the warnings of `kubectl annotate pod`."""
    command = ("kubectl", f"--kubeconfig={plane.kubeconfig}", "annotate", "pod", *words)
    run = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=True
    )
    return run.stderr


async def test_kubectl_prints_the_warning_for_a_placed_pod_only() -> None:
    async with control_plane() as plane:
        for policy in admission_policies():
            await plane.create(collection(policy), policy)
        spec = {"containers": [{"name": "main", "image": "pause"}]}
        await plane.create(PODS, {"metadata": {"name": "waiting"}, "spec": spec})
        placed = {"metadata": {"name": "placed"}, "spec": spec | {"nodeName": "node-0"}}
        await plane.create(PODS, placed)

        async def warnings() -> str:
            """The API server needs a moment to see its policies."""
            await annotate(plane, "placed", f"{MAX_RUN_TIME}-")
            return await annotate(plane, "placed", f"{MAX_RUN_TIME}=2h")

        shown = await until(warnings, bool)
        others = [
            await annotate(plane, "placed", f"{MAX_RUN_TIME}=2h", "mine=x", "--overwrite"),
            await annotate(plane, "waiting", f"{ISOLATION}=strict"),
        ]
        two = await annotate(plane, "placed", f"{EXPECTED_RUN_TIME}=1h", f"{ISOLATION}=strict")

    assert shown.startswith(
        "Warning: Validation failed for ValidatingAdmissionPolicy 'leasehold-late-annotations' "
        "with binding 'leasehold-late-annotations': the change of leasehold.dev/max-run-time has "
    )
    assert "set spec.activeDeadlineSeconds to fewer seconds" in shown
    assert others == ["", ""]
    assert f"change of {ISOLATION}, {EXPECTED_RUN_TIME} has no effect" in two
    assert "activeDeadlineSeconds" not in two
