"""The kubelet's PodResources API: which container holds which devices, also by ResourceClaims."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Self

import grpc

from proto.podresources import api_pb2, api_pb2_grpc
from services.node_agent.kubelet.pods import ClaimHolding, Holding, PodResources
from shared.model.claim import DRIVER
from shared.model.errors import UnavailableError

TIMEOUT_S = 10.0
"""A busy kubelet takes seconds, and a refused Allocate fails its pod permanently."""
RETRY_S = 0.02
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
    """One persistent connection."""

    def __init__(self, socket: Path, channel: grpc.aio.Channel) -> None:
        self.socket = socket
        self._stub = api_pb2_grpc.PodResourcesListerStub(channel)

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, socket: Path) -> AsyncIterator[Self]:
        """Connect, until the context exits."""
        async with grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS) as channel:
            yield cls(socket, channel)

    async def list_holdings(self) -> PodResources:
        """Return the devices of every container.

        The kubelet allows 10 calls at once and 100 per second; a call beyond that is retried for
        `TIMEOUT_S`. Raises UnavailableError if there is no response by then.
        """
        reason: str | None = f"no answer within {TIMEOUT_S:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    try:
                        return _decode(await self._stub.List(api_pb2.ListPodResourcesRequest()))
                    except grpc.aio.AioRpcError as error:
                        reason = error.details()
                        if error.code() not in _RETRYABLE:
                            break
                    await asyncio.sleep(RETRY_S)
        raise UnavailableError(f"the kubelet's PodResources at {self.socket}: {reason}")


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
        claims=frozenset(each for pod in response.pod_resources for each in _claims_of(pod)),
        pods=frozenset((pod.namespace, pod.name) for pod in response.pod_resources),
    )
