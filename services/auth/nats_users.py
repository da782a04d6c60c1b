"""The users of NATS and their permissions, from the declared topology: one per service and node.

The user of a node may reply once to each request, as it could otherwise reply to those of other
nodes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from services.topology import (
    ALL_SERVICES_PUBLISH,
    OPERATOR,
    SERVICES,
    ServiceEntry,
    published,
    roles,
)
from shared.model.events.event import Event, is_work
from shared.model.events.pod_events import Heartbeat, ResyncRequested
from shared.model.names import NodeName
from shared.nats import subjects
from shared.nats.wire import MAX_PAYLOAD
from shared.runtime.service import Role

RESPONSE_S = 60
"""Far longer than any service waits for a reply."""
CONNECTION_LIMITS = {
    "max_connections": 6_000,
    "max_payload": MAX_PAYLOAD,
    "max_pending": 32 * 2**20,
    "max_subscriptions": 80,
    "max_sub_tokens": 8,
}
"""Bounds of the server's memory: a connection with TLS takes about 100 KiB. The server ignores
limits in the response of an auth callout."""
SYSTEM_ACCOUNT = "SYS"
SERVER_REQUESTS = tuple(subjects.server_request("*", name) for name in ("CONNZ", "KICK"))
KEEPER_OF_SHARES = "binder"
"""It closes connections: `shared.nats.connection_shares`."""
LOGIN_REFUSER = "auth"
AUTHORIZATION_S = 5
"""A server closes a connection that is not authorized in this time."""
AUTH_CALLOUT_SUBJECT = "$SYS.REQ.USER.AUTH"


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsUser:
    """A subject may be followed by a space and a queue group."""

    name: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    only_responds: bool = False
    """May publish to the reply subject of a message that it received, within `RESPONSE_S`."""


def all_users(nodes: Sequence[NodeName]) -> tuple[NatsUser, ...]:
    return (*service_users(SERVICES, nodes), operator_user())


def operator_user() -> NatsUser:
    """`doctor` receives heartbeats."""
    return NatsUser(
        name=OPERATOR.name,
        publish=(),
        subscribe=(
            subjects.inboxes_of(OPERATOR.name),
            subjects.subscribe_subject(Heartbeat),
        ),
    )


def service_users(
    services: Iterable[ServiceEntry], nodes: Sequence[NodeName]
) -> tuple[NatsUser, ...]:
    """For example, `node-agent.gpu-1` may publish to subjects that end in its node."""
    by_name = roles()
    senders = _senders_by_event(by_name)
    return tuple(
        NatsUser(
            name=subjects.user_of(service.name, node),
            publish=_sorted_unique(
                _publish_subjects(service, by_name[service.name], node, senders)
            ),
            subscribe=_sorted_unique(_subscribe_subjects(service, by_name[service.name], node)),
            only_responds=service.per_node,
        )
        for service in services
        for node in (nodes if service.per_node else ("",))
    )


def _senders_by_event(
    roles_by_name: Mapping[str, tuple[Role, ...]],
) -> dict[type[Event], list[ServiceEntry]]:
    consumed = {
        event
        for service_roles in roles_by_name.values()
        for role in service_roles
        if role.kind in {"answers", "handles"}
        for event in role.consumes
        if role.kind == "answers" or is_work(event)
    }
    return {
        event: [service for service in SERVICES if event in published(roles_by_name[service.name])]
        for event in consumed
    }


def _publish_subjects(
    service: ServiceEntry,
    service_roles: tuple[Role, ...],
    node: str,
    senders: Mapping[type[Event], Sequence[ServiceEntry]],
) -> Iterator[str]:
    user = subjects.user_of(service.name, node)
    yield from (subjects.publish_subject(event, user) for event in ALL_SERVICES_PUBLISH)
    for event in published(service_roles):
        is_request = event in senders and not is_work(event)
        subject_of = subjects.reply_subject if is_request else subjects.subscribe_subject
        yield subject_of(event, node)
    if not service.per_node:
        work = filter(is_work, published(service_roles))
        yield from chain.from_iterable(map(subjects.observed_subjects, work))
        yield subjects.publish_subject(ResyncRequested)
        yield from (*SERVER_REQUESTS, subjects.FLOODED) if service.name == KEEPER_OF_SHARES else ()
        yield from _reply_subjects(service_roles, senders)


def _reply_subjects(
    service_roles: tuple[Role, ...], senders: Mapping[type[Event], Sequence[ServiceEntry]]
) -> Iterator[str]:
    for role in service_roles:
        if role.kind in {"answers", "handles"}:
            replied_to = (event for event in role.consumes if event in senders)
            yield from (_inboxes(sender) for event in replied_to for sender in senders[event])


def _subscribe_subjects(
    service: ServiceEntry, service_roles: Sequence[Role], node: str
) -> Iterator[str]:
    yield subjects.inboxes_of(subjects.user_of(service.name, node))
    if service.name == KEEPER_OF_SHARES:
        yield f"{subjects.CONNECTED} {subjects.CONNECTION_SHARES}"
    if service.name == LOGIN_REFUSER:
        yield subjects.FLOODED
    for role in service_roles:
        if role.kind == "answers":
            for event in role.consumes:
                yield f"{subjects.reply_subject(event, node)} {service.name}"
        elif role.kind == "observes":
            yield from chain.from_iterable(map(subjects.observed_subjects, role.consumes))
        elif role.kind == "handles":
            group = subjects.group_of(service.name, role.method)
            for event in role.consumes:
                if is_work(event):
                    yield f"{subjects.subscribe_subject(event)} {group}"
                else:
                    yield subjects.subscribe_subject(event, node)


def _inboxes(requester: ServiceEntry) -> str:
    return subjects.inboxes_of(subjects.user_of(requester.name, "*" if requester.per_node else ""))


def _sorted_unique(subjects: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(subjects)))


def nats_configuration(
    users: Sequence[NatsUser], secrets: Mapping[str, str], *, tls: tuple[Path, Path] | None = None
) -> str:
    """`tls` has the files of a certificate and its key."""
    files = {"cert_file": str(tls[0]), "key_file": str(tls[1])} if tls else None
    return _configuration(
        "Users and their permissions, from the topology, written by `leasehold credentials`.",
        "Contains secrets. nats-server reads it with --config, or with `include` elsewhere.",
        **CONNECTION_LIMITS,
        tls=files,
        **_accounts([_entry(user, secrets) for user in users]),
    )


def auth_callout_configuration(
    auth: NatsUser, secrets: Mapping[str, str], issuer: str, files: str
) -> tuple[str, str]:
    """Return configurations with an auth callout: for one server, and for a cluster.

    `issuer` is the public key that signs the responses; `files` is the directory of certificates.
    """
    system = "system"
    requests = f"{AUTH_CALLOUT_SUBJECT} {auth.name}"
    answering = _entry(replace(auth, subscribe=(*auth.subscribe, requests)), secrets)
    answering["permissions"]["allow_responses"] = True
    tls: dict[str, object] = {"cert_file": f"{files}/server.crt", "key_file": f"{files}/server.key"}
    single = _configuration(
        "Written by the auth service; contains secrets.",
        "Clients without a password are authorized by token; the response has their permissions.",
        **CONNECTION_LIMITS,
        tls=tls,
        **_accounts([answering], [{"user": system, "password": secrets[system]}]),
        authorization={
            "timeout": AUTHORIZATION_S,
            "auth_callout": {
                "issuer": issuer,
                "account": subjects.ACCOUNT,
                "auth_users": [auth.name, system],
            },
        },
    )
    # The authority also issues certificates for others: only names in the servers' routes count.
    mutual = {"ca_file": f"{files}/ca.crt", "verify_cert_and_check_known_urls": True}
    return single, "include nats.conf\n" + _configuration(cluster={"tls": tls | mutual})


def _accounts(
    users: Sequence[Mapping[str, Any]], system_users: Sequence[Mapping[str, Any]] = ()
) -> dict[str, object]:
    """Return our account, and the servers', which exports to it."""
    exported = (("stream", subjects.CONNECTED), *(("service", name) for name in SERVER_REQUESTS))
    replied = {"stream": {}, "service": {"response_type": "stream"}}  # by each server of a cluster
    system = {
        "users": list(system_users),
        "exports": [
            {kind: name, "accounts": [subjects.ACCOUNT], **replied[kind]} for kind, name in exported
        ],
    }
    imports = [{kind: {"account": SYSTEM_ACCOUNT, "subject": name}} for kind, name in exported]
    return {
        "accounts": {
            SYSTEM_ACCOUNT: system,
            subjects.ACCOUNT: {"users": list(users), "imports": imports},
        },
        "system_account": SYSTEM_ACCOUNT,
    }


def _configuration(*comments: str, **sections: object) -> str:
    """JSON is valid in nats-server's format."""
    written = {name: section for name, section in sections.items() if section is not None}
    lines = [f"{name}: {json.dumps(section, indent=2)}" for name, section in written.items()]
    return "\n".join([*(f"# {text}" for text in comments), *lines, ""])


def _entry(user: NatsUser, secrets: Mapping[str, str]) -> dict[str, Any]:
    permissions: dict[str, object] = {
        "publish": permission_of(user.publish),
        "subscribe": permission_of(user.subscribe),
    }
    if user.only_responds:
        permissions["allow_responses"] = {"max": 1, "expires": f"{RESPONSE_S}s"}
    return {"user": user.name, "password": secrets[user.name], "permissions": permissions}


def permission_of(allowed: Sequence[str]) -> dict[str, list[str]]:
    """Return the rule for these subjects; to the server, an empty list of them allows all.

    >>> permission_of(["a.>"]), permission_of([])
    ({'allow': ['a.>']}, {'deny': ['>']})
    """
    return {"allow": list(allowed)} if allowed else {"deny": [">"]}
