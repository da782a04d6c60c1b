"""Pods that name GPUs themselves while no webhook runs, on a closed and on an open node."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.e2e.open_runtime.conftest import CLOSED, OPEN
from tests.support.stack import Stack, gpu_pod, running, vgpu
from tests.support.waiting import until

VISIBLE = "GpuVisibleWithoutLease"
PRIVILEGED = "GpuVisibleToPrivileged"
BY_VARIABLE = {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
BY_IMAGE = {"sim.leasehold.dev/image-env": "CUDA_VERSION=13.1,NVIDIA_VISIBLE_DEVICES=all"}
BY_ANNOTATION = {"nvidia.cdi.k8s.io/container.main": "nvidia.com/gpu=all"}
NAMING: dict[str, tuple[Mapping[str, Any], Mapping[str, str]]] = {
    "variable": (BY_VARIABLE, {}),
    "image": ({}, BY_IMAGE),
    "annotation": ({}, BY_ANNOTATION),
}


def naming(
    name: str,
    node: str,
    container: Mapping[str, Any],
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a pod that requests no GPU and names all of its node's."""
    main = {"name": "main", "image": "tool", "command": ["sleep", "100000"], **container}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": dict(annotations or {})},
        "spec": {"nodeName": node, "containers": [main], "terminationGracePeriodSeconds": 1},
    }


async def reasons(up: Stack, name: str) -> set[str]:
    """Return the reasons of a pod's Events."""
    events = json.loads(await up.kube.read("/api/v1/namespaces/default/events"))["items"]
    return {event["reason"] for event in events if event["involvedObject"]["name"] == name}


async def visible_to(up: Stack, node: str) -> dict[str, str]:
    """Return what the doctor finds about the containers of a node."""
    done = await up.leasehold("doctor", "--node", node, "-o", "json")
    findings = json.loads(done.out)["findings"]
    (visible,) = [finding for finding in findings if finding["check"] == "visible-gpus"]
    assert isinstance(visible, dict)
    return visible


@pytest.mark.parametrize("way", NAMING)
async def test_a_pod_that_names_gpus_sees_none_on_a_closed_node_and_is_reported_on_an_open_one(
    up: Stack, way: str
) -> None:
    container, annotations = NAMING[way]
    await up.create(gpu_pod("leased", vgpu(memory=1000), nodeSelector=of(OPEN)))
    await up.until("leased", running)
    for node in (CLOSED, OPEN):
        await up.create(naming(f"{way}-{node}", node, container, annotations))
        await up.until(f"{way}-{node}", running)

    closed, opened, leased = [
        await up.exec(name, "nvidia-smi", "-L")
        for name in (f"{way}-{CLOSED}", f"{way}-{OPEN}", "leased")
    ]
    assert "No devices were found" in closed.err
    assert [shown.out.count("GPU-") for shown in (closed, opened, leased)] == [0, 2, 1], leased

    await until(lambda: reasons(up, f"{way}-{OPEN}"), lambda written: VISIBLE in written)
    shown = await visible_to(up, OPEN)
    assert shown["outcome"] == "fail"
    assert f"default/{way}-{OPEN}: container main can open GPU 0, 1 without" in shown["text"]
    assert "leased" not in shown["text"]
    assert (await visible_to(up, CLOSED))["outcome"] == "ok"
    for name in (f"{way}-{CLOSED}", "leased"):
        assert not {VISIBLE, PRIVILEGED} & await reasons(up, name)


async def test_a_privileged_pod_is_reported_as_one_unless_its_namespace_may_see_devices(
    up: Stack,
) -> None:
    container = {"securityContext": {"privileged": True}}
    label = {"leasehold.dev/sees-devices": "true"}
    await up.kube.create(
        "/api/v1/namespaces", {"metadata": {"name": "monitoring", "labels": label}}
    )
    exempt = naming("exporter", CLOSED, container) | {"apiVersion": "v1"}
    await up.kube.create("/api/v1/namespaces/monitoring/pods", exempt)
    await up.create(naming("root", CLOSED, container))

    await until(lambda: reasons(up, "root"), lambda written: PRIVILEGED in written)

    shown = await visible_to(up, CLOSED)
    assert shown["outcome"] == "warn"
    assert "default/root: container main is privileged" in shown["text"]
    assert "exporter" not in shown["text"]
    lines = await up.metrics()
    assert f'leasehold_violations{{reason="{PRIVILEGED}"}} 1.0' in lines


async def test_agents_that_restart_do_not_report_pods_with_leases(up: Stack) -> None:
    await up.create(gpu_pod("leased", vgpu(memory=1000), nodeSelector=of(OPEN)))
    await up.until("leased", running)
    await up.create(naming("named", OPEN, BY_VARIABLE))
    await up.until("named", running)
    (checkpoint,) = up.root.glob(f"agents/{OPEN}/checkpoint.json")

    up.kill(f"agent-{OPEN}")
    checkpoint.unlink()

    await until(lambda: reasons(up, "named"), lambda written: VISIBLE in written)
    assert VISIBLE not in await reasons(up, "leased")


def of(node: str) -> dict[str, str]:
    """Return the selector of a node."""
    return {"kubernetes.io/hostname": node}
