"""Watcher and placer in the binder's process, with its account: which clients are authorized."""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
import pytest

from services.auth.nats_users import NatsUser, all_users
from tests.support.auth.world import AuthWorld, auth_world
from tests.support.servers.nats import flush

USERS = {user.name: user for user in all_users([])}


@pytest.fixture
async def world() -> AsyncIterator[AuthWorld]:
    with tempfile.TemporaryDirectory(prefix="lh-auth-") as folder:
        async with auth_world(Path(folder)) as made:
            yield made


async def denied(world: AuthWorld, token: str, name: str, user: NatsUser) -> list[str]:
    """Publish on all subjects of a user; return what the server denies to a client so named."""
    async with world.raw(token, name) as (client, errors):
        for subject in user.publish:
            await client.publish(subject.replace("*", "x").replace(">", "x"), b"x")
        await flush(client)
        return [text for text in errors if "permissions violation" in text]


@pytest.mark.parametrize("name", ["watcher", "placer"])
async def test_the_binders_account_is_watcher_and_placer_only_where_they_are_in_its_process(
    world: AuthWorld, name: str
) -> None:
    token = world.cluster.issue_token("binder")

    with pytest.raises(nats.errors.Error):
        await denied(world, token, name, USERS[name])
    assert await denied(world, token, "binder", USERS["binder"]) == []
    world.combine_scheduler()

    assert await denied(world, token, name, USERS[name]) == []
    assert await denied(world, token, name, USERS["binder"]) != []
    assert await denied(world, token, "binder", USERS["binder"]) == []
    assert world.cluster.reviews == 1  # whatever user its client names


async def test_other_accounts_stay_what_they_are(world: AuthWorld) -> None:
    world.combine_scheduler()

    for account, name in (("placer", "binder"), ("placer", "watcher"), ("watcher", "placer")):
        token = world.cluster.issue_token(account)
        assert await denied(world, token, name, USERS[account]) == []
        assert await denied(world, token, name, USERS[name]) != []
