"""What kube-scheduler, the kubelet and ResourceClaims send: no 5xx, no traceback, no dead service.

`--hypothesis-profile=fuzz` tries 2,000 inputs per test, as in `test_any_input`.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.claims.claim_shares import reservation_of
from services.extender.server import application
from services.node_agent.dra.resource_claims import generation_of_claim, results_on
from shared.credentials.serving_files import ServingFiles
from shared.kubelet_api.dra import api_pb2 as dra
from shared.kubernetes.resource_claims import ApiResourceClaim, allocated_claim
from shared.model.errors import RequestError
from shared.model.leases.lease_copy import copy_of, load_lease
from shared.model.names import Namespace, NodeName
from shared.model.requests.claim import CORES, DRIVER, LEASED, MEMORY
from shared.runtime import health
from tests.integration.fuzz.test_any_input import any_machine
from tests.support.extender import ExtenderWorld
from tests.support.fuzz.in_thread import running_in_thread, without_tracebacks
from tests.support.fuzz.inputs import as_json, bodies, changed, texts
from tests.support.node_agent.agent import lease_of
from tests.support.node_agent.claims import cluster_with_claims, registered
from tests.support.servers.tls import Made

NAME = "kube-scheduler"
POD = {
    "metadata": {"name": "train", "namespace": "team-a", "uid": "u-1", "annotations": {}},
    "spec": {
        "schedulerName": "leasehold-full",
        "containers": [
            {
                "name": "c",
                "resources": {
                    "limits": {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3000"},
                    "requests": {"cpu": "500m"},
                },
            }
        ],
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}],
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
    },
}
FILTER = {"Pod": POD, "NodeNames": ["n0", "n1", "other"]}
BIND = {"PodName": "train", "PodNamespace": "team-a", "PodUID": "u-1", "Node": "n0"}
CLAIM: dict[str, Any] = {
    "metadata": {"name": "gpu", "namespace": "team-a", "uid": "c-1", "resourceVersion": "7"},
    "status": {
        "allocation": {
            "allocationTimestamp": "2026-11-23T02:42:03Z",
            "devices": {
                "results": [
                    {
                        "request": "gpu",
                        "driver": DRIVER,
                        "pool": "node-0",
                        "device": "gpu-1",
                        "shareID": "s-1",
                        "consumedCapacity": {MEMORY: "3000Mi", CORES: "30"},
                        "bindingConditions": [LEASED],
                    }
                ]
            },
        },
        "reservedFor": [{"resource": "pods", "name": "train", "uid": "u-1"}],
        "devices": [
            {
                "driver": DRIVER,
                "pool": "node-0",
                "device": "gpu-1",
                "conditions": [{"type": LEASED, "status": "True"}],
                "data": copy_of(lease_of("c-1", dialect="")),
            }
        ],
    },
}
SERVICE = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
METHODS = ("NodePrepareResources", "NodeUnprepareResources")
Call = Callable[[Any], Any]


@asynccontextmanager
async def extender_port(folder: Path) -> AsyncIterator[Call]:
    """Serve an extender over TLS; yields a function that sends it a request."""
    made = Made(folder)
    world = ExtenderWorld()
    tls = ServingFiles(*made.issue("extender"), made.ca)
    pages = application(world.extender, NAME)
    client = ssl.create_default_context(cafile=str(made.ca))
    client.load_cert_chain(*made.issue(NAME, NAME))
    connector = aiohttp.TCPConnector(ssl=client)
    loop = asyncio.get_running_loop()
    async with (
        health.served(pages, "127.0.0.1:0", flag="--listen", tls=tls.current_context) as address,
        aiohttp.ClientSession(f"https://{address}", connector=connector) as session,
    ):

        async def send(method: str, path: str, body: bytes) -> int:
            async with session.request(method, path, data=body) as response:
                await response.read()
                return response.status

        yield lambda request: asyncio.run_coroutine_threadsafe(send(*request), loop).result(20)


@pytest.fixture(scope="module")
def extender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    health.suppress_bad_request_tracebacks()  # as each service does
    folder = tmp_path_factory.mktemp("tls")
    with without_tracebacks(), running_in_thread(extender_port(folder)) as send:
        yield send


@any_machine
@given(
    method=st.sampled_from(("POST", "POST", "POST", "GET", "PUT", "ODD")),
    path=st.sampled_from(("/filter", "/prioritize", "/bind", "/", "/other")),
    body=bodies(FILTER, BIND),
)
def test_any_request_to_the_extender_is_answered(
    extender: Call, method: str, path: str, body: bytes
) -> None:
    assert extender((method, path, body)) < 500

    good = {"/bind": BIND}.get(path, FILTER)
    assert extender(("POST", "/bind" if good is BIND else "/filter", as_json(good))) == 200


@asynccontextmanager
async def claim_socket() -> AsyncIterator[Call]:
    """Run a node's agent; yields a function that calls its DRA driver as the kubelet does."""
    loop = asyncio.get_running_loop()
    async with cluster_with_claims() as cluster, cluster.running():
        await registered(cluster)
        socket = cluster.settings.kubelet_dir / "plugins" / DRIVER / "dra.sock"
        options = (("grpc.default_authority", "localhost"),)
        async with grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:

            async def call(method: str, request: bytes) -> bytes | grpc.StatusCode:
                try:
                    return bytes(await channel.unary_unary(f"/{SERVICE}/{method}")(request))
                except grpc.aio.AioRpcError as error:
                    return error.code()

            yield lambda sent: asyncio.run_coroutine_threadsafe(call(*sent), loop).result(20)


@pytest.fixture(scope="module")
def driver() -> Iterator[Call]:
    with without_tracebacks(), running_in_thread(claim_socket()) as call:
        yield call


def _encodable(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


@st.composite
def claim_calls(draw: st.DrawFn) -> bytes:
    """A request for up to three claims."""
    names = texts.filter(_encodable).map(lambda text: text[:3_000])
    claims = st.builds(dra.Claim, namespace=names | st.just("default"), uid=names, name=names)
    found = draw(st.lists(claims, max_size=3))
    return bytes(dra.NodePrepareResourcesRequest(claims=found).SerializeToString())


@any_machine
@given(method=st.sampled_from(METHODS), request=claim_calls())
@example(
    method="NodeUnprepareResources",
    request=dra.NodeUnprepareResourcesRequest(claims=[dra.Claim(uid="\0")]).SerializeToString(),
)
def test_any_call_of_the_kubelet_is_answered_for_each_claim(
    driver: Call, method: str, request: bytes
) -> None:
    driver((method, request))

    asked = dra.NodePrepareResourcesRequest(
        claims=[dra.Claim(namespace="default", name="none", uid="u-1")]
    )
    reply = dra.NodePrepareResourcesResponse.FromString(
        driver((METHODS[0], asked.SerializeToString()))
    )
    assert "was deleted" in reply.claims["u-1"].error


@any_machine
@given(item=changed(CLAIM))
def test_any_claim_is_read_or_refused(item: Any) -> None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError):  # as the API server would refuse it
        claim = msgspec.json.decode(as_json(item), type=ApiResourceClaim)
        with suppress(RequestError):
            results_on(claim, NodeName("node-0"))
            generation_of_claim(claim)
            allocated = allocated_claim(claim)
            if allocated is not None:
                reservation_of(allocated, None)


@any_machine
@given(copy=changed(CLAIM["status"]["devices"][0]["data"]))
def test_any_copy_of_a_lease_is_read_or_refused(copy: Any) -> None:
    with suppress(RequestError):
        load_lease(as_json(copy).decode(errors="replace"), namespace=Namespace("a"), name="b")
