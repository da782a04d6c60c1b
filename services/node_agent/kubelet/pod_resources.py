"""The kubelet's PodResources API: which container holds which devices."""

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from proto.podresources import api_pb2, api_pb2_grpc
from services.node_agent.allocate.pod_resolution import Holding, PodResources
from shared.model.errors import UnavailableError

TIMEOUT_S = 10.0
"""A kubelet on a busy machine takes seconds, and a refused Allocate fails its pod for good."""
RETRY_S = 0.02
MAX_RECEIVED_BYTES = 64 * 1024 * 1024
_AGAIN = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE})
_OPTIONS = (
    ("grpc.default_authority", "localhost"),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class KubeletPodResources:
    """One kept connection; an async context manager."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(f"unix:{self.socket}", options=_OPTIONS)
        self._stub = api_pb2_grpc.PodResourcesListerStub(self._channel)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def list_holdings(self) -> PodResources:
        """Return everything held.

        The kubelet allows ten calls at once and a hundred a second: a refusal for that is repeated
        until `TIMEOUT_S` is over. Raises UnavailableError if there is no answer by then.
        """
        last: grpc.aio.AioRpcError | None = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    try:
                        return _read(await self._stub.List(api_pb2.ListPodResourcesRequest()))
                    except grpc.aio.AioRpcError as error:
                        last = error
                        if error.code() not in _AGAIN:
                            break
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            pass
        said = last.details() if last is not None else f"no answer within {TIMEOUT_S:g} s"
        raise UnavailableError(f"the kubelet's PodResources at {self.socket}: {said}") from last


def _read(answer: api_pb2.ListPodResourcesResponse) -> PodResources:
    held: dict[tuple[str, str, str, str], set[str]] = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                key = (pod.namespace, pod.name, container.name, devices.resource_name)
                held.setdefault(key, set()).update(devices.device_ids)
    return PodResources(
        holdings=tuple(Holding(*key, device_ids=frozenset(ids)) for key, ids in held.items()),
        pods=frozenset((pod.namespace, pod.name) for pod in answer.pod_resources),
    )
