"""Who may say and hear what on NATS: one user per service and node, from the declared topology.

A user may publish what its service says, put its questions, and drive its own durable consumers; it
may subscribe to what it hears and to an inbox of its own. All else is shut. A service that looks
after one node has a user per node, whose subjects end in that node's name.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.topology import OPERATOR, SERVICES, ServiceListed, roles
from shared.model.events.event import Delivery, Event
from shared.model.events.pod_events import Heartbeat, ResyncRequested
from shared.model.names import NodeName
from shared.nats import subjects
from shared.nats.subjects import API, STREAM
from shared.runtime.service import Role

ANY = ".*"
CALLS = "$SYS.REQ.USER.AUTH"
"""Where servers ask whom to let in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusUser:
    """One user of NATS; a subject may be followed by a blank and the queue it is heard in."""

    name: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def bus_users(nodes: Sequence[NodeName]) -> tuple[BusUser, ...]:
    """Return every service's user, one for the agent of each node, and the operator's."""
    return (*users_of(SERVICES, roles(), nodes), operator_user())


def operator_user() -> BusUser:
    """Return the user of commands.

    They look for trouble (who runs, whether the stream is there), and put the questions that the
    topology gives them.
    """
    return BusUser(
        name=OPERATOR.name,
        publish=_sorted(
            (f"{API}.STREAM.INFO.{STREAM}", *map(subjects.request_subject, OPERATOR.also_publishes))
        ),
        subscribe=(f"{subjects.inbox_of(OPERATOR.name)}.>", subjects.subscribe_subject(Heartbeat)),
    )


def users_of(
    services: Sequence[ServiceListed],
    roles_by_name: Mapping[str, tuple[Role, ...]],
    nodes: Sequence[NodeName],
    *,
    asked_by: Sequence[ServiceListed] = (),
) -> tuple[BusUser, ...]:
    """Return the users of these services, who answer each other and the services `asked_by`."""
    asking = (*(asked_by or services), OPERATOR)
    askers = _askers(asking, {OPERATOR.name: (), **roles_by_name})
    return tuple(
        BusUser(
            name=subjects.user_of(service.name, node),
            publish=_sorted(_published(service, roles_by_name[service.name], node, askers)),
            subscribe=_sorted(_subscribed(service, roles_by_name[service.name], node)),
        )
        for service in services
        for node in (nodes if service.per_node else ("",))
    )


def _askers(
    services: Sequence[ServiceListed], roles_by_name: Mapping[str, tuple[Role, ...]]
) -> dict[type[Event], list[ServiceListed]]:
    """Return every question, and the services that put it."""
    questions = {
        event
        for held in roles_by_name.values()
        for role in held
        if role.kind == "answers"
        for event in role.consumes
    }
    return {
        question: [s for s in services if question in _said(s, roles_by_name[s.name])]
        for question in questions
    }


def _said(service: ServiceListed, held: Iterable[Role]) -> set[type[Event]]:
    answering = {event for role in held if role.kind != "answers" for event in role.publishes}
    return {*answering, *service.also_publishes}


def _published(
    service: ServiceListed,
    held: Sequence[Role],
    node: str,
    askers: Mapping[type[Event], Sequence[ServiceListed]],
) -> Iterator[str]:
    yield subjects.publish_subject(Heartbeat)
    for event in _said(service, held):
        where = subjects.reply_subject if event in askers else subjects.subscribe_subject
        yield where(event, node)
    for role in held:
        if role.kind == "answers":
            yield from (_inboxes(asker) for event in role.consumes for asker in askers[event])
        for durable in _durables(service, role):
            yield f"$JS.ACK.{STREAM}.{durable}.>"
            yield f"{API}.CONSUMER.INFO.{STREAM}.{durable}"
            yield f"{API}.CONSUMER.DURABLE.CREATE.{STREAM}.{durable}"
    if not service.per_node:  # an agent leaves the stream to the others
        yield f"{API}.STREAM.INFO.{STREAM}"
        yield f"{API}.STREAM.CREATE.{STREAM}"
        yield subjects.publish_subject(ResyncRequested)


