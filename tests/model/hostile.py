"""A hostile agent: with the credentials of node a, it says what only node b, or nobody, can say.

What it sends passes the door of the bus, as the wire has it, beside what the own agent sends.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from shared.model.errors import RequestError
from shared.model.events.event import Event
from shared.model.events.node_events import DeviceReported, ShareActivated
from shared.model.leases.lease import Lease
from shared.model.leases.lease_copy import load_lease
from shared.model.names import NodeName
from shared.nats import wire
from shared.nats.inbox import decode_checked
from shared.nats.subjects import publish_subject
from tests.model.api_server import NAMESPACE
from tests.model.rules import any_of, rule
from tests.model.users import Users, numbers
from tests.model.world import NODES
from tests.support.hostile_agent import (
    altered,
    forged_allocation,
    highest_fences,
    refusal,
    violation,
    with_stolen,
)

STOLEN, OTHER = NODES


class HostileAgent(Users):
    """What a stolen agent of node a sends."""

    @rule(
        what=any_of("devices", "fences", "allocations", "activations", "refusals", "violations"),
        size=any_of("same", "1 MiB", "whole"),
        node=any_of(STOLEN, OTHER),
        number=numbers,
    )
    def agent_lies(self, what: str, size: str, node: str, number: int) -> None:
        """Send lies about the devices and pods of the other node, some with extreme numbers."""
        leases = [altered(lease, size, NodeName(node)) for lease in self._leases_of_other()]
        for event in self._lies(what, leases):
            self._send(event, number)

    def _lies(self, what: str, leases: list[Lease]) -> Iterator[Event]:
        world = self.world
        mine = world.nodes[STOLEN]
        others = world.nodes[OTHER]
        report = DeviceReported(
            node=STOLEN,
            devices=mine.reported_devices(),
            served=("volcano.sh/vgpu-number",),
            allocations=mine.agent.checkpoint.allocations,
            reported_at=mine.clock.now(),
            fences=mine.agent.checkpoint.device_fences,
        )
        if what == "devices":
            yield replace(report, devices=with_stolen(report.devices, others.devices))
        elif what == "fences":
            yield replace(report, fences=highest_fences((*mine.devices, *others.devices)))
        elif what == "allocations":
            forged = tuple(map(forged_allocation, leases))
            yield replace(report, allocations=(*report.allocations, *forged))
        else:
            for lease in leases:
                yield _lie(what, lease)

    def _leases_of_other(self) -> Iterator[Lease]:
        for pod in self.world.api.pods.values():
            if pod.node == OTHER and pod.lease:
                try:
                    yield load_lease(pod.lease, namespace=NAMESPACE, name=pod.name)
                except RequestError:
                    continue

    def _send(self, event: Event, number: int) -> None:
        binder = self.world.binders[number].binder
        subject = publish_subject(type(event), STOLEN)
        message: Any = SimpleNamespace(data=wire.encode([event]), subject=subject)
        accepted = decode_checked(type(event), message, binder.refusals.refuse)
        self.world.publish(accepted)


def _lie(what: str, lease: Lease) -> Event:
    if what == "activations":
        return ShareActivated(node=STOLEN, allocation=forged_allocation(lease))
    return refusal(lease, STOLEN) if what == "refusals" else violation(lease, STOLEN)
