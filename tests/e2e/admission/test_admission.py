"""Admission end to end: the stack as a user starts it, webhook included."""

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from shared.model.leases.lease_copy import ANNOTATION
from tests.support.stack import KUBECTL, Stack, running, vgpu
from tests.support.waiting import until

ROUNDS = 20
OF_NODE = {"hostUsers": False, "hostNetwork": True}
"""Only kube-scheduler supports both, and here they keep the pod off no node."""
CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"


def asking(name: str, limits: dict[str, int], **spec: object) -> dict[str, Any]:
    main = {"name": "main", "image": "app", "command": ["sleep", "100000"]}
    amounts = {resource: str(amount) for resource, amount in limits.items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [{**main, "resources": {"limits": amounts}}], **spec},
    }


async def test_a_pod_of_the_default_scheduler_runs_because_admission_sets_our_scheduler(
    up: Stack,
) -> None:
    await up.create(asking("train", vgpu(memory=3000)))

    pod = await up.until("train", lambda pod_now: pod_now["status"].get("phase") == "Running")

    assert pod["spec"]["schedulerName"] == "leasehold"


async def test_a_pod_that_names_gpus_while_the_webhook_does_not_respond_sees_none(
    up: Stack,
) -> None:
    pod = asking("named", {})
    pod["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    os.kill(up.pid("webhook"), signal.SIGSTOP)
    try:
        await up.create(pod)
    finally:
        os.kill(up.pid("webhook"), signal.SIGCONT)

    admitted = await up.until("named", running)
    shown = await up.exec("named", "nvidia-smi", "-L")
    assert admitted["spec"]["containers"][0]["env"] == pod["spec"]["containers"][0]["env"]
    assert (shown.out, "No devices were found" in shown.err) == ("", True)


async def test_a_pod_with_a_volume_is_handed_over_and_bound_where_its_volume_is(up: Stack) -> None:
    kind = {
        "metadata": {"name": "disks"},
        "provisioner": "disks.example",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    await up.kube.create("/apis/storage.k8s.io/v1/storageclasses", kind)
    claim = {
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "disks",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    await up.kube.create(CLAIMS, claim)
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    trainer = asking("trainer", vgpu(memory=2500), volumes=volumes)
    trainer["spec"] |= OF_NODE

    await up.create(trainer)

    pod = await up.until("trainer", running)
    assert pod["spec"]["schedulerName"] == "leasehold-full"
    assert pod["metadata"]["labels"]["leasehold.dev/handed-over"] == "node-features"
    bound = json.loads(await up.kube.read(f"{CLAIMS}/data"))
    selected = bound["metadata"]["annotations"]["volume.kubernetes.io/selected-node"]
    assert selected == pod["spec"]["nodeName"]
    explained = await up.leasehold("explain", "trainer")
    assert "share       2500 of" in explained.out
    await up.audit()


async def test_a_pod_that_the_extender_refuses_is_explained_by_its_verdict(up: Stack) -> None:
    await up.create(asking("small", vgpu(memory=1000)))
    await up.until("small", running)
    await up.create(asking("giant", vgpu(2, memory=15000), schedulerName="leasehold-full"))

    explained = await until(
        lambda: up.leasehold("explain", "giant"), lambda done: "has waited" in done.out
    )

    assert "0/1 nodes are available: 1 Insufficient GPU memory" in explained.out


async def test_a_pod_that_waits_for_its_claim_is_in_every_list_with_its_reason(up: Stack) -> None:
    volumes = [{"name": "home", "persistentVolumeClaim": {"claimName": "home"}}]
    notebook = asking("notebook", vgpu(memory=500), volumes=volumes)
    notebook["spec"] |= OF_NODE
    await up.create(notebook)
    missing = 'persistentvolumeclaim "home" not found'
    field = "spec.hostUsers"

    written = json.dumps(missing)[1:-1]
    listed = await until(lambda: up.leasehold("ps", "-o", "json"), lambda done: written in done.out)
    [view] = [pod for pod in json.loads(listed.out)["waiting"] if pod["name"] == "notebook"]
    objects = json.loads(await up.kubectl_out("get", "waitingpods", "notebook", "-o", "json"))
    explained = await up.leasehold("explain", "notebook")
    metrics = await until(
        up.metrics,
        lambda lines: any("waiting_pods{" in line and "KubeScheduler" in line for line in lines),
    )
    pod = await up.until("notebook", lambda now: "conditions" in now["status"])

    [condition] = [c for c in pod["status"]["conditions"] if c["type"] == "PodScheduled"]
    assert view["scheduler_reason"] == condition["message"]
    assert (view["handed_over"], view["code"]) == (field, "KubeScheduler")
    hint = "create the PersistentVolumeClaim home in namespace default"
    assert view["hint"] == hint
    assert objects["status"]["message"].startswith(f"kube-scheduler places it, for {field}: 0/1")
    assert missing in explained.out
    assert hint in explained.out
    assert metrics
    claim = {
        "metadata": {"name": "home"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    await up.kube.create(CLAIMS, claim)
    await up.until("notebook", running)
    await until(lambda: up.leasehold("ps", "-o", "json"), lambda done: written not in done.out)
    await up.audit()


async def test_a_pod_and_one_that_it_repels_never_start_side_by_side_when_created_together(
    up: Stack,
) -> None:
    await up.clear()
    noisy = {"matchLabels": {"app": "noisy"}}
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": noisy}
    repelling = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    beside = 0

    for number in range(ROUNDS):
        quiet = asking(f"quiet-{number}", vgpu(memory=1000), affinity=repelling)
        plain = asking(f"plain-{number}", vgpu(memory=1000))
        plain["metadata"]["labels"] = {"app": "noisy"}
        await asyncio.gather(up.create(quiet), up.create(plain))
        await until(up.pods, lambda pods: any(map(running, pods)))
        pods = await until(up.pods, lambda pods: all(_is_explained(pod) for pod in pods))
        beside += sum(bool(pod["spec"].get("nodeName")) for pod in pods) > 1
        await up.clear()

    assert not beside, f"{beside} of {ROUNDS} rounds"


def _is_explained(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return running(pod) or any(c.get("reason") == "Unschedulable" for c in conditions)


@pytest.mark.kubectl
@pytest.mark.skipif(KUBECTL is None, reason="no kubectl on PATH")
@pytest.mark.parametrize("subresource", ["", "status"])
async def test_a_user_does_not_write_the_lease_that_a_pod_shows(
    up: Stack, subresource: str
) -> None:
    name = f"forged-{subresource or 'pod'}"
    await up.create(asking(name, vgpu(memory=1000)))
    pod = await up.until(name, lambda pod_now: ANNOTATION in pod_now["metadata"]["annotations"])
    patch = json.dumps({"metadata": {"annotations": {ANNOTATION: "{}"}}})
    through = (f"--subresource={subresource}",) if subresource else ()

    done = await up.kubectl("patch", "pod", name, "--type=merge", "-p", patch, *through)

    kept = (await up.pod(name))["metadata"]["annotations"][ANNOTATION]
    assert kept == pod["metadata"]["annotations"][ANNOTATION]
    assert done.code != 0
    assert "annotations of an assignment are changed by Leasehold only" in done.err
