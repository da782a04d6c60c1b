"""Work between services of one process: it reaches its handler without a message."""

from shared.model.events.event import Event
from shared.nats.inbox import EVENTS_PER_MESSAGE, Inbox


class LocalHandlers:
    """The handlers of this process, by the type of work that each consumes."""

    def __init__(self) -> None:
        self._inboxes: dict[type[Event], Inbox] = {}

    def add(self, kind: type[Event], inbox: Inbox) -> None:
        """Let this handler have the work of `kind` that services of this process send."""
        self._inboxes[kind] = inbox

    def inbox_of(self, kind: type[Event]) -> Inbox | None:
        """Return the handler's inbox.

        None if there is none, or a full batch waits in it: other replicas share the work then.
        """
        inbox = self._inboxes.get(kind)
        if inbox is None or inbox.is_closed or len(inbox.waiting) >= EVENTS_PER_MESSAGE:
            return None
        return inbox
