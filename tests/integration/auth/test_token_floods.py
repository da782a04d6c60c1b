"""Logins while another host sends tokens that nobody has, on a real nats-server."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.auth.nats_users import AUTHORIZATION_S
from services.auth.service import AuthTiming
from shared.kubernetes.tokens import TokenUser
from tests.support.auth.world import AuthWorld, auth_world

REVIEW_S = 0.5
"""What a busy API server takes."""
CONNECTIONS = 250
"""At any time: one after the other, 16 reviews at once would take 8 s."""
FLOOD = """
import asyncio, json, secrets, ssl, sys
port, host, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
tls = ssl._create_unverified_context()

async def connect():
    while True:
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(host, 0)
            )
            await reader.readline()
            await writer.start_tls(tls)
            options = json.dumps({"user": "placer", "pass": secrets.token_hex(400)})
            writer.write(f"CONNECT {options}\\r\\nPING\\r\\n".encode())
            print("x", end="", flush=True)
            await reader.read()
            writer.transport.abort()
        except OSError:
            await asyncio.sleep(0.1)

async def main():
    await asyncio.gather(*(connect() for _ in range(count)))

asyncio.run(main())
"""
"""A program that logs in with another token whenever its last one was refused, and prints a letter
for each."""


@contextlib.asynccontextmanager
async def flood_from(host: str, world: AuthWorld) -> AsyncIterator[None]:
    arguments = ["-c", FLOOD, str(world.port), host, str(CONNECTIONS)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            await process.stdout.readexactly(CONNECTIONS)
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AuthWorld]:
    """A world whose API server takes a while for each review, of which none is reused."""
    async with auth_world(tmp_path, timing=AuthTiming(authorized_s=0.0)) as made:
        review = made.auth.review

        async def slow_review(token: str) -> TokenUser:
            await asyncio.sleep(REVIEW_S)
            return await review(token)

        made.auth.review = slow_review
        yield made


async def login_s(world: AuthWorld, token: str) -> float:
    """Log in once, and return how long it took; the server gives up after `AUTHORIZATION_S`."""
    began = time.monotonic()
    async with world.raw(token, "placer"):
        return time.monotonic() - began


async def test_random_tokens_of_another_host_delay_no_login(world: AuthWorld) -> None:
    async with flood_from("127.0.0.2", world):
        taken = [await login_s(world, world.cluster.issue_token("placer")) for _ in range(5)]

    assert max(taken) < AUTHORIZATION_S / 2


async def test_random_tokens_of_its_own_host_delay_no_login_with_a_token_accepted_before(
    world: AuthWorld,
) -> None:
    token = world.cluster.issue_token("placer")
    await login_s(world, token)
    async with flood_from("127.0.0.1", world):
        taken = [await login_s(world, token) for _ in range(5)]

    assert max(taken) < AUTHORIZATION_S / 2
