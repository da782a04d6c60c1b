"""Somebody with the NATS credential of a node's agent, who speaks beside it until it is cancelled.

It tells lies about the devices and pods of the other nodes, and sends what no agent sends.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

import msgspec
import nats.errors
import redis.exceptions

from services.topology import SERVICES
from shared.credentials.logins import ClientCredentials
from shared.credentials.tls import TlsFiles
from shared.model.devices.device import Device
from shared.model.errors import LeaseholdError, RequestError
from shared.model.events.event import Event
from shared.model.events.pod_events import Heartbeat
from shared.model.leases.lease import Lease
from shared.model.leases.lease_copy import ANNOTATION, load_lease
from shared.model.names import NodeName
from shared.nats import subjects, wire
from shared.nats.bus import Bus
from tests.campaign.schedule import NODES
from tests.campaign.stack.cluster import CampaignCluster
from tests.support.fuzz.messages import extremes
from tests.support.hostile_agent import false_reports, lies_about

PAUSE_S = 0.5
ABOUT = 3
"""Leases at a time that it lies about."""
EXTREMES = 30
"""Messages at a time with one field at an extreme."""
BROKEN = (
    b"",
    b"\xc1",
    b"\x91" * 2000,
    b"\xff" * 70_000,
    b"\x82\xa1v\x01\xa6events\xdd\xff\xff\xff\xff",
)
ERRORS = (LeaseholdError, redis.exceptions.RedisError, nats.errors.Error, OSError, TimeoutError)


async def impersonate(cluster: CampaignCluster, node: NodeName) -> None:
    """Speak in the name of a node's agent, also while servers do not answer."""
    random = Random(f"hostile agent of {node}")  # noqa: S311
    user = subjects.user_of("node-agent", node)
    files = cluster.root / "credentials"
    login = ClientCredentials(login_file=files / "nats" / user, tls=TlsFiles(ca=files / "ca.crt"))
    devices: Mapping[str, tuple[Device, ...]] = {}
    while True:
        with contextlib.suppress(*ERRORS):
            # Once: others' devices that it reports are stored among those that it reported.
            devices = devices or {name: await _devices(cluster, name) for name in NODES}
            async with Bus.connect(cluster.plan.nats_url, name=user, credentials=login) as bus:
                while True:
                    await _speak(bus, node, devices, await _leases(cluster), random)
                    await asyncio.sleep(PAUSE_S)
        await asyncio.sleep(PAUSE_S)


async def _speak(
    bus: Bus,
    node: NodeName,
    devices: Mapping[str, Sequence[Device]],
    leases: Sequence[Lease],
    random: Random,
) -> None:
    others = [device for name in NODES if name != node for device in devices[name]]
    of_others = [lease for lease in leases if lease.node != node]
    chosen = random.sample(of_others, min(ABOUT, len(of_others)))
    reports = list(false_reports(chosen, devices[node], others, node))
    lies = [*reports, *(lie for lease in chosen for lie in lies_about(lease, node))]
    random.shuffle(lies)
    inbox = bus.client.new_inbox()
    for number, (subject, data) in enumerate(_messages(lies, node, random), start=1):
        await bus.client.publish(subject, data, reply=f"{inbox}.{number}")


def _messages(lies: Sequence[Event], node: NodeName, random: Random) -> Iterator[tuple[str, bytes]]:
    """Yield lies, such with extremes, broken messages, and heartbeats of others on its subject."""
    heartbeat = subjects.publish_subject(Heartbeat, subjects.user_of("node-agent", node))
    for lie in lies:
        yield subjects.publish_subject(type(lie), node), wire.encode([lie])
    changed = [(lie, data) for lie in random.sample(lies, 1) for data in extremes(lie, {})]
    for lie, data in random.sample(changed, min(EXTREMES, len(changed))):
        yield subjects.publish_subject(type(lie), node), data
    for subject in {subjects.publish_subject(type(lie), node) for lie in lies} | {heartbeat}:
        for data in BROKEN:
            yield subject, data
    for service in SERVICES:
        beat = Heartbeat(service=service.name, instance="another", stopping=True)
        for sent in (beat, replace(beat, node=node), replace(beat, node=NODES[0])):
            yield heartbeat, wire.encode([sent])


async def _devices(cluster: CampaignCluster, node: str) -> tuple[Device, ...]:
    """Return a node's devices as they are in Redis, which knows them from its agent."""
    text = await cluster.redis.hget(f"lh:facts:{node}", "devices")
    return msgspec.json.decode(text or b"[]", type=tuple[Device, ...])


async def _leases(cluster: CampaignCluster) -> list[Lease]:
    """Return the leases that pods have in their annotations."""
    devices_read = []
    for pod in json.loads(await cluster.kube.read("/api/v1/namespaces/default/pods"))["items"]:
        metadata = pod["metadata"]
        text = (metadata.get("annotations") or {}).get(ANNOTATION, "")
        with contextlib.suppress(RequestError):  # it has none, or a forged one
            devices_read.append(
                load_lease(text, namespace=metadata["namespace"], name=metadata["name"])
            )
    return devices_read
