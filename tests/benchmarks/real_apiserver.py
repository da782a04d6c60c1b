"""A real API server as the source of pods: nodes and pods are created, and deleted at the end."""

import asyncio
import contextlib
import time
import uuid

import msgspec

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import KubernetesConflictError
from shared.kubernetes.kubeconfig import read_kubeconfig
from tests.benchmarks.trivial_apiserver import node_object, pod_object

NODES, NAMESPACES = "/api/v1/nodes", "/api/v1/namespaces"
AT_ONCE = 32
AMOUNTS = {"volcano.sh/vgpu-memory": "1000000", "volcano.sh/vgpu-cores": "800"}
"""What other schedulers count of a node's devices."""


class RealApi:
    """Creates pods in a namespace of its own and watches it for their nodes."""

    def __init__(self, kube, scheduler):
        self.kube, self.scheduler, self.bound = kube, scheduler, {}
        self.namespace = f"pace-{uuid.uuid4().hex[:6]}"

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, kubeconfig, nodes, scheduler):
        """Create the namespace and the nodes, and delete them at the end."""
        async with KubernetesClient(read_kubeconfig(kubeconfig)) as kube:
            api = cls(kube, scheduler)
            await kube.create(NAMESPACES, {"metadata": {"name": api.namespace}})
            accounts = f"{NAMESPACES}/{api.namespace}/serviceaccounts"
            with contextlib.suppress(KubernetesConflictError):  # its controller was faster
                await kube.create(accounts, {"metadata": {"name": "default"}})
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(api.watch())
                try:
                    await _each(range(nodes), api.create_node)
                    yield api
                finally:
                    watching.cancel()
                    await _each(range(nodes), lambda n: kube.delete(f"{NODES}/node-{n}"))
                    await kube.delete(f"{NAMESPACES}/{api.namespace}")

    async def create_node(self, number):
        """Create a node that is ready, or take over one that a broken run left."""
        node = node_object(number)
        status, name = node.pop("status"), node["metadata"]["name"]
        status["allocatable"] |= AMOUNTS
        status["capacity"] = status["allocatable"]
        status["conditions"] = [{"type": "Ready", "status": "True"}]
        del node["metadata"]["uid"], node["metadata"]["resourceVersion"]
        with contextlib.suppress(KubernetesConflictError):
            await self.kube.create(NODES, node)
        await self.kube.patch_merge(f"{NODES}/{name}/status", {"status": status})

    async def create_pods(self, run, numbers):
        """Create the pods side by side."""

        async def create(number):
            pod = pod_object(number, run)
            pod["metadata"] = {"name": pod["metadata"]["name"]}
            pod["spec"] |= {"schedulerName": self.scheduler}
            pod["spec"] |= {"tolerations": [{"operator": "Exists"}]}
            await self.kube.create(f"{NAMESPACES}/{self.namespace}/pods", pod)

        await _each(numbers, create)

    def calls(self):
        """A real API server's requests are not counted."""
        return 0

    async def watch(self):
        """Note when each pod has a node."""
        rest, path = b"", f"{NAMESPACES}/{self.namespace}/pods"
        async with self.kube.watch(path, query={}, silence_s=3600) as stream:
            while data := await stream.read():
                *lines, rest = (rest + data).split(b"\n")
                now = time.perf_counter()
                for pod in (msgspec.json.decode(line)["object"] for line in lines):
                    if pod["spec"].get("nodeName"):
                        self.bound.setdefault(pod["metadata"]["name"], now)


async def _each(numbers, act):
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(number):
        async with slots:
            await act(number)

    await asyncio.gather(*(one(number) for number in numbers))
