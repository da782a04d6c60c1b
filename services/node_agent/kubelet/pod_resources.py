"""The kubelet's PodResources API: which container holds which devices."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Self, TypeVar

import grpc

from services.node_agent.kubelet.pods import (
    AllocatableResources,
    ClaimHolding,
    Holding,
    PodResources,
)
from shared.dialects.advertised import NumaNodes
from shared.kubelet_api.podresources import api_pb2, api_pb2_grpc
from shared.model.errors import UnavailableError
from shared.model.requests.claim import DRIVER

Request = TypeVar("Request")
Response = TypeVar("Response")
TIMEOUT_S = 10.0
"""A busy kubelet takes seconds, and a refused Allocate fails its pod permanently."""
RETRY_S = 0.02
"""Pause after PodResources could not be read: a kubelet that restarts makes its socket anew."""
MAX_RECEIVED_BYTES = 64 * 1024 * 1024
_RETRYABLE = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE})
_OPTIONS = (
    ("grpc.default_authority", "localhost"),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class KubeletPodResources:
    """Calls raise UnavailableError without a response."""

    def __init__(self, socket: Path, channel: grpc.aio.Channel) -> None:
        self.socket = socket
        self.silent_reason = ""
        self._stub = api_pb2_grpc.PodResourcesListerStub(channel)

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, socket: Path) -> AsyncIterator[Self]:
        async with grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS) as channel:
            yield cls(socket, channel)

    async def list_holdings(self) -> PodResources:
        return _decode(await self._call(self._stub.List, api_pb2.ListPodResourcesRequest()))

    async def list_allocatable(self) -> AllocatableResources:
        request = api_pb2.AllocatableResourcesRequest()
        response = await self._call(self._stub.GetAllocatableResources, request)
        numa: dict[str, dict[str, NumaNodes]] = {}
        for devices in response.devices:  # a device of several NUMA nodes occurs once for each
            nodes = {node.ID for node in devices.topology.nodes}
            ids = numa.setdefault(devices.resource_name, {})
            for name in devices.device_ids:
                ids[name] = tuple(sorted(nodes.union(ids.get(name, ()))))
        return AllocatableResources(numa=numa, cpus=frozenset(response.cpu_ids))

    async def _call(
        self, method: Callable[[Request], Awaitable[Response]], request: Request
    ) -> Response:
        """The kubelet allows 10 calls at once and 100 per second, and rejects others."""
        reason: str | None = f"no answer within {TIMEOUT_S:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    try:
                        response = await method(request)
                    except grpc.aio.AioRpcError as error:
                        reason = error.details()
                        if error.code() not in _RETRYABLE:
                            break
                    else:
                        self.silent_reason = ""
                        return response
                    await asyncio.sleep(RETRY_S)
        self.silent_reason = f"the kubelet's PodResources at {self.socket}: {reason}"
        raise UnavailableError(self.silent_reason)


def _claims_of(pod: api_pb2.PodResources) -> Iterator[ClaimHolding]:
    for container in pod.containers:
        for claim in container.dynamic_resources:
            for device in claim.claim_resources:
                if device.driver_name == DRIVER:
                    yield ClaimHolding(
                        namespace=pod.namespace,
                        pod=pod.name,
                        claim=claim.claim_name,
                        device=device.device_name,
                        share_id=device.share_id,
                    )


def _decode(response: api_pb2.ListPodResourcesResponse) -> PodResources:
    ids_by_key: dict[tuple[str, str, str, str], set[str]] = {}
    for pod in response.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                key = (pod.namespace, pod.name, container.name, devices.resource_name)
                ids_by_key.setdefault(key, set()).update(devices.device_ids)
    return PodResources(
        holdings=tuple(Holding(*key, device_ids=frozenset(ids)) for key, ids in ids_by_key.items()),
        cpus={
            (pod.namespace, pod.name): frozenset(
                cpu for container in pod.containers for cpu in container.cpu_ids
            )
            for pod in response.pod_resources
        },
        claims=frozenset(claim for pod in response.pod_resources for claim in _claims_of(pod)),
        pods=frozenset((pod.namespace, pod.name) for pod in response.pod_resources),
    )
