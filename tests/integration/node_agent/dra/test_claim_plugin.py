"""The DRA driver's sockets answer the calls of a real kubelet 1.36.2, recorded with the answers.

The recorded claim has request `a` for one GPU and request `b` for two.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.node_agent.dra.claim_plugin import ClaimPlugin
from shared.kubelet_api.dra import api_pb2 as dra
from shared.kubelet_api.dra_health import api_pb2 as health
from shared.kubelet_api.dra_health import api_pb2_grpc as health_grpc
from shared.kubelet_api.plugin_registration import api_pb2 as registration
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.node_events import LeaseHolder
from tests.support.build import device
from tests.support.node_agent.node import node_of, snapshot_of
from tests.support.waiting import until

DEVICE = device()

pytestmark = pytest.mark.servers
CALLS = json.loads(Path(__file__).with_name("recorded_claim_calls.json").read_text())
UNCHANGED = {"request_serializer": None, "response_deserializer": None}


def recorded(method: str) -> tuple[bytes, bytes]:
    found = next(call for call in CALLS if call["method"].endswith(f"/{method}"))
    return bytes.fromhex(found["request"]), bytes.fromhex(found["response"])


class RecordedClaims:
    """Prepares the recorded claim."""

    def __init__(self) -> None:
        self.prepared: list[LeaseHolder] = []
        self.unprepared: list[LeaseHolder] = []
        self.refusal: RequestError | UnavailableError | None = None

    async def prepare(self, claim: LeaseHolder) -> Sequence[dra.Device]:
        self.prepared.append(claim)
        if self.refusal is not None:
            raise self.refusal
        answer = dra.NodePrepareResourcesResponse.FromString(recorded("NodePrepareResources")[1])
        return list(answer.claims[claim.pod].devices)

    async def unprepare(self, claim: LeaseHolder) -> None:
        self.unprepared.append(claim)


@asynccontextmanager
async def plugin() -> AsyncIterator[tuple[ClaimPlugin, RecordedClaims, list[str]]]:
    handler = RecordedClaims()
    registered = list[str]()
    preparation: Any = handler
    with tempfile.TemporaryDirectory(prefix="lh-") as directory:
        served = ClaimPlugin(
            node_of(snapshot=snapshot_of(DEVICE)),
            Path(directory),
            preparation,
            on_registered=lambda: registered.append("registered"),
        )
        task = asyncio.create_task(served.run())
        try:
            await until(served.registration_socket.exists)
            yield served, handler, registered
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def call(socket: Path, method: str, request: bytes | None = None) -> bytes:
    path = next(each["method"] for each in CALLS if each["method"].endswith(f"/{method}"))
    async with grpc.aio.insecure_channel(
        f"unix:{socket}", options=(("grpc.default_authority", "localhost"),)
    ) as channel:
        sent = recorded(method)[0] if request is None else request
        answer: bytes = await channel.unary_unary(path, **UNCHANGED)(sent)
    return answer


async def test_the_kubelet_registers_the_driver() -> None:
    async with plugin() as (served, _, registered):
        info = registration.PluginInfo.FromString(await call(served.registration_socket, "GetInfo"))
        before = registration.PluginInfo.FromString(recorded("GetInfo")[1])
        before.endpoint = str(served.endpoint)
        assert info == before
        assert served.unregistered_reason is not None

        await call(served.registration_socket, "NotifyRegistrationStatus")

        assert registered == ["registered"]
        assert served.unregistered_reason is None


async def test_a_refused_registration_is_the_reason_why_the_driver_is_not_served() -> None:
    async with plugin() as (served, _, registered):
        status = registration.RegistrationStatus(plugin_registered=False, error="no version")

        await call(
            served.registration_socket, "NotifyRegistrationStatus", status.SerializeToString()
        )

        assert (served.unregistered_reason, registered) == ("no version", [])


async def test_the_recorded_claim_is_prepared_and_unprepared() -> None:
    async with plugin() as (served, handler, _):
        for method in ("NodePrepareResources", "NodeUnprepareResources"):
            assert await call(served.endpoint, method) == recorded(method)[1]

        [claim] = handler.prepared
        assert (claim.namespace, claim.name) == ("default", "two")
        assert handler.unprepared == [claim]


@pytest.mark.parametrize("error", [RequestError("no lease"), UnavailableError("no reply")])
async def test_a_refusal_is_the_error_of_its_claim(error: RequestError | UnavailableError) -> None:
    async with plugin() as (served, handler, _):
        handler.refusal = error

        answer = dra.NodePrepareResourcesResponse.FromString(
            await call(served.endpoint, "NodePrepareResources")
        )

        [(_, found)] = answer.claims.items()
        assert (found.error, list(found.devices)) == (str(error), [])


async def test_changes_of_health_are_reported_at_once() -> None:
    async with plugin() as (served, _, _):
        options = (("grpc.default_authority", "localhost"),)
        async with grpc.aio.insecure_channel(f"unix:{served.endpoint}", options=options) as channel:
            stream = health_grpc.DRAResourceHealthStub(channel).NodeWatchResources(
                health.NodeWatchResourcesRequest()
            )
            [first] = (await stream.read()).devices
            sick = replace(DEVICE, healthy=False, fault="xid 79")
            served.node.snapshot = snapshot_of(sick)
            for notify in served.node.on_devices:
                notify()
            [second] = (await stream.read()).devices
            stream.cancel()

        assert (first.health, second.health) == (health.HEALTHY, health.UNHEALTHY)
        assert (second.message, second.device.pool_name) == ("it is unhealthy: xid 79", "node-0")


async def test_removed_sockets_are_served_again() -> None:
    async with plugin() as (served, _, _):
        served.registration_socket.unlink()

        await until(served.registration_socket.exists)

        assert await call(served.registration_socket, "GetInfo")
