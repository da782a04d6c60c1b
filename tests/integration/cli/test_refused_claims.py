"""`explain` of a pod that waits for ResourceClaims shows why Leasehold refuses them."""

import asyncio
from typing import Any

import msgspec

from services.cli.api_client import KubernetesApi
from services.cli.inspect.explanation import explanation_of
from services.cli.inspect.refused_claims import refused_claim_lines
from services.cli.pod_summary import summary_of
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.types import ApiPod
from shared.model.requests.claim import DRIVER, LEASED, REFUSED
from tests.support.simcluster.apiserver import api_server
from tests.support.snapshots import OURS

WHY = "GPU gpu-0 has 2000 MiB left, and the claim is for 4000"
ALLOCATED = ("driver", "pool", "device")
REQUESTS = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu"}}]}}


def condition(type_: str, message: str) -> dict[str, Any]:
    return {"type": type_, "status": "True", "reason": "TooLarge", "message": message}


def device(name: str, driver: str, *conditions: dict[str, Any]) -> dict[str, Any]:
    return {"driver": driver, "pool": "n", "device": name, "conditions": list(conditions)}


POD = {
    "metadata": {"name": "train", "namespace": "default", "uid": "u"},
    "spec": {
        "schedulerName": "default-scheduler",
        "containers": [{"name": "main"}],
        "resourceClaims": [
            {"name": "named", "resourceClaimName": "shared"},
            {"name": "made", "resourceClaimTemplateName": "t"},
            {"name": "gone", "resourceClaimName": "gone"},
        ],
    },
    "status": {
        "phase": "Pending",
        "resourceClaimStatuses": [{"name": "made", "resourceClaimName": "train-made"}],
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "claims not bound"}],
    },
}
DEVICES = {
    "shared": [
        device("gpu-0", DRIVER, condition(REFUSED, WHY)),
        device("gpu-1", DRIVER, condition(REFUSED, WHY)),
        device("nic", "nic.example.com", condition(REFUSED, "of another driver")),
    ],
    "train-made": [device("gpu-2", DRIVER, condition(LEASED, "leased"))],
}


async def test_the_reason_of_a_refused_claim_is_beside_the_schedulers() -> None:
    pod = summary_of(msgspec.convert(POD, ApiPod))
    async with api_server() as api:
        for name, devices in DEVICES.items():
            claim = {"metadata": {"name": name, "namespace": "default"}, "spec": REQUESTS}
            api.store.create("resourceclaims", claim)
            results = [{"request": "gpu", **{k: it[k] for k in ALLOCATED}} for it in devices]
            status = {
                "status": {"allocation": {"devices": {"results": results}}, "devices": devices}
            }
            api.store.patch("resourceclaims", "default", name, status, subresource="status")
        server = KubernetesApi(load_credentials(api.kubeconfig))
        lines = await asyncio.to_thread(lambda: tuple(refused_claim_lines(server, pod)))

    explained = explanation_of(pod, None, OURS, claims=lines)

    assert lines == (
        f"claim       shared was allocated, and Leasehold refuses it: {WHY} (TooLarge)",
    )
    assert explained.text.endswith("it reports: claims not bound")
    assert explained.lines == lines
