"""What the driver tells by itself: XID events, waited for in a thread of each GPU's own.

So a GPU that hangs makes no other deaf, and an event is of the GPU that was listened to, even if
that is so far gone that it does not know its name any more. The driver's set of events is opened
anew every minute and after every error: only so is a GPU heard that has come back, and is a driver
let go of that was replaced.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pynvml

from services.node_agent.gpus.device_faults import Xid
from shared.model.names import DeviceUuid

logger = logging.getLogger(__name__)

WAIT_MS = 5000
OPEN_S = 60.0
PAUSE_S = 5.0
XID = pynvml.nvmlEventTypeXidCriticalError


class XidListener:
    """XID events since they were last asked for."""

    def __init__(self) -> None:
        self._seen: dict[Xid, None] = {}
        """Each once: in a storm of what applications do wrong the one that counts must not go."""
        self._threads: dict[DeviceUuid, threading.Thread] = {}

    def listen(self, devices: Iterable[DeviceUuid]) -> None:
        """Listen to these from now on."""
        for device in devices:
            thread = self._threads.get(device)
            if thread is None or not thread.is_alive():
                thread = threading.Thread(target=self._listen, args=[device], daemon=True)
                self._threads[device] = thread
                thread.start()

    def drain(self) -> tuple[Xid, ...]:
        """Return what has come since the last call."""
        seen: list[Xid] = []
        while self._seen:  # the listeners go on meanwhile
            xid, _ = self._seen.popitem()
            seen.append(xid)
        return tuple(reversed(seen))

    def note(self, xid: Xid) -> None:
        """Take an event."""
        self._seen[xid] = None

    def _listen(self, device: DeviceUuid) -> None:
        trouble = ""
        while True:
            try:
                self._listen_once(device)
                trouble = ""
            except pynvml.NVMLError as error:
                if str(error) != trouble:
                    logger.info("XIDs of GPU %s are not heard, and tried again: %s", device, error)
                trouble = str(error)
                time.sleep(PAUSE_S)

    def _listen_once(self, device: DeviceUuid) -> None:
        """Listen for a minute."""
        with event_set(device) as events:
            until = time.monotonic() + OPEN_S
            while time.monotonic() < until:
                number = wait_for_xid(events)
                if number is not None:
                    self.note(Xid(device, number))


@contextlib.contextmanager
def event_set(device: DeviceUuid) -> Iterator[Any]:
    """Yield the set of a GPU's events. Raises NVMLError, also if it has none."""
    pynvml.nvmlInit()
    try:
        events = pynvml.nvmlEventSetCreate()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(device)
            if not pynvml.nvmlDeviceGetSupportedEventTypes(handle) & XID:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            pynvml.nvmlDeviceRegisterEvents(handle, XID, events)
            yield events
        finally:
            pynvml.nvmlEventSetFree(events)
    finally:
        pynvml.nvmlShutdown()


def wait_for_xid(events: Any) -> int | None:
    """Wait for an XID for a while; None: there was none, or an event of another kind."""
    try:
        event = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_TIMEOUT:
            return None
        raise
    return int(event.eventData) if event.eventType == XID else None
