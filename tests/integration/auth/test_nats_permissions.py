"""Which operations a real nats-server with users permits and denies."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.client import Client

from services.auth.nats_users import NatsUser, all_users
from services.cli.credentials import CredentialFiles
from services.topology import edges
from shared.credentials.logins import ClientCredentials, load_login
from shared.model.bounds import MOST_VERSION, MOST_WITH_GPUS
from shared.model.errors import UnavailableError
from shared.model.events.node_events import DeviceReported
from shared.model.events.request_reply import (
    LeasesReply,
    LeasesRequest,
    TerminationReply,
    TerminationRequest,
    UsageReply,
    UsageRequest,
)
from shared.model.leases.lease import ShareMeasurement
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.usage_requests import request_usage
from tests.support.auth.logins import NODES, covers
from tests.support.node_agent.agent import lease_of, share
from tests.support.servers.nats import NatsServer, flush, plain_client

USERS = {user.name: user for user in all_users(NODES)}
PUBLISHED = sorted(
    {subjects.publish_subject(edge.event, "") for edge in edges() if not edge.is_request}
)


@pytest.fixture(scope="module")
def nats_url(written: CredentialFiles) -> Iterator[str]:
    server = NatsServer(more=written.nats_configuration.read_text())
    server.launch()
    yield server.url
    server.close()


@asynccontextmanager
async def bus_of(url: str, written: CredentialFiles, user: str) -> AsyncIterator[Bus]:
    async with Bus.connect(
        url,
        name=user,
        credentials=ClientCredentials(login_file=written.nats(user)),
    ) as bus:
        yield bus


Connection = tuple[Client, list[str]]


async def is_refused(
    connection: Connection, subject: str, *, publish: bool, queue: str = ""
) -> bool:
    client, errors = connection
    errors.clear()
    if publish:
        await client.publish(subject, b"x")
    else:
        subscription = await client.subscribe(subject, queue=queue)
    await flush(client)
    if not publish:
        await subscription.unsubscribe()
    return any("permissions violation" in text for text in errors)


def raw(url: str, written: CredentialFiles, user: str) -> AbstractAsyncContextManager[Connection]:
    login = load_login(written.nats(user))
    return plain_client(url, login.user, login.secret)


@pytest.mark.parametrize("user", USERS.values(), ids=lambda user: user.name)
async def test_each_user_publishes_and_subscribes_as_permitted_and_nothing_else(
    nats_url: str, written: CredentialFiles, user: NatsUser
) -> None:
    everything = [
        *(
            name
            for own_subject in PUBLISHED
            for name in (own_subject, f"{own_subject}.node-z", f"{own_subject}.node-a")
        ),
        *(
            f"leasehold.request.{kind.subject}.node-z"
            for kind in (LeasesRequest, TerminationRequest)
        ),
        *("$JS.API.STREAM.CREATE.OTHER", "$JS.API.INFO"),
        *("_INBOX.placer.stolen", "_INBOX.node-agent.node-z.stolen", "$SYS.REQ.SERVER.PING"),
    ]
    foreign = [
        *(each for other in USERS.values() if other.name != user.name for each in other.subscribe),
        *("leasehold.>", "_INBOX.>", ">", "leasehold.work.>"),
    ]

    async with raw(nats_url, written, user.name) as connection:
        found = {name: await is_refused(connection, name, publish=True) for name in everything}
        received = {
            each: await is_refused(connection, subject, publish=False, queue=queue)
            for each in {*foreign, *user.subscribe}
            for subject, _, queue in (each.partition(" "),)
        }

    assert found == {name: not covers(user.publish, name) for name in everything}
    plain = tuple(each for each in user.subscribe if " " not in each)
    assert received == {
        each: each not in user.subscribe and not covers(plain, each.partition(" ")[0])
        for each in received
    }
    assert any(found.values())
    assert any(received.values())


async def test_a_login_without_a_user_or_with_a_wrong_secret_is_refused_with_the_reason(
    nats_url: str, written: CredentialFiles, tmp_path: Path
) -> None:
    wrong = tmp_path / "placer"
    wrong.write_text("placer:guessed")

    with pytest.raises(UnavailableError, match="set --nats-credentials FILE"):
        async with Bus.connect(nats_url, name="test", patience_s=3):
            pass
    with pytest.raises(UnavailableError, match="rejects the user in") as refused:
        async with Bus.connect(
            nats_url, name="test", credentials=ClientCredentials(login_file=wrong), patience_s=3
        ):
            pass
    assert "guessed" not in str(refused.value)


async def test_work_requests_and_replies_pass_between_users(
    nats_url: str, written: CredentialFiles
) -> None:
    async with (
        bus_of(nats_url, written, "binder") as binder,
        bus_of(nats_url, written, "node-agent.node.b") as agent,
    ):
        inbox = await binder.subscribe([DeviceReported], group="binder-save-devices")
        await binder.reply(LeasesRequest, "binder", "", _no_leases)
        await agent.reply(TerminationRequest, "node-agent", "node.b", _ended)
        await flush(binder.client)
        await flush(agent.client)

        await agent.publish([DeviceReported(node=NodeName("node.b"), devices=(), served=())])
        async with asyncio.timeout(20):
            (delivered,) = await inbox.batch()
        delivered.confirm()
        reply = await agent.request(
            LeasesRequest(node=NodeName("node.b")), LeasesReply, timeout_s=10
        )
        ended = await binder.request(
            TerminationRequest(node=NodeName("node.b"), pod=PodUid("p")),
            TerminationReply,
            timeout_s=10,
        )

    assert delivered.events[0].node == "node.b"
    assert reply.leases == ()
    assert ended.terminated


async def test_the_api_gets_usage_and_the_nodes_without_a_reply(
    nats_url: str, written: CredentialFiles
) -> None:
    async with (
        bus_of(nats_url, written, "api") as api,
        bus_of(nats_url, written, "node-agent.node.b") as agent,
    ):
        await agent.reply(UsageRequest, "node-agent", "node.b", _measured)
        await flush(agent.client)

        usage = await request_usage(api, [NodeName("node.b"), NodeName("node-a")])

    reply = usage[NodeName("node.b")]
    assert reply is not None
    assert [one.memory_mib for one in reply.shares] == [1_200]
    assert usage[NodeName("node-a")] is None


async def test_an_agent_gets_the_leases_of_pods_with_as_many_and_as_long_names_as_may_be(
    nats_url: str, written: CredentialFiles
) -> None:
    names = [f"{number:063}" for number in range(MOST_WITH_GPUS)]
    shares = [
        share(container=name, fence=MOST_VERSION - 1, device_model="m" * 96) for name in names
    ]
    leases = tuple(
        lease_of(f"{pod:036}", *shares, name="n" * 253, anti_affinity_groups=("g" * 1_000,))
        for pod in range(110)
    )

    async def reply(_: LeasesRequest) -> LeasesReply:
        return LeasesReply(leases=leases)

    async with (
        bus_of(nats_url, written, "binder") as binder,
        bus_of(nats_url, written, "node-agent.node.b") as agent,
    ):
        await binder.reply(LeasesRequest, "binder", "", reply)
        await flush(binder.client)
        request = LeasesRequest(node=NodeName("node.b"))
        found = await agent.request(request, LeasesReply, timeout_s=10)

    assert found.leases == leases


async def test_an_agents_event_about_another_node_is_ignored(
    nats_url: str, written: CredentialFiles
) -> None:
    async with (
        bus_of(nats_url, written, "binder") as binder,
        bus_of(nats_url, written, "node-agent.node-a") as agent,
    ):
        inbox = await binder.subscribe([DeviceReported], group="binder-save-devices")
        await flush(binder.client)
        forged = DeviceReported(node=NodeName("node.b"), devices=(), served=())
        own = DeviceReported(node=NodeName("node-a"), devices=(), served=())
        own_subject = subjects.publish_subject(DeviceReported, "node-a")

        for number, event in enumerate((forged, own)):
            reply = f"{agent.client.new_inbox()}.{number}"
            await agent.client.publish(own_subject, _encoded(event), reply=reply)

        async with asyncio.timeout(20):
            (delivered,) = await inbox.batch()
        delivered.confirm()
        assert delivered.events == [own]


def _encoded(event: DeviceReported) -> bytes:
    from shared.nats import wire  # noqa: PLC0415 - one test speaks by hand

    return wire.encode([event])


async def _no_leases(_: LeasesRequest) -> LeasesReply:
    return LeasesReply()


async def _measured(_: UsageRequest) -> UsageReply:
    share = ShareMeasurement(
        pod=PodUid("p"),
        namespace=Namespace("team"),
        name="first",
        container="main",
        device=DeviceUuid("GPU-0"),
        memory_mib=1_200,
    )
    return UsageReply(measured_at=1.0, shares=(share,))


async def _ended(_: TerminationRequest) -> TerminationReply:
    return TerminationReply(terminated=True)
