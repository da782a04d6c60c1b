"""An operator in a cluster is authenticated by a token of the account `operator`."""

import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.model.events.request_reply import ResizeReply, ResizeRequest
from shared.model.lease import ShareSize
from shared.model.names import SYSTEM_NAMESPACE
from shared.nats.bus import Bus
from tests.support.auth.world import AuthWorld, auth_world
from tests.support.servers.nats import flush
from tests.support.stack import LEASEHOLD, Done, run


@pytest.fixture
async def world() -> AsyncIterator[AuthWorld]:
    with tempfile.TemporaryDirectory(prefix="lh-operator-") as folder:
        async with auth_world(Path(folder)) as made:
            made.cluster.add_object("pods", "train")
            yield made


async def answer(request: ResizeRequest) -> ResizeReply:
    after = ShareSize(memory_mib=request.memory_mib or 0, cores_percent=0)
    before = ShareSize(memory_mib=3000, cores_percent=0)
    return ResizeReply(
        outcome="resized", container="c", node="node-a", devices=(0,), before=before, after=after
    )


async def resize(world: AuthWorld, token: str) -> Done:
    """Run the command as docs/operations.md has it."""
    kubeconfig, file = world.folder / "kubeconfig", world.folder / "token"
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    kubeconfig.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [context],
                "clusters": [{"name": "c", "cluster": {"server": world.cluster.url}}],
                "users": [{"name": "u", "user": {"token": "of-a-person"}}],
            }
        )
    )
    file.write_text(f"{token}\n")
    words = ["resize", "train", "-n", SYSTEM_NAMESPACE, "--memory", "2Gi", "--nats-url", world.url]
    words += ["--nats-token-file", str(file), "--nats-ca-file", str(world.trusting.ca)]
    return await run(*LEASEHOLD, *words, "--kubeconfig", str(kubeconfig))


async def test_a_command_with_the_operators_token_reaches_a_binder(world: AuthWorld) -> None:
    keys = world.credentials(world.cluster.issue_token("binder"), "binder")
    async with Bus.connect(world.url, name="binder", credentials=keys) as binder:
        await binder.reply(ResizeRequest, "binder", "", answer)
        await flush(binder.client)

        done = await resize(world, world.cluster.issue_token("operator"))

    assert (done.code, done.err) == (0, "")
    assert "2048 MiB" in done.out


async def test_a_token_for_another_audience_is_rejected(world: AuthWorld) -> None:
    done = await resize(world, world.cluster.issue_token("operator", audience="api-server"))

    assert (done.code, done.out) == (3, "")
    assert "rejects the token in" in done.err