def _subscribed(service: ServiceListed, held: Sequence[Role], node: str) -> Iterator[str]:
    yield f"{subjects.inbox_of(subjects.user_of(service.name, node))}.>"
    for role in held:
        if role.kind == "answers":
            for event in role.consumes:
                yield f"{subjects.reply_subject(event, node)} {service.name}"
        elif role.kind == "observes":
            yield from (subjects.subscribe_subject(event) for event in role.consumes)
        elif role.kind == "handles":
            news = (event for event in role.consumes if event.delivery is Delivery.BROADCAST)
            yield from (subjects.subscribe_subject(event, node) for event in news)
            yield from (f"{subjects.deliver(name)} {name}" for name in _durables(service, role))


def _durables(service: ServiceListed, role: Role) -> tuple[str, ...]:
    takes_work = any(event.delivery is Delivery.WORK for event in role.consumes)
    if role.kind != "handles" or not takes_work:
        return ()
    return (subjects.durable_of(service.name, role.method),)


def _inboxes(asker: ServiceListed) -> str:
    return f"{subjects.inbox_of(asker.name)}{ANY if asker.per_node else ''}.>"


def _sorted(found: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(found)))


def nats_configuration(
    users: Sequence[BusUser], secrets: Mapping[str, str], *, tls: tuple[Path, Path] | None = None
) -> str:
    """Write the part of nats-server's configuration that says who may what.

    `tls` are the files of the certificate that it shows, and of its key.
    """
    lines = [
        "# Who may say and hear what, made by `leasehold doors` from the declared topology.",
        "# It holds secrets. nats-server reads it with --config, or with `include` in another.",
        *_covered(tls),
        "authorization {",
        "  users = [",
    ]
    for user in users:
        lines += [
            "    {",
            f"      user: {json.dumps(user.name)}",
            f"      password: {json.dumps(secrets[user.name])}",
            "      permissions: {",
            *_allowed("publish", user.publish),
            *_allowed("subscribe", user.subscribe),
            "      }",
            "    }",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def called_out_configuration(
    auth: BusUser, secrets: Mapping[str, str], issuer: str, files: str
) -> tuple[str, str]:
    """Return nats-server's configuration with an auth callout: for one server, and for a cluster.

    `issuer` is the key by which its answers are known; `files` the directory of certificates.
    """
    certificate, key, authority = (
        json.dumps(f"{files}/{name}") for name in ("server.crt", "server.key", "ca.crt")
    )
    lines = [
        "# Made by the auth service; it holds secrets.",
        f"tls {{ cert_file: {certificate}, key_file: {key} }}",
        f"accounts {{ SYS {{ users: [{{ {_known('system', secrets)} }}] }} }}",
        "system_account: SYS",
        "authorization {",
        "  timeout: 5",
        "  users: [",
        f"    {{ {_known(auth.name, secrets)}",
        "      permissions: {",
        *_allowed("publish", auth.publish),
        *_allowed("subscribe", (*auth.subscribe, f"{CALLS} {auth.name}")),
        "        allow_responses: true",
        "      }",
        "    }",
        "  ]",
        "  # Whoever is neither of the two is asked for by token, and gets rights from the answer.",
        f"  auth_callout {{ issuer: {json.dumps(issuer)}, auth_users: "
        f'[{json.dumps(auth.name)}, "system"] }}',
        "}",
        "",
    ]
    mutual = (
        f"tls {{ cert_file: {certificate}, key_file: {key}, ca_file: {authority}, verify: true }}"
    )
    return "\n".join(lines), f"include nats.conf\ncluster {{ {mutual} }}\n"


def _known(user: str, secrets: Mapping[str, str]) -> str:
    return f"user: {json.dumps(user)}, password: {json.dumps(secrets[user])}"


def _covered(tls: tuple[Path, Path] | None) -> list[str]:
    if tls is None:
        return []
    certificate, key = (json.dumps(str(path)) for path in tls)
    return ["tls {", f"  cert_file: {certificate}", f"  key_file: {key}", "}"]


def _allowed(what: str, allowed: Sequence[str]) -> list[str]:
    listed = (f"          {json.dumps(subject)}" for subject in allowed)
    return [f"        {what}: {{", "          allow: [", *listed, "          ]", "        }"]
