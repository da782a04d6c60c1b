"""A pod whose amounts of GPUs are all 0 is a pod without GPUs, for every service."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.webhook.pod_admission import SchedulerChoice
from shared.dialects import GPU_RESOURCES
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiPod
from shared.pods.pod_parser import PodParser
from tests.support.webhook.replica import VGPU, cluster, created, pod, replica

CLASS = "deviceclass.resource.kubernetes.io/gpu.leasehold.dev"
FIELDS = {
    "nodeName": "node-0",
    "hostPID": True,
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "affinity": {
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}
            ]
        }
    },
}
NONE_VISIBLE = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}]
CHOICE = SchedulerChoice(handover="leasehold-full", all_pods=True)


def wild(name: str, limits: dict[str, Any]) -> dict[str, Any]:
    """Return a pod that no pod with GPUs may be."""
    made = pod(name, limits, **FIELDS)
    made["spec"]["containers"][0] |= {
        "securityContext": {"privileged": True},
        "env": NONE_VISIBLE,
    }
    return made


@pytest.mark.parametrize("zero", ["0", "0k", 0, "0.0"])
async def test_admission_leaves_it_as_it_is(tmp_path: Path, zero: Any) -> None:
    choice: dict[str, Any] = {"schedulers": CHOICE, "claims": True}
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path, **choice):
        for number, name in enumerate(sorted({*GPU_RESOURCES, CLASS})):
            status, made = await created(client, wild(f"zero-{number}", {name: zero}))

            assert status == 201, made
            spec = made["spec"]
            assert spec["schedulerName"] == "default-scheduler"
            assert spec["containers"][0]["env"] == NONE_VISIBLE
            assert made["metadata"].keys().isdisjoint({"annotations", "labels"})


async def test_zeros_of_other_vendors_beside_a_request_change_nothing(tmp_path: Path) -> None:
    zeros = dict.fromkeys(sorted(GPU_RESOURCES - VGPU.keys() - {"nvidia.com/priority"}), "0")
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path):
        status, made = await created(client, pod(limits=zeros | VGPU))

    assert status == 201, made
    parsed = parse(made)
    assert parsed.request is not None
    assert parsed.request.dialect == "volcano-vgpu"


async def test_a_count_of_0_beside_an_amount_is_denied(tmp_path: Path) -> None:
    async with cluster() as (api, kube, client), replica(api, kube, tmp_path):
        limits = {"nvidia.com/gpu": "0", "nvidia.com/gpumem": "3000"}
        status, denial = await created(client, pod(limits=limits))

    assert status == 400
    assert "nvidia.com/gpu is 0 and needed by nvidia.com/gpumem" in denial["message"]


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        ("500m", "must be a whole number of 0 or more, got 500m"),
        ("-1", "must be a whole number of 0 or more, got -1"),
        ("1E", "is more than any node has"),
        (str(2**63), "is more than any node has"),
        ("two", "is not a Kubernetes quantity"),
    ],
)
@pytest.mark.parametrize("name", sorted(GPU_RESOURCES))
def test_an_amount_that_counts_no_gpus_is_refused_with_its_container(
    name: str, amount: str, words: str
) -> None:
    parsed = parse(pod(limits={name: amount}))

    assert parsed.request_error.startswith(f"container main: {name}")
    assert words in parsed.request_error


@pytest.mark.parametrize("name", sorted(GPU_RESOURCES))
def test_a_watcher_counts_it_as_a_pod_without_gpus(name: str) -> None:
    parsed = parse(pod(limits={name: "0"}))

    assert parsed.request is not None
    assert parsed.request_error == ""
    assert parsed.request.containers == ()


def parse(made: dict[str, Any]) -> Any:
    """Return a pod as a watcher sees it."""
    meta = {"namespace": "default", "uid": "u1", "resourceVersion": "1", **made["metadata"]}
    spec = {**made["spec"], "schedulerName": "volcano"}
    parser = PodParser(frozenset({"volcano"}), Rules())
    return parser.parse(msgspec.convert({"metadata": meta, "spec": spec}, ApiPod))
