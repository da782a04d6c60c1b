"""pods/exec over WebSocket, and pods/log."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import pytest

from simcluster.ports import LogOptions
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.echo_runtime import Echo

POD = "/api/v1/namespaces/default/pods/web"
V5 = "v5.channel.k8s.io"
V4 = "v4.channel.k8s.io"


@pytest.fixture
async def api() -> AsyncIterator[ApiUnderTest]:
    async with api_server(runtime=Echo) as started:
        containers = [{"name": "main", "image": "x:1"}]
        meta = {"name": "web", "namespace": "default"}
        spec = {"containers": containers, "nodeName": "node-0"}
        started.store.create("pods", {"metadata": meta, "spec": spec})
        yield started


async def session_of(
    api: ApiUnderTest, command: Sequence[str], *, protocol: str = V5, stdin: Sequence[bytes] = ()
) -> dict[int, bytes]:
    query = [("command", word) for word in command]
    query += [("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
    channels: dict[int, bytes] = {}
    async with (
        asyncio.timeout(30),
        api.client() as client,
        client.ws_connect(f"{POD}/exec", params=query, protocols=(protocol,)) as socket,
    ):
        assert socket.protocol == protocol
        for data in stdin:
            await socket.send_bytes(data)
        async for message in socket:
            channels[message.data[0]] = channels.get(message.data[0], b"") + message.data[1:]
    return channels


@pytest.mark.parametrize("protocol", [V5, V4])
async def test_output_and_success_use_their_channels(api: ApiUnderTest, protocol: str) -> None:
    channels = await session_of(api, ["env", "-0"], protocol=protocol)

    assert channels[1] == b"default/web/main env -0"
    assert channels[2] == b"no tty"
    assert json.loads(channels[3])["status"] == "Success"


async def test_an_exit_code_is_sent_as_a_status(api: ApiUnderTest) -> None:
    status = json.loads((await session_of(api, ["fail"]))[3])

    assert status["reason"] == "NonZeroExitCode"
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "3"}]


async def test_stdin_ends_with_the_close_signal(api: ApiUnderTest) -> None:
    channels = await session_of(api, ["cat"], stdin=[b"\x00one ", b"\x00two", b"\xff\x00"])

    assert channels[1] == b"one two"
    assert json.loads(channels[3])["status"] == "Success"


async def test_a_refusal_of_the_runtime_is_sent_as_a_status(api: ApiUnderTest) -> None:
    status = json.loads((await session_of(api, ["refuse"]))[3])

    assert status["message"] == "container is not running"


async def test_a_disconnect_of_the_client_ends_the_command(api: ApiUnderTest) -> None:
    async with asyncio.timeout(30), api.client() as client:
        socket = await client.ws_connect(f"{POD}/exec?command=hang", protocols=(V5,))
        await socket.close()


async def test_clients_of_old_protocols_get_the_supported_ones(api: ApiUnderTest) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "SPDY/3.1"}
    async with api.client() as client:
        spdy = await client.post(f"{POD}/exec?command=env", headers=headers)
        plain = await client.get(f"{POD}/exec?command=env")
        attach = await client.post(f"{POD}/attach")

    assert (spdy.status, plain.status, attach.status) == (400, 400, 400)
    assert "WebSocket" in (await spdy.json())["message"]


async def test_missing_containers_are_refused_before_the_upgrade(api: ApiUnderTest) -> None:
    meta = {"name": "unbound", "namespace": "default"}
    two = [{"name": "a", "image": "x:1"}, {"name": "b", "image": "x:1"}]
    api.store.create("pods", {"metadata": meta, "spec": {"containers": two}})
    pods = POD.removesuffix("/web")
    async with api.client() as client:
        answers = {
            f"{pods}/none/exec?command=a": 404,
            f"{pods}/unbound/exec?command=a": 400,
            f"{pods}/web/exec?command=a&container=x": 400,
            f"{pods}/web/exec": 400,
        }
        for url, code in answers.items():
            assert (await client.get(url)).status == code


async def test_logs_are_streamed_with_their_options(api: ApiUnderTest) -> None:
    async with api.client() as client:
        text = await (await client.get(f"{POD}/log?tailLines=5&timestamps=true")).text()

    assert text == "default/web/main\nsecond\n"
    assert isinstance(api.server.runtime, Echo)
    assert api.server.runtime.log_options == [LogOptions(tail_lines=5, timestamps=True)]
