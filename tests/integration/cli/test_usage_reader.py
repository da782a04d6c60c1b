"""Usage is read from node agents over one connection to NATS, and its absence is explained."""

from typing import Any

from nats.aio.msg import Msg

from services.cli.snapshot.location import ClusterLocation
from services.cli.snapshot.usage_reader import UsageReader
from shared.model.events.request_reply import UsageReply, UsageRequest
from shared.model.ledger import NodeTotals
from shared.model.names import NodeName
from shared.nats import subjects, wire
from shared.nats.bus import Bus
from tests.support.dashboard.board import lease, node_totals
from tests.support.servers.nats import nats_server

NODE = node_totals(lease())


def location(url: str) -> ClusterLocation:
    return ClusterLocation(redis_url="", kubeconfig=None, nats_url=url)


class Agent:
    """Replies for the node, and records where to: each connection has an inbox of its own."""

    def __init__(self) -> None:
        self.inboxes: list[str] = []

    async def reply(self, message: Msg) -> None:
        self.inboxes.append(message.reply.rpartition(".")[0])
        await message.respond(wire.encode([UsageReply(measured_at=1.0)]))


async def test_repeated_reads_use_one_connection() -> None:
    agent = Agent()
    async with nats_server() as nats, Bus.connect(nats.url, name="agent") as bus:
        client: Any = bus.client
        await client.subscribe(subjects.reply_subject(UsageRequest, "n1"), cb=agent.reply)
        await client.flush()
        async with (
            UsageReader(location(nats.url)) as reader,
            UsageReader(location(nats.url)) as another,
        ):
            usages = [await reader.read([NODE]) for _ in range(3)]
            await another.read([NODE])

    assert [usage.notes for usage in usages] == [()] * 3
    assert len(set(agent.inboxes[:3])) == 1
    assert agent.inboxes[3] != agent.inboxes[0]


async def test_without_leases_nothing_is_requested_and_no_server_is_needed() -> None:
    async with UsageReader(location("nats://127.0.0.1:9")) as reader:
        usage = await reader.read([NodeTotals(node=NODE.node, leases=())])

    assert usage.notes == ()


async def test_why_usage_is_missing_is_a_note() -> None:
    async with nats_server() as nats:
        async with UsageReader(location(nats.url)) as reader:
            silent = await reader.read([NODE])
        async with UsageReader(location("")) as reader:
            unknown = await reader.read([NODE])

    assert silent.unmeasured_nodes == (NodeName("n1"),)
    assert silent.notes == ("no reply from the agents of: n1; their usage is not shown",)
    assert unknown.notes == ("usage is not shown: set --nats-url",)
