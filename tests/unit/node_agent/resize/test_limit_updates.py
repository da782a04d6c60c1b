"""Requests for limits, beside pods whose records are held."""

import asyncio
from typing import Any

from services.node_agent.resize.limit_updates import LimitUpdater
from shared.model.events.request_reply import LimitsRequest
from shared.model.names import PodUid
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.node import entry_of, node_of, snapshot_of


async def test_a_pod_whose_records_are_held_delays_the_limits_of_no_other() -> None:
    held, requested = (lease_of(PodUid(pod), share()) for pod in ("pod-1", "pod-2"))
    node = node_of()
    node.snapshot = snapshot_of()
    for entry in map(entry_of, (held, requested)):
        node.checkpoint.by_key[entry.key] = entry
    unused: Any = None
    updater = LimitUpdater(node, unused, on_change=unused)

    async with node.checkpoint.changing.hold(held.pod), asyncio.timeout(10):
        reply = await updater.apply_request(LimitsRequest(node=node.name, lease=requested))

    assert reply.applied
