"""Each credential of NATS sends each message that it may, with every field at its extremes.

A node's agent also speaks of the devices, pods and leases of another node.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from services.auth.nats_users import NatsUser, all_users
from shared.credentials.logins import ClientCredentials, load_login
from shared.credentials.tls import TlsFiles
from shared.model.events.event import Event
from shared.model.names import NodeName
from shared.nats import subjects, wire
from shared.nats.bus import Bus
from shared.nats.sender_rates import LEAST_BYTES, MOST_BYTES
from tests.support.auth.logins import covers
from tests.support.dialects.checklist import ledger_of
from tests.support.fuzz.messages import extremes
from tests.support.fuzz.nats_bytes import RawClient, odd_messages
from tests.support.hostile_agent import LIE, false_reports, lies_about
from tests.support.samples import NODE, POD, SAMPLES
from tests.support.servers.nats import flush
from tests.support.stack import Stack, gpu_pod, running, vgpu
from tests.support.waiting import until

STOLEN = NodeName("node-0")
OTHER = NodeName("node-1")
USERS = {user.name: user for user in all_users([STOLEN, OTHER])}
SERVICES = sorted(name for name in USERS if not name.startswith("node-agent"))
EVENTS = "/api/v1/namespaces/default/events"


def pod_on(node: str, name: str, mib: int = 2000) -> dict[str, Any]:
    return gpu_pod(name, vgpu(memory=mib), nodeSelector={"kubernetes.io/hostname": node})


@asynccontextmanager
async def bus_of(up: Stack, user: str) -> AsyncIterator[Bus]:
    tls = TlsFiles(ca=up.root / "credentials" / "ca.crt")
    files = ClientCredentials(login_file=up.secret("nats", user), tls=tls)
    async with Bus.connect(up.state()["nats_url"], name=user, credentials=files) as bus:
        yield bus


async def holdings(up: Stack, node: NodeName) -> tuple[list[Any], list[Any]]:
    """Return the devices of a node with their use, and its leases."""
    async with ledger_of(up, "admin") as leases:
        [totals] = await leases.totals.of_nodes([node])
    return sorted(totals.node.devices, key=str), sorted(totals.leases, key=str)


def subject_for(kind: type[Event], route: str) -> str:
    is_request = kind.subject.split(".")[1] == "request"
    return (subjects.request_subject if is_request else subjects.publish_subject)(kind, route)


def messages(user: NatsUser, names: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """Yield what a user may send: each sample of each of its events, with all extremes."""
    for sample in SAMPLES:
        kind = type(sample)
        subject = subject_for(kind, STOLEN if subjects.is_routed(kind) else "")
        if covers(user.publish, subject):
            for data in extremes(sample, names):
                yield subject, data


def is_after(second: float) -> bool:
    return time.monotonic() // 1 > second


async def send(bus: Bus, messages: Iterator[tuple[str, bytes]]) -> int:
    """Send messages as work is sent; also with reply subjects that are no such number.

    They are sent more slowly than those of an agent whose connections a binder closes.
    """
    count = 0
    sent_bytes = 0
    for count, (subject, data) in enumerate(messages, start=1):
        sent_bytes += max(len(data), LEAST_BYTES)
        if sent_bytes > MOST_BYTES // 4:
            await flush(bus.client)
            second = time.monotonic() // 1
            await until(partial(is_after, second))
            sent_bytes = 0
        inbox = bus.client.new_inbox()
        number = (str(count), "9" * 40, "x")[count % 3 if count % 50 == 0 else 0]
        await bus.client.publish(subject, data, reply=f"{inbox}.{number}")
        if count % 200 == 0:
            await flush(bus.client)
    await flush(bus.client)
    return count


async def test_a_stolen_agent_changes_nothing_of_another_node(up: Stack) -> None:
    for node, name in ((STOLEN, "own"), (OTHER, "other")):
        await up.create(pod_on(node, name))
        await up.until(name, running)
    before = await until(
        lambda: holdings(up, OTHER), lambda view: view[1] and view[1][0].state == "active"
    )
    own = [device for device, _ in (await holdings(up, STOLEN))[0]]
    others = [device for device, _ in before[0]]
    pids = {component["name"]: component["pid"] for component in up.state()["components"]}
    names = {NODE: STOLEN, POD: before[1][0].pod, "GPU-a": before[0][0][0].uuid}

    async with bus_of(up, f"node-agent.{STOLEN}") as bus:
        lies = (
            *lies_about(before[1][0], STOLEN),
            *false_reports(before[1], own, others, STOLEN),
        )
        told = ((subject_for(type(event), STOLEN), wire.encode([event])) for event in lies)
        assert await send(bus, told)
        assert await send(bus, messages(USERS[f"node-agent.{STOLEN}"], names)) > 900
        refused = await until(lambda: events_of(up, "AgentMessageRefused"))

    await up.create(pod_on(OTHER, "later"))
    await up.until("later", running)
    await up.create(pod_on(STOLEN, "trusted-again"))
    await up.until("trusted-again", running)
    await up.kube.delete("/api/v1/namespaces/default/pods/later")
    after = await until(lambda: holdings(up, OTHER), lambda view: len(view[1]) == 1)
    assert [device for device, _ in after[0]] == [device for device, _ in before[0]]
    assert after[1] == before[1]
    assert {event["involvedObject"]["name"] for event in refused} == {STOLEN}
    assert not [event for event in await events_of(up) if LIE in event["message"]]
    assert {component["name"]: component["pid"] for component in up.state()["components"]} == pids
    await up.audit()


def lost_connections(up: Stack) -> int:
    logs = (up.root / "logs").glob("*.log")
    return sum(log.read_text().count("lost the connection to NATS") for log in logs)


async def test_no_bytes_that_a_stolen_agent_can_send_stop_a_service(up: Stack) -> None:
    user = USERS[f"node-agent.{STOLEN}"]
    login = load_login(up.secret("nats", user.name))
    tls = ssl.create_default_context(cafile=up.root / "credentials" / "ca.crt")
    client = RawClient(up.state()["nats_url"], login.user, login.secret, tls)
    inbox = f"{subjects.inbox_of(user.name)}.{'a' * 22}.1".encode()
    pids = {component["name"]: component["pid"] for component in up.state()["components"]}
    lost = lost_connections(up)

    for sample in SAMPLES:
        kind = type(sample)
        subject = subject_for(kind, STOLEN if subjects.is_routed(kind) else "")
        if covers(user.publish, subject):
            odd = odd_messages(subject.encode(), wire.encode([sample]), inbox)
            await asyncio.to_thread(client.send, odd)
    await up.create(pod_on(OTHER, "after-odd-bytes"))
    await up.until("after-odd-bytes", running)

    assert {component["name"]: component["pid"] for component in up.state()["components"]} == pids
    assert lost_connections(up) == lost


async def events_of(up: Stack, reason: str = "") -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(await up.kube.read(EVENTS))["items"]
    return [event for event in events if reason in {"", event["reason"]}]


@pytest.mark.parametrize("name", SERVICES)
async def test_no_service_stops_for_good_by_what_another_may_send(up: Stack, name: str) -> None:
    pids = {component["name"]: component["pid"] for component in up.state()["components"]}

    async with bus_of(up, name) as bus:
        await send(bus, messages(USERS[name], {NODE: STOLEN}))

    await up.create(gpu_pod(f"after-{name}", vgpu(memory=1000)))
    await up.until(f"after-{name}", running)
    assert {component["name"]: component["pid"] for component in up.state()["components"]} == pids
