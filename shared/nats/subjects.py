"""Names on NATS: the subject of every event, of every durable consumer, of every user's inbox.

The bus speaks by them, and the permissions of its users are made from them, so that neither can
say what the other does not mean.
"""

from shared.model.events.event import Event

STREAM = "LEASEHOLD"
API = "$JS.API"


def token(route: str) -> str:
    """Return a node's name as the end of a subject, its dots written as `_`; '' for no node."""
    return "." + route.replace(".", "_") if route else ""


def publish_subject(kind: type[Event], route: str = "") -> str:
    """Return where an event is published."""
    return f"leasehold.{kind.delivery}.{kind.subject}{token(route)}"


def subscribe_subject(kind: type[Event], route: str = "") -> str:
    """Return where events are heard: of one node, or of all if none is given."""
    return f"leasehold.{kind.delivery}.{kind.subject}{_filter(kind, route)}"


def request_subject(question: type[Event], route: str = "") -> str:
    """Return where a question is put."""
    return f"leasehold.request.{question.subject}{token(route)}"


def reply_subject(question: type[Event], route: str = "") -> str:
    """Return where questions are heard: to one node, or to all if none is given."""
    return f"leasehold.request.{question.subject}{_filter(question, route)}"


def is_routed(kind: type[Event]) -> bool:
    """Say whether the events are each about one node, whose name ends their subject."""
    return kind.route is not Event.route


def durable_of(service: str, method: str) -> str:
    """Return the durable consumer of a service's handler of work."""
    return f"{service}-{method}".replace("_", "-")


def deliver(durable: str) -> str:
    """Return where the server hands out a consumer's work."""
    return f"leasehold.deliver.{durable}"


def user_of(service: str, node: str = "") -> str:
    """Return the name of a service's user; where it looks after one node, that node has its own."""
    return f"{service}.{node}" if node else service


def inbox_of(user: str) -> str:
    """Return what the subjects begin with on which a user alone hears answers."""
    service, _, node = user.partition(".")
    return f"_INBOX.{service}{token(node)}"


def _filter(kind: type[Event], route: str) -> str:
    if not is_routed(kind):
        return ""
    return token(route) or ".*"
