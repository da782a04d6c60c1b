"""XID events of the driver, awaited in one thread per GPU: one that hangs delays no other."""

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
REOPEN_S = 60.0
"""Events are subscribed to anew after this time, as for a GPU that came back."""
RETRY_S = 5.0
"""Pause after the driver refused the subscription."""
XID = pynvml.nvmlEventTypeXidCriticalError


class XidListener:
    def __init__(self) -> None:
        self._pending: dict[Xid, None] = {}
        """In a storm of application errors, a critical one must not get lost."""
        self._threads: dict[DeviceUuid, threading.Thread] = {}
        self._listed: frozenset[DeviceUuid] = frozenset()

    def listen(self, devices: Iterable[DeviceUuid]) -> None:
        """Threads of other devices end after what they wait for."""
        self._listed = frozenset(devices)
        ended = {device for device, thread in self._threads.items() if not thread.is_alive()}
        for device in ended - self._listed:
            del self._threads[device]
        for device in self._listed:
            if device in ended or device not in self._threads:
                thread = threading.Thread(target=self._listen, args=[device], daemon=True)
                self._threads[device] = thread
                thread.start()

    def drain(self) -> tuple[Xid, ...]:
        events: list[Xid] = []
        while self._pending:  # threads may add events meanwhile
            xid, _ = self._pending.popitem()
            events.append(xid)
        return tuple(reversed(events))

    def add(self, xid: Xid) -> None:
        self._pending[xid] = None

    def _listen(self, device: DeviceUuid) -> None:
        last_error = ""
        while device in self._listed:
            try:
                self._listen_once(device)
                last_error = ""
            except pynvml.NVMLError as error:
                if str(error) != last_error:
                    logger.info("no XID events of GPU %s, will retry: %s", device, error)
                last_error = str(error)
                time.sleep(RETRY_S)

    def _listen_once(self, device: DeviceUuid) -> None:
        with event_set(device) as events:
            until = time.monotonic() + REOPEN_S
            while time.monotonic() < until and device in self._listed:
                number = wait_for_xid(events)
                if number is not None:
                    self.add(Xid(device, number))


@contextlib.contextmanager
def event_set(device: DeviceUuid) -> Iterator[Any]:
    """Raises NVMLError, also if the GPU has no XID events."""
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
    try:
        event = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_TIMEOUT:
            return None
        raise
    return int(event.eventData) if event.eventType == XID else None
