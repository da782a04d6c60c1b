"""The PodResources v1 service: the devices of each container of the active pods."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import grpc

from shared.kubelet_api.podresources import api_pb2, api_pb2_grpc
from simcluster.kubelet.containers.container_spec import PodSpec
from simcluster.kubelet.devices.kubelet_devices import KubeletDevices
from simcluster.kubelet.devices.plugin_client import checked_socket

QUERIES_PER_S = 100.0
BURST = 10.0


class CallRateLimit:
    """The kubelet's rate limit for this socket: bursts of 10, and 100 calls per second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = BURST
        self._at = clock()

    def allows(self) -> bool:
        """Take one token from the bucket; False if it is empty."""
        now = self._clock()
        self._left = min(BURST, self._left + (now - self._at) * QUERIES_PER_S)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class PodResourcesService(api_pb2_grpc.PodResourcesListerServicer):  # type: ignore[misc]
    """Serves the device state; `active` returns the pods that are not finished."""

    def __init__(
        self,
        devices: Callable[[], KubeletDevices],
        active: Callable[[], Iterable[PodSpec]],
        claims: Callable[[PodSpec, str], list[api_pb2.DynamicResource]],
    ) -> None:
        self._devices = devices
        self._active = active
        self._claims = claims
        self._limit = CallRateLimit()

    async def List(  # noqa: N802 - gRPC's name
        self, request: api_pb2.ListPodResourcesRequest, context: grpc.aio.ServicerContext
    ) -> api_pb2.ListPodResourcesResponse:
        """List all active pods, with or without devices, without their init containers."""
        await self._check_rate(context)
        return api_pb2.ListPodResourcesResponse(
            pod_resources=[self._pod_resources(pod) for pod in self._active()]
        )

    async def Get(  # noqa: N802 - gRPC's name
        self, request: api_pb2.GetPodResourcesRequest, context: grpc.aio.ServicerContext
    ) -> api_pb2.GetPodResourcesResponse:
        """Return one active pod's devices."""
        await self._check_rate(context)
        for pod in self._active():
            if (pod.namespace, pod.name) == (request.pod_namespace, request.pod_name):
                return api_pb2.GetPodResourcesResponse(pod_resources=self._pod_resources(pod))
        await context.abort(
            grpc.StatusCode.NOT_FOUND,
            f"pod {request.pod_name} in namespace {request.pod_namespace} not found",
        )
        raise AssertionError("abort always raises")

    async def GetAllocatableResources(  # noqa: N802 - gRPC's name
        self, request: api_pb2.AllocatableResourcesRequest, context: grpc.aio.ServicerContext
    ) -> api_pb2.AllocatableResourcesResponse:
        """Return all healthy devices, allocated or not, each once per NUMA node."""
        await self._check_rate(context)
        devices = self._devices()
        return api_pb2.AllocatableResourcesResponse(
            devices=[
                api_pb2.ContainerDevices(
                    resource_name=name,
                    device_ids=[device_id],
                    topology=api_pb2.TopologyInfo(nodes=nodes),
                )
                for name, device_ids in devices.healthy.items()
                for device_id in sorted(device_ids)
                for nodes in _numa_nodes(devices.numa.get(name, {}).get(device_id, ()))
            ]
        )

    async def _check_rate(self, context: grpc.aio.ServicerContext) -> None:
        if not self._limit.allows():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")

    def _pod_resources(self, pod: PodSpec) -> api_pb2.PodResources:
        devices = self._devices()
        return api_pb2.PodResources(
            name=pod.name,
            namespace=pod.namespace,
            containers=[
                api_pb2.ContainerResources(
                    name=container.name,
                    devices=[
                        api_pb2.ContainerDevices(
                            resource_name=allocation.resource, device_ids=sorted(allocation.devices)
                        )
                        for allocation in devices.container_allocations(pod.uid, container.name)
                    ],
                    dynamic_resources=self._claims(pod, container.name),
                )
                for container in pod.containers
                if not container.runs_to_completion_first
            ],
        )


def _numa_nodes(numa: Iterable[int]) -> list[list[api_pb2.NUMANode]]:
    return [[api_pb2.NUMANode(ID=node)] for node in sorted(numa)] or [[]]


def _clear(socket: Path) -> None:
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)


async def serve_pod_resources(socket: Path, service: PodResourcesService) -> grpc.aio.Server:
    """Listen on the socket; replaces the socket of an earlier process."""
    _clear(socket)
    server = grpc.aio.server()
    api_pb2_grpc.add_PodResourcesListerServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{checked_socket(socket)}")
    await server.start()
    return server
