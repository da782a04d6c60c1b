"""The extender's HTTPS server: who may call it, and what it replies to odd bodies."""

import ssl
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
import yaml

from services.extender.scheduler_configuration import SchedulerTls, scheduler_configuration
from services.extender.server import application
from services.extender.service import UNKNOWN
from shared.credentials.serving_files import ServingFiles
from shared.runtime import health
from simcluster.scheduler.extender import ExtenderError, SchedulerExtender
from simcluster.scheduler.node_choice import FittingNodes
from tests.support.extender import ExtenderWorld
from tests.support.servers.tls import Made

NAME = "kube-scheduler"
Files = tuple[Path, Path]


class ExtenderServer:
    """An extender behind HTTPS, with its authority."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self.world = ExtenderWorld()
        self.address = ""

    async def post(
        self, verb: str, body: bytes, files: Files | None, *, scheme: str = "https"
    ) -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=str(self.made.ca))
        if files:
            context.load_cert_chain(*files)
        connector = aiohttp.TCPConnector(ssl=context)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(f"{scheme}://{self.address}/{verb}", data=body) as response,
        ):
            return response.status, await response.read()


@pytest.fixture
async def extender_server(tmp_path: Path) -> AsyncIterator[ExtenderServer]:
    started = ExtenderServer(Made(tmp_path))
    tls = ServingFiles(*started.made.issue("extender"), started.made.ca)
    pages = application(started.world.extender, NAME)
    async with health.served(
        pages, "127.0.0.1:0", flag="--listen", tls=tls.current_context
    ) as address:
        started.address = address
        yield started


async def test_kube_scheduler_is_served(extender_server: ExtenderServer) -> None:
    files = extender_server.made.issue(NAME, NAME)
    body = msgspec.json.encode({"Pod": {}, "NodeNames": ["n0"]})

    replies = [await extender_server.post(verb, body, files) for verb in ("filter", "prioritize")]

    assert [status for status, _ in replies] == [200, 400]
    assert set(msgspec.json.decode(replies[0][1])["FailedAndUnresolvableNodes"]) == {"n0"}


async def test_a_caller_without_a_certificate_for_kube_scheduler_is_refused(
    extender_server: ExtenderServer, tmp_path: Path
) -> None:
    stranger = extender_server.made.issue("stranger", "stranger")
    other_ca = Made(tmp_path, "others").issue(NAME, NAME)

    status, text = await extender_server.post("filter", b"{}", stranger)

    assert (status, text) == (403, b"a certificate for kube-scheduler is required\n")
    for files, scheme in ((None, "https"), (other_ca, "https"), (None, "http")):
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await extender_server.post("filter", b"{}", files, scheme=scheme)


@pytest.mark.parametrize(
    ("verb", "body", "reason"),
    [
        ("filter", b"no json", "the body is no valid ExtenderArgs"),
        ("prioritize", b'{"NodeNames": ["n0"]}', "missing required field `Pod`"),
        ("bind", b'{"PodName": 1}', "the body is no valid ExtenderBindingArgs"),
    ],
)
async def test_an_odd_body_is_refused_with_the_reason(
    extender_server: ExtenderServer, verb: str, body: bytes, reason: str
) -> None:
    files = extender_server.made.issue(NAME, NAME)

    status, text = await extender_server.post(verb, body, files)

    assert status == 400
    assert reason in text.decode()


def test_a_renewed_certificate_is_loaded(tmp_path: Path) -> None:
    made = Made(tmp_path)
    certificate, key = made.issue("extender")
    tls = ServingFiles(certificate, key, made.ca)
    before = tls._loaded

    made.issue("extender")
    tls.load()

    assert tls._loaded != before


async def test_the_simulated_scheduler_asks_as_it_is_configured(
    extender_server: ExtenderServer, tmp_path: Path
) -> None:
    certificate, key = map(str, extender_server.made.issue(NAME, NAME))
    tls = SchedulerTls(ca=str(extender_server.made.ca), certificate=certificate, key=key)
    configuration = scheduler_configuration(f"https://{extender_server.address}", tls)
    (tmp_path / "scheduler.yaml").write_text(yaml.safe_dump(configuration))
    extender = SchedulerExtender.load(tmp_path / "scheduler.yaml")
    amounts = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "1000"}
    resources = {"limits": amounts, "requests": amounts}
    pod = {
        "metadata": {"name": "a", "namespace": "default", "uid": "uid-a"},
        "spec": {
            "schedulerName": extender.scheduler,
            "containers": [{"name": "main", "resources": resources}],
        },
    }
    offered = FittingNodes(nodes=("n2", "n1", "other"), refusals=Counter({"Insufficient cpu": 1}))

    fitting = await extender.narrow(pod, offered)
    await extender.bind(pod, fitting.nodes[0])

    assert extender.is_interested(pod)
    assert fitting.nodes == ("n1", "n2")
    assert fitting.choice.node == "n1"
    assert fitting.refusals == {"Insufficient cpu": 1, UNKNOWN: 1}
    [request] = extender_server.world.binders.requests
    assert request.placement.node == "n1"
    with pytest.raises(ExtenderError, match="the pod was deleted or replaced"):
        await extender.bind(pod, "n1")
