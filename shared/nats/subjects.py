"""Names on NATS: subjects of events, queue groups, inboxes of users; pure.

The bus and the permissions of its users both use them.
"""

import re
from collections.abc import Mapping

from shared.model.events.event import Delivery, Event, is_work
from shared.model.events.pod_events import Heartbeat

CONFIRMED = "confirmed"
INBOXES = "_INBOX."
ACCOUNT = "LEASEHOLD"
"""Of all users; servers have an account of their own."""
CONNECTED = f"$SYS.ACCOUNT.{ACCOUNT}.CONNECT"
FLOODED = "leasehold.broadcast.agent.flooded.v1"
CONNECTION_SHARES = "connection-shares"
AGENT = "node-agent"
_SERVICE_INBOX = re.compile(
    rf"_INBOX\.(?!{AGENT}\.)[a-z][a-z-]*\.[0-9A-Za-z]{{1,32}}\.[0-9A-Za-z]{{1,32}}"
)
_IN_INBOX = re.compile(r"\.[0-9A-Za-z]{1,32}\.[0-9A-Za-z]{1,32}")
MOST_OF_A_NODE = 4
"""One runs, and two while it is replaced."""
MOST_OF_A_SERVICE = 64
MAX_DIGITS = 18


def token(route: str) -> str:
    """Return a node's name as the last token of a subject, or "" without a node.

    >>> token("gpu-1.example")
    '.gpu-1_example'
    """
    return "." + route.replace(".", "_") if route else ""


def publish_subject(kind: type[Event], route: str = "") -> str:
    return f"leasehold.{kind.delivery}.{kind.subject}{token(route)}"


def subscribe_subject(kind: type[Event], route: str = "") -> str:
    return f"leasehold.{kind.delivery}.{kind.subject}{_filter(kind, route)}"


def copy_subject(kind: type[Event], route: str = "") -> str:
    return f"leasehold.{Delivery.COPY}.{kind.subject}{token(route)}"


def observed_subjects(kind: type[Event]) -> tuple[str, ...]:
    """Work is copied to observers by NATS, or by its sender if it stays in its process."""
    copies = f"leasehold.{Delivery.COPY}.{kind.subject}{_filter(kind, '')}"
    return tuple(dict.fromkeys((subscribe_subject(kind), *((copies,) if is_work(kind) else ()))))


def request_subject(question: type[Event], route: str = "") -> str:
    return f"leasehold.request.{question.subject}{token(route)}"


def reply_subject(question: type[Event], route: str = "") -> str:
    return f"leasehold.request.{question.subject}{_filter(question, route)}"


def node_in(kind: type[Event], subject: str) -> str:
    return subject.rpartition(".")[2].replace("_", ".") if is_routed(kind) else ""


def sender_in(kind: type[Event], subject: str) -> str:
    """Return the sender, whom NATS has authenticated, or "" if the subject names none."""
    return node_in(kind, subject) if kind.is_of_agent or kind is Heartbeat else ""


def agent_in(kind: type[Event], subject: str) -> str:
    sender = sender_in(kind, subject)
    if kind is Heartbeat:
        return sender if is_agent(sender) else ""
    return user_of(AGENT, sender) if sender else ""


def is_agent(user: str) -> bool:
    return user.startswith(f"{AGENT}.")


def is_routed(kind: type[Event]) -> bool:
    return kind.route is not Event.route


def group_of(service: str, method: str) -> str:
    """Return the queue group in which the replicas of a service share the work of a handler.

    >>> group_of("binder", "bind_pods")
    'binder-bind-pods'
    """
    return f"{service}-{method}".replace("_", "-")


def confirmation_subject(prefix: str) -> str:
    return f"{prefix}.{CONFIRMED}"


def number_of(reply: str) -> int | None:
    """Return the number of the message of a reply subject, or None for one of reports.

    >>> number_of("_INBOX.placer.x7.42")
    42
    """
    number = reply.rpartition(".")[2]
    is_number = number.isascii() and number.isdecimal() and len(number) <= MAX_DIGITS
    return int(number) if is_number else None


def is_inbox_of_sender(kind: type[Event], subject: str, reply: str) -> bool:
    """Return whether the reply subject of a message is an inbox of the message's sender.

    What only agents publish is from the node in the subject; all else is from services.
    """
    if not kind.is_of_agent:
        return _SERVICE_INBOX.fullmatch(reply) is not None
    prefix = inbox_of(user_of(AGENT, node_in(kind, subject)))
    return reply.startswith(prefix) and _IN_INBOX.fullmatch(reply, len(prefix)) is not None


def has_no_responders(headers: Mapping[str, str] | None) -> bool:
    return headers is not None and headers.get("Status") == "503"


def user_of(service: str, node: str = "") -> str:
    """Return the NATS user of a service; a service per node has one user per node.

    >>> user_of("node-agent", "gpu-1"), user_of("binder")
    ('node-agent.gpu-1', 'binder')
    """
    return f"{service}.{node}" if node else service


def most_replicas(user: str) -> int:
    return MOST_OF_A_NODE if "." in user else MOST_OF_A_SERVICE


def server_request(server: str, request: str) -> str:
    return f"$SYS.REQ.SERVER.{server}.{request}"


def inbox_of(user: str) -> str:
    """Return the prefix of a user's reply subjects: two tokens, or three of a node's agent.

    >>> inbox_of("node-agent.gpu-1")
    '_INBOX.node-agent.gpu-1'
    """
    service, _, node = user.partition(".")
    return f"{INBOXES}{service}{token(node)}"


def inboxes_of(user: str) -> str:
    """Return a pattern of fixed depth: the server keeps a node for each token of a subscription."""
    return f"{inbox_of(user)}.*.*"


def _filter(kind: type[Event], route: str) -> str:
    if not is_routed(kind):
        return ""
    return token(route) or ".*"
