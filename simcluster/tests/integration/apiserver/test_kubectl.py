"""Stock kubectl against the simulated API server: the commands that the guides print."""

from functools import partial

import pytest

from simcluster.apimachinery.objects import Json
from tests.support.dialects import guides
from tests.support.kubernetes.kubectl import Kubectl, kubectl_on
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.echo_runtime import Echo

pytestmark = pytest.mark.kubectl
kubectl = kubectl_on(partial(api_server, runtime=Echo))


def bind(api: ApiUnderTest, name: str) -> None:
    pod: Json = api.store.read("pods", "default", name)
    bound = {**pod, "spec": {**pod["spec"], "nodeName": "node-0"}}
    api.store.update("pods", bound, subresource="binding")


async def test_the_guides_pod_is_applied_read_and_deleted(kubectl: Kubectl) -> None:
    assert "pod/gpu-pod1 created" in await kubectl.run("apply -f -", guides.VOLCANO_GPU_POD_1)
    version = kubectl.api.store.version
    await kubectl.run("apply -f -", guides.VOLCANO_GPU_POD_1)
    assert kubectl.api.store.version == version

    shown = await kubectl.run("get pod gpu-pod1 -oyaml")
    assert 'volcano.sh/gpu-memory: "1024"' in shown
    assert "schedulerName: volcano" in shown
    table = (await kubectl.run("get pods")).splitlines()
    assert table[0].split() == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert table[1].split()[:4] == ["gpu-pod1", "0/1", "Pending", "0"]

    assert "deleted" in await kubectl.run("delete pod gpu-pod1")
    assert "NotFound" in await kubectl.run("get pod gpu-pod1", code=1)


async def test_a_pod_is_described_with_its_events(kubectl: Kubectl) -> None:
    await kubectl.run("apply -f -", guides.VOLCANO_GPU_POD_1)
    pod = kubectl.api.store.read("pods", "default", "gpu-pod1")
    involved = {"kind": "Pod", "namespace": "default", "name": "gpu-pod1",
                "uid": pod["metadata"]["uid"], "apiVersion": "v1"}  # fmt: skip
    now = kubectl.api.store.now()
    kubectl.api.store.create(
        "events",
        {
            "metadata": {"name": "gpu-pod1.1", "namespace": "default"},
            "involvedObject": involved,
            "type": "Warning",
            "reason": "FailedScheduling",
            "message": "0/3 nodes are available",
            "source": {"component": "leasehold"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        },
    )

    described = await kubectl.run("describe pod gpu-pod1")

    assert "FailedScheduling" in described
    assert "0/3 nodes are available" in described
    assert "FailedScheduling" in await kubectl.run("get events")


async def test_generated_objects_are_created(kubectl: Kubectl) -> None:
    await kubectl.run("create namespace team")
    await kubectl.run("create configmap settings --from-literal=a=b -n team")
    await kubectl.run("create secret generic password --from-literal=p=q -n team")

    assert kubectl.api.store.read("configmaps", "team", "settings")["data"] == {"a": "b"}
    assert kubectl.api.store.read("secrets", "team", "password")["data"] == {"p": "cQ=="}
    await kubectl.run("delete namespace team")
    assert kubectl.api.store.find("configmaps", "team", "settings") is None


async def test_a_node_is_shown_and_described(kubectl: Kubectl) -> None:
    allocatable = {"cpu": "4", "memory": "8Gi", "pods": "110", "volcano.sh/vgpu-number": "10"}
    status = {"allocatable": allocatable, "capacity": allocatable,
              "conditions": [{"type": "Ready", "status": "True"}]}  # fmt: skip
    kubectl.api.store.create("nodes", {"metadata": {"name": "node-0"}, "status": status})

    assert 'volcano.sh/vgpu-number: "10"' in await kubectl.run("get node node-0 -oyaml")
    assert "volcano.sh/vgpu-number" in await kubectl.run("describe node node-0")
    assert (await kubectl.run("get nodes")).splitlines()[1].split()[:2] == ["node-0", "Ready"]
    await kubectl.run("cordon node-0")
    assert kubectl.api.store.read("nodes", None, "node-0")["spec"]["unschedulable"] is True


async def test_exec_and_logs_reach_the_container(kubectl: Kubectl) -> None:
    await kubectl.run("apply -f -", guides.VOLCANO_GPU_POD_1)
    bind(kubectl.api, "gpu-pod1")

    assert "default/gpu-pod1/cuda-container" in await kubectl.run("logs gpu-pod1")
    if await kubectl.minor() < 31:
        output = await kubectl.run("exec gpu-pod1 -- env", code=1)
        assert "WebSocket" in output
    else:
        assert "cuda-container env" in await kubectl.run("exec gpu-pod1 -- env")
        await kubectl.run("exec gpu-pod1 -- fail", code=3)
