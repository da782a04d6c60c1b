"""NATS and Redis under TLS: trusted and refused certificates, error messages, and new files."""

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.ledger.leases import RedisLeases
from shared.ledger.redis_server import ping, redis_facts, reload_certificate
from shared.model.errors import RequestError, UnavailableError
from shared.nats.bus import Bus
from shared.nats.connection import connected
from tests.support.servers.nats import NatsServer, free_port
from tests.support.servers.tls import Cover, Made
from tests.support.servers.valkey import ValkeyServer, valkey_server
from tests.support.waiting import until


class CoveredNats(NatsServer):
    """A nats-server with a certificate and one user; it can require a client certificate."""

    def show(
        self, files: tuple[Path, Path], *, client_ca: Path | None = None, value: str = "first"
    ) -> None:
        """Start with a certificate, and with this secret of the user."""
        tls: dict[str, object] = {"cert_file": str(files[0]), "key_file": str(files[1])}
        if client_ca is not None:
            tls |= {"ca_file": str(client_ca), "verify": True}
        users = {"users": [{"user": "someone", "password": value}]}
        self.more = f"tls: {json.dumps(tls)}\nauthorization: {json.dumps(users)}\n"
        self.launch()


@pytest.fixture
def server() -> Iterator[CoveredNats]:
    made = CoveredNats()
    yield made
    made.close()


@pytest.fixture
def ours(tmp_path: Path) -> Made:
    return Made(tmp_path)


def login(folder: Path, value: str = "first") -> Path:
    path = folder / "login"
    path.write_text(f"someone:{value}")
    return path


def keys(tmp_path: Path, ca: Path, shown: tuple[Path, Path] | None = None) -> ClientCredentials:
    certificate, key = shown or (None, None)
    return ClientCredentials(
        login_file=login(tmp_path), tls=TlsFiles(ca=ca, certificate=certificate, key=key)
    )


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as running:
        yield running


@pytest.fixture
async def cover(valkey: ValkeyServer, ours: Made) -> AsyncIterator[Cover]:
    await valkey.ready()
    made = Cover(valkey.socket)
    made.show(ours.issue("server"))
    async with made.listening():
        yield made


async def fault_at_nats(url: str, shown: ClientCredentials) -> str:
    """Return why a client cannot connect, or nothing."""
    fault = ""
    try:
        async with Bus.connect(url, name="test", credentials=shown, patience_s=2) as bus:
            assert bus.connected
    except UnavailableError as error:
        fault = str(error)
    assert "first" not in fault
    return fault


async def fault_at_redis(url: str, shown: ClientCredentials) -> str:
    """Return why neither the ledger nor the facts of its server can be read, or nothing."""
    shown = ClientCredentials(tls=shown.tls)
    async with RedisLeases.connect(url, credentials=shown) as ledger:
        try:
            await ledger.generation()
        except UnavailableError as error:
            with pytest.raises(UnavailableError):
                await redis_facts(url, shown)
            return str(error)
    assert (await redis_facts(url, shown)).role == "master"
    return ""


Show = Callable[..., None]
Fault = Callable[[ClientCredentials], Awaitable[str]]


@pytest.fixture(params=["nats", "redis"])
def door(
    request: pytest.FixtureRequest, server: CoveredNats, cover: Cover
) -> tuple[str, Show, Fault]:
    """The name of a server, how to serve a certificate, and what a client learns."""
    if request.param == "nats":
        return "nats", server.show, partial(fault_at_nats, server.url)
    return "redis", cover.show, partial(fault_at_redis, cover.url)


async def test_a_server_of_our_authority_is_trusted_under_its_name_until_it_expires(
    door: tuple[str, Show, Fault], ours: Made, tmp_path: Path
) -> None:
    name, show, fault = door
    known = keys(tmp_path, ours.ca)
    show(ours.issue("server"))

    assert await fault(known) == ""
    another = await fault(keys(tmp_path, Made(tmp_path, "another").ca))
    show(ours.issue("old", made_days_ago=40))
    old = await fault(known)
    show(ours.issue("elsewhere", "elsewhere.example"))
    elsewhere = await fault(known)

    assert "not issued by a trusted CA" in another
    assert f"set --{name}-ca-file to its CA" in another
    assert "has expired: renew it" in old
    assert "is for another name" in elsewhere
    assert f"--{name}-url" in elsewhere


async def test_a_server_that_requires_a_client_certificate_refuses_clients_without_one(
    door: tuple[str, Show, Fault], ours: Made, tmp_path: Path
) -> None:
    name, show, fault = door
    show(ours.issue("server"), client_ca=ours.ca)

    refused = await fault(keys(tmp_path, ours.ca))

    assert f"--{name}-certificate-file" in refused
    assert name == "redis" or "and --nats-key-file must be valid now" in refused
    assert await fault(keys(tmp_path, ours.ca, ours.issue("client", "somebody"))) == ""


