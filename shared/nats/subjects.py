"""Names on NATS: subjects of events, durable consumers, inboxes of users; pure.

The bus and the permissions of its users both use them, so that they cannot differ.
"""

from shared.model.events.event import Event

STREAM = "LEASEHOLD"
API = "$JS.API"


def token(route: str) -> str:
    """Return a node's name as the last token of a subject, with `_` for dots; '' for no node."""
    return "." + route.replace(".", "_") if route else ""


def publish_subject(kind: type[Event], route: str = "") -> str:
    """Return the subject that an event is published to."""
    return f"leasehold.{kind.delivery}.{kind.subject}{token(route)}"


def subscribe_subject(kind: type[Event], route: str = "") -> str:
    """Return the subject to subscribe to for events of one node, or of all nodes."""
    return f"leasehold.{kind.delivery}.{kind.subject}{_filter(kind, route)}"


def request_subject(question: type[Event], route: str = "") -> str:
    """Return the subject that a request is sent to."""
    return f"leasehold.request.{question.subject}{token(route)}"


def reply_subject(question: type[Event], route: str = "") -> str:
    """Return the subject to subscribe to for requests to one node, or to all nodes."""
    return f"leasehold.request.{question.subject}{_filter(question, route)}"


def is_routed(kind: type[Event]) -> bool:
    """Return whether the subject of these events ends in the name of a node."""
    return kind.route is not Event.route


def durable_of(service: str, method: str) -> str:
    """Return the durable consumer of a service's handler."""
    return f"{service}-{method}".replace("_", "-")


def deliver(durable: str) -> str:
    """Return the subject that the server delivers the work of a consumer to."""
    return f"leasehold.deliver.{durable}"


def direct_publish_subject(kind: type[Event], route: str = "") -> str:
    """Return the subject that work is sent to while JetStream does not store it."""
    return f"leasehold.direct.{kind.subject}{token(route)}"


def direct_subscribe_subject(kind: type[Event], route: str = "") -> str:
    """Return the subject to subscribe to for work that JetStream does not store."""
    return f"leasehold.direct.{kind.subject}{_filter(kind, route)}"


def user_of(service: str, node: str = "") -> str:
    """Return the NATS user of a service; a service per node has one user per node."""
    return f"{service}.{node}" if node else service


def inbox_of(user: str) -> str:
    """Return the prefix of the reply subjects of a user."""
    service, _, node = user.partition(".")
    return f"_INBOX.{service}{token(node)}"


def _filter(kind: type[Event], route: str) -> str:
    if not is_routed(kind):
        return ""
    return token(route) or ".*"
