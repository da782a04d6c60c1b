"""What the driver tells by itself: XID events, waited for in a thread that nothing else waits for.

The driver's set of events is opened anew every minute and after every error: only so are GPUs seen
that have come back, and is a driver let go of that was replaced.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pynvml

from services.node_agent.faults import Xid
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

WAIT_MS = 5000
OPEN_S = 60.0
PAUSE_S = 5.0


class NvmlEvents:
    """XID events since they were last asked for."""

    def __init__(self) -> None:
        self._seen: dict[Xid, None] = {}
        """Each once: in a storm of what applications do wrong the one that counts must not go."""
        self._thread: threading.Thread | None = None
        self._trouble = ""

    def drain(self) -> tuple[Xid, ...]:
        """Return what has come since the last call; begin to listen if nobody does."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._listen, name="xids", daemon=True)
            self._thread.start()
        seen: list[Xid] = []
        while self._seen:  # the listener goes on meanwhile
            xid, _ = self._seen.popitem()
            seen.append(xid)
        return tuple(reversed(seen))

    def note(self, xid: Xid) -> None:
        """Take an event."""
        self._seen[xid] = None

    def _listen(self) -> None:
        while True:
            try:
                self._listen_once()
                self._trouble = ""
            except pynvml.NVMLError as error:
                if str(error) != self._trouble:
                    logger.info("XID events are not heard, and tried again: %s", error)
                self._trouble = str(error)
                time.sleep(PAUSE_S)

    def _listen_once(self) -> None:
        """Listen for a minute to all GPUs that have events."""
        with opened() as (events, registered):
            if not registered:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            until = time.monotonic() + OPEN_S
            while time.monotonic() < until:
                found = heard(events)
                if found is not None:
                    self.note(found)


@contextlib.contextmanager
def opened() -> Iterator[tuple[Any, int]]:
    """Yield a set of events, and of how many GPUs; raises NVMLError."""
    pynvml.nvmlInit()
    try:
        events = pynvml.nvmlEventSetCreate()
        try:
            count = pynvml.nvmlDeviceGetCount()
            yield events, sum(_registered(number, events) for number in range(count))
        finally:
            pynvml.nvmlEventSetFree(events)
    finally:
        pynvml.nvmlShutdown()


def heard(events: Any) -> Xid | None:
    """Wait for an event for a while; None: there was none, or one of another kind."""
    try:
        event = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_TIMEOUT:
            return None
        raise
    if event.eventType != pynvml.nvmlEventTypeXidCriticalError:
        return None
    try:
        name = pynvml.nvmlDeviceGetUUID(event.device)
    except pynvml.NVMLError:  # lost so far that it has no name: any of them may be meant
        return Xid(None, int(event.eventData))
    uuid = name.decode() if isinstance(name, bytes) else name
    return Xid(DeviceUuid(uuid), int(event.eventData))


def _registered(number: int, events: Any) -> bool:
    """Listen to a GPU; one that is lost, or has no events, is left out."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        kinds = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
        if not kinds & pynvml.nvmlEventTypeXidCriticalError:
            return False
        pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    except pynvml.NVMLError:
        return False
    return True