async def test_no_secret_is_sent_to_a_server_without_tls(ours: Made, tmp_path: Path) -> None:
    received = bytearray()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "x", "version": "2.11.0", "auth_required": True, "max_payload": 1024}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        with contextlib.suppress(OSError):
            received.extend(await reader.read(4096))
        writer.close()

    async with await asyncio.start_server(pretend, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        fault = await fault_at_nats(f"nats://127.0.0.1:{port}", keys(tmp_path, ours.ca))

    assert "does not offer TLS" in fault
    assert received == b""


async def test_new_files_are_read_at_the_next_connection(
    server: CoveredNats, ours: Made, tmp_path: Path
) -> None:
    server.show(ours.issue("server"))
    trusted = tmp_path / "trusted.crt"
    trusted.write_bytes(ours.ca.read_bytes())
    later = Made(tmp_path, "later")

    async with Bus.connect(server.url, name="test", credentials=keys(tmp_path, trusted)) as bus:
        server.show(later.issue("server"), value="second")
        await until(lambda: not bus.connected)
        trusted.write_bytes(later.ca.read_bytes())
        login(tmp_path, "second")

        await until(lambda: bus.connected)


async def test_a_server_that_hangs_does_not_delay_the_shutdown(
    server: CoveredNats, ours: Made, tmp_path: Path
) -> None:
    server.show(ours.issue("server"))
    known = keys(tmp_path, ours.ca)
    client = await connected(server.url, name="test", credentials=known, patience_s=20)
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)

    async with asyncio.timeout(15):  # asyncio's own patience is 30 s
        await client.close()


async def test_invalid_certificate_files_are_named_in_the_error(tmp_path: Path, ours: Made) -> None:
    broken = tmp_path / "broken.crt"
    broken.write_text("no PEM")

    for files, named in (
        (TlsFiles(ca=tmp_path / "missing"), "the CA file .*missing cannot be read"),
        (TlsFiles(ca=broken), "broken.crt is invalid"),
        (TlsFiles(ca=ours.ca, certificate=broken), "broken.crt is invalid"),
    ):
        with pytest.raises(RequestError, match=named):
            async with Bus.connect(
                "nats://127.0.0.1:1", name="test", credentials=ClientCredentials(tls=files)
            ):
                pass


async def test_the_ledger_reads_new_files_at_its_next_connection(
    cover: Cover, ours: Made, tmp_path: Path
) -> None:
    trusted = tmp_path / "trusted.crt"
    trusted.write_bytes(ours.ca.read_bytes())
    later = Made(tmp_path, "later")

    async with RedisLeases.connect(
        cover.url, credentials=ClientCredentials(tls=TlsFiles(ca=trusted))
    ) as ledger:
        await ledger.generation()
        cover.show(later.issue("server"))
        cover.drop()
        for _ in range(2):  # the first call may only learn that the connection is gone
            with pytest.raises(UnavailableError):
                await ledger.generation()
        trusted.write_bytes(later.ca.read_bytes())

        await ledger.generation()


async def test_certificate_files_for_a_ledger_without_tls_are_refused(ours: Made) -> None:
    with pytest.raises(RequestError, match="write rediss://"):
        async with RedisLeases.connect(
            "redis://127.0.0.1:1", credentials=ClientCredentials(tls=TlsFiles(ca=ours.ca))
        ):
            pass


async def test_a_port_without_tls_has_an_error_of_its_own(ours: Made, tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(b"-ERR unknown command\r\n")
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        fault = await fault_at_redis(f"rediss://127.0.0.1:{port}/0", keys(tmp_path, ours.ca))

    assert "the port does not use TLS" in fault


REDIS = shutil.which("redis-server") or ""


@pytest.mark.skipif(not REDIS, reason="Valkey's wheel has no TLS, and there is no redis-server")
async def test_redis_loads_a_new_certificate_and_ca_while_clients_stay_connected(
    ours: Made, tmp_path: Path
) -> None:
    later = Made(tmp_path, "later")
    served = tmp_path / "served"
    port = free_port()
    ours.issue("server")
    shutil.copytree(ours.folder, served)
    options = {
        "tls-cert-file": "server.crt",
        "tls-key-file": "server.key",
        "tls-ca-cert-file": "ca.crt",
    }
    files = [word for name, file in options.items() for word in (f"--{name}", str(served / file))]
    command = [REDIS, "--dir", str(tmp_path), "--port", "0", "--tls-port", str(port)]
    process = subprocess.Popen([*command, "--tls-auth-clients", "no", "--save", "", *files])
    url = f"rediss://127.0.0.1:{port}/0"
    of_ours, of_later = (ClientCredentials(tls=TlsFiles(ca=made.ca)) for made in (ours, later))

    async def fault(trusting: ClientCredentials) -> str:
        try:
            await ping(url, trusting)
        except UnavailableError as error:
            return str(error)
        return ""

    try:
        await until(lambda: fault(of_ours), lambda text: not text)
        async with RedisLeases.connect(url, credentials=of_ours) as connected_before:
            await connected_before.generation()
            later.issue("server")
            shutil.copytree(later.folder, served, dirs_exist_ok=True)
            assert "not issued by a trusted CA" in await fault(of_later)

            await reload_certificate(url, of_ours, str(served))

            await ping(url, of_later)
            assert "not issued by a trusted CA" in await fault(of_ours)
            await connected_before.generation()
    finally:
        process.kill()
        process.wait()
