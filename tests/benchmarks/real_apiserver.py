"""A real API server as the source of pods: nodes and pods are created, and deleted at the end."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Self

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

    def __init__(self, kube: KubernetesClient, scheduler: str) -> None:
        self.kube = kube
        self.scheduler = scheduler
        self.namespace = f"pace-{uuid.uuid4().hex[:6]}"
        self.bound: dict[str, float] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, kubeconfig: Path, nodes: int, scheduler: str) -> AsyncIterator[Self]:
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
                    await _each(range(nodes), api.delete_node)
                    await kube.delete(f"{NAMESPACES}/{api.namespace}")

    async def create_node(self, number: int) -> None:
        """Create a node that is ready, or take over one that a broken run left."""
        node = node_object(number)
        status = node.pop("status")
        status["allocatable"] |= AMOUNTS
        status["capacity"] = status["allocatable"]
        status["conditions"] = [{"type": "Ready", "status": "True"}]
        with contextlib.suppress(KubernetesConflictError):
            del node["metadata"]["uid"], node["metadata"]["resourceVersion"]
            await self.kube.create(NODES, node)
        name = node["metadata"]["name"]
        await self.kube.patch_merge(f"{NODES}/{name}/status", {"status": status})

    async def delete_node(self, number: int) -> None:
        """Delete a node."""
        await self.kube.delete(f"{NODES}/{node_object(number)['metadata']['name']}")

    async def create_pods(self, run: str, numbers: range) -> None:
        """Create the pods side by side."""

        async def create(number: int) -> None:
            pod = pod_object(number, run)
            pod["metadata"] = {"name": pod["metadata"]["name"]}
            pod["spec"]["schedulerName"] = self.scheduler
            pod["spec"]["tolerations"] = [{"operator": "Exists"}]
            await self.kube.create(f"{NAMESPACES}/{self.namespace}/pods", pod)

        await _each(numbers, create)

    def calls(self) -> int:
        """A real API server's requests are not counted."""
        return 0

    async def watch(self) -> None:
        """Note when each pod has a node."""
        path, decode = f"{NAMESPACES}/{self.namespace}/pods", msgspec.json.decode
        rest = b""
        async with self.kube.watch(path, query={}, silence_s=3600) as stream:
            while data := await stream.read():
                *lines, rest = (rest + data).split(b"\n")
                now = time.perf_counter()
                for pod in (decode(line)["object"] for line in lines):
                    if pod["spec"].get("nodeName"):
                        self.bound.setdefault(pod["metadata"]["name"], now)


async def _each(numbers: range, act: Callable[[int], Awaitable[None]]) -> None:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with slots:
            await act(number)

    await asyncio.gather(*(one(number) for number in numbers))
