"""A hostile agent: with the credentials of node a, it says what only node b, or nobody, can say.

What it sends passes the door of the bus, as the wire has it, beside what the own agent sends.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from msgspec import structs

from shared.model.errors import RequestError
from shared.model.events.event import Event
from shared.model.events.node_events import (
    Allocation,
    DeviceReported,
    ShareActivated,
    ShareRefused,
    ViolationFound,
    ViolationReason,
)
from shared.model.lease import Lease
from shared.model.lease_copy import load_lease
from shared.model.names import DeviceUuid
from shared.nats import wire
from shared.nats.inbox import decode_checked
from shared.nats.subjects import publish_subject
from tests.model.api_server import NAMESPACE
from tests.model.rules import any_of, rule
from tests.model.users import Users, numbers
from tests.model.world import NODES
from tests.support.build import allocation_of

STOLEN, OTHER = NODES
HIGHEST = 2**52 - 1


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
        self.count(f"lies about {what}")
        leases = [_altered(lease, size, node) for lease in self._leases_of_other()]
        for event in self._lies(what, leases):
            self._send(event, number)

    def _lies(self, what: str, leases: list[Lease]) -> Iterator[Event]:
        world = self.world
        mine, others = world.nodes[STOLEN], world.nodes[OTHER]
        report = DeviceReported(
            node=STOLEN,
            devices=mine.reported_devices(),
            served=("volcano.sh/vgpu-number",),
            allocations=mine.agent.checkpoint.allocations,
            reported_at=mine.clock.now(),
            fences=mine.agent.checkpoint.device_fences,
        )
        if what == "devices":
            count = len(report.devices) + 10
            stolen = [replace(each, index=count + each.index) for each in others.devices]
            yield replace(report, devices=(*report.devices, *stolen))
        elif what == "fences":
            uuids = [each.uuid for each in (*mine.devices, *others.devices)]
            yield replace(report, fences=dict.fromkeys(map(DeviceUuid, uuids), HIGHEST))
        elif what == "allocations":
            forged = tuple(map(_allocation, leases))
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
        accepted = decode_checked(type(event), message, binder.reports.refusals.refuse)
        self.world.publish(accepted)


def _lie(what: str, lease: Lease) -> Event:
    holder: Any = {"pod": lease.pod, "namespace": lease.namespace, "name": lease.name}
    if what == "activations":
        return ShareActivated(node=STOLEN, allocation=_allocation(lease))
    if what == "refusals":
        return ShareRefused(**holder, node=STOLEN, reason="it lies")
    return ViolationFound(
        **holder, node=STOLEN, container="main", reason=ViolationReason.OVERRUN, message="it lies"
    )


def _allocation(lease: Lease) -> Allocation:
    return allocation_of(lease, container=lease.shares[0].container)


def _altered(lease: Lease, size: str, node: str) -> Lease:
    """Return the lease with other sizes, and a version and fences that are too high to count on."""
    if size == "same":
        return structs.replace(lease, node=node)
    shares = tuple(
        structs.replace(
            share,
            memory_mib=1 if size == "1 MiB" else share.device_mib,
            slot=7 if share.slot is not None else None,
            fence=HIGHEST,
        )
        for share in lease.shares
    )
    return structs.replace(lease, node=node, shares=shares, version=HIGHEST)
