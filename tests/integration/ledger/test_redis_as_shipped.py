"""Redis or Valkey started with the flags of our manifests, reached from another machine.

The server of the wheel has no TLS, so that its flags are left out here.
"""

import asyncio
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import yaml

from services.auth.redis_users import DEFAULT_USER_RULE
from services.cli import credentials
from services.cli.credentials import CredentialFiles
from shared.credentials.logins import ClientCredentials
from shared.ledger.connection_pool import connection_pool
from shared.ledger.leases import RedisLeases
from shared.ledger.redis_server import default_user_refusal, redis_facts
from shared.model.errors import PermissionDeniedError, UnavailableError
from tests.support.servers.nats import free_port
from tests.support.servers.valkey import valkey_binary
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
TLS_FLAG = re.compile(r"--(port|tls-[\w-]+)")


def in_compose() -> list[str]:
    service: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return [str(word) for word in service["redis"]["command"]]


def in_kubernetes() -> list[str]:
    for found in yaml.safe_load_all((ROOT / "k8s/base/redis.yaml").read_text()):
        if found["kind"] == "StatefulSet":
            (container,) = found["spec"]["template"]["spec"]["containers"]
            return [str(word) for word in (*container["command"], *container["args"])]
    raise AssertionError("no StatefulSet")


def without_tls(arguments: Sequence[str]) -> list[str]:
    """Leave out the flags of TLS with what follows each, and the program."""
    pairs = list(zip(arguments[1::2], arguments[2::2], strict=True))
    assert sum(bool(TLS_FLAG.fullmatch(flag)) for flag, _ in pairs) >= 5
    return [word for pair in pairs if not TLS_FLAG.fullmatch(pair[0]) for word in pair]


def own_address() -> str:
    """Return an address of this machine that is not its loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but its loopback")
        return str(probe.getsockname()[0])


@asynccontextmanager
async def served(
    arguments: Sequence[str], written: CredentialFiles, folder: Path
) -> AsyncIterator[str]:
    """Start it, with the users of `written`; the address is one that others come by."""
    given = {
        **dict(zip(arguments[::2], arguments[1::2], strict=True)),
        "--aclfile": str(written.acl),
    }
    given |= {"--dir": str(folder), "--port": str(free_port())}
    command = [valkey_binary(), *(word for pair in given.items() for word in pair)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        host, port = own_address(), int(given["--port"])
        await until(lambda: listens(host, port))
        yield f"redis://{host}:{port}/0"
    finally:
        server.kill()
        server.wait()


async def listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


@pytest.fixture
def written(tmp_path: Path) -> CredentialFiles:
    return credentials.write(tmp_path / "credentials", [], nats=False)


def shown(written: CredentialFiles, user: str) -> ClientCredentials:
    return ClientCredentials(login_file=written.redis(user))


@pytest.mark.parametrize(
    "arguments", [in_compose(), in_kubernetes()], ids=["compose", "kubernetes"]
)
async def test_only_a_service_with_its_secret_can_connect_from_another_machine(
    arguments: list[str], written: CredentialFiles, tmp_path: Path
) -> None:
    async with (
        served(without_tls(arguments), written, tmp_path) as url,
        RedisLeases.connect(url, credentials=shown(written, "placer")) as placer,
        RedisLeases.connect(url) as nobody,
    ):
        assert await placer.generation() is None  # it replies: the ledger is not built yet
        with pytest.raises(PermissionDeniedError, match="denies access"):
            await nobody.generation()


async def test_the_error_of_a_server_in_protected_mode_has_the_remedy(
    written: CredentialFiles, tmp_path: Path
) -> None:
    careless = "user default on nopass -@all +ping"
    written.acl.write_text(written.acl.read_text().replace(DEFAULT_USER_RULE, careless))

    async with (
        served(without_tls(in_compose()), written, tmp_path) as url,
        RedisLeases.connect(url, credentials=shown(written, "placer")) as placer,
    ):
        with pytest.raises(UnavailableError, match="--protected-mode no"):
            await placer.generation()


@pytest.mark.parametrize(
    ("default", "message"),
    [
        (DEFAULT_USER_RULE, ""),
        ("user default on >secret ~* &* -@all +ping", "'set' command"),
        ("user default off resetpass ~lh:* &* +@all", "'lh-quotas:doctor' key"),
        ("user default off resetpass ~* &* +@all -xadd", "'xadd' command"),
    ],
)
async def test_the_operator_sees_whether_the_append_only_file_can_be_replayed(
    default: str, message: str, written: CredentialFiles, tmp_path: Path
) -> None:
    written.acl.write_text(written.acl.read_text().replace(DEFAULT_USER_RULE, default))

    async with served(without_tls(in_compose()), written, tmp_path) as url:
        pool = connection_pool(url, shown(written, "operator"), timeout_s=5)
        client = redis.asyncio.Redis.from_pool(pool)
        found = await default_user_refusal(client)
        facts = await redis_facts(url, shown(written, "operator"))
        await client.aclose()

    assert bool(found) == bool(message)
    assert message in found
    assert facts.replay_refusal == "", "this Valkey reads it back whatever its default user may do"
