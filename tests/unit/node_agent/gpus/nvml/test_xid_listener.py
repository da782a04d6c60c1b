"""XID events, with a fake driver."""

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from services.node_agent.gpus.device_faults import Xid
from services.node_agent.gpus.nvml.xid_listener import XidListener, event_set, wait_for_xid
from shared.model.names import DeviceUuid
from tests.support.waiting import until_blocking

A, B, C = DeviceUuid("GPU-a"), DeviceUuid("GPU-b"), DeviceUuid("GPU-c")
XID = pynvml.nvmlEventTypeXidCriticalError


class StopListeningError(Exception):
    """Ends the threads of a `StoppableListener`."""


class StoppableListener(XidListener):
    """A listener whose threads end with the test."""

    def _listen(self, device: DeviceUuid) -> None:
        with contextlib.suppress(StopListeningError):
            super()._listen(device)


class Driver:
    """NVML's events by GPU: A has those of `events`, B hangs, C supports none."""

    def __init__(self) -> None:
        self.events: dict[str, list[Any]] = {A: [], B: []}
        self.released = threading.Event()
        self.freed = 0
        self.inits = 0
        self.stopped = False
        """Whether calls of listener threads raise StopListeningError."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers: dict[str, Any] = {
            "nvmlInit": lambda: self.count("inits", 1),
            "nvmlShutdown": lambda: self.count("inits", -1),
            "nvmlDeviceGetHandleByUUID": self.handle,
            "nvmlDeviceGetSupportedEventTypes": lambda handle: 0 if handle == C else 0x1F,
            "nvmlDeviceRegisterEvents": lambda handle, _, events: events.append(handle),
            "nvmlEventSetCreate": list,
            "nvmlEventSetFree": lambda _: self.count("freed", 1),
            "nvmlEventSetWait_v2": self.wait,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)

    def count(self, name: str, change: int) -> None:
        self.raise_if_stopped()
        setattr(self, name, getattr(self, name) + change)

    def raise_if_stopped(self) -> None:
        if self.stopped and threading.current_thread() is not threading.main_thread():
            raise StopListeningError

    def handle(self, uuid: str) -> str:
        if uuid == B:
            self.released.wait(30)
        self.raise_if_stopped()
        return uuid

    def wait(self, events: list[str], _: int) -> Any:
        self.raise_if_stopped()
        pending = self.events[events[0]]
        if not pending:
            time.sleep(0.01)
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        event = pending.pop(0)
        if isinstance(event, Exception):
            raise event
        return event


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    made.install(monkeypatch)
    others = set(threading.enumerate())
    yield made
    made.stopped = True
    made.released.set()
    for thread in set(threading.enumerate()) - others:
        thread.join(30)
        assert not thread.is_alive(), f"{thread.name} outlives the fake driver"


def event(kind: int, data: int) -> Any:
    return SimpleNamespace(eventType=kind, eventData=data)


def test_xid_events_are_received_until_the_driver_fails(driver: Driver) -> None:
    driver.events[A] = [
        event(XID, 79),
        event(pynvml.nvmlEventTypePState, 2),
        pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT),
        pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST),
    ]

    with event_set(A) as events:
        found = [wait_for_xid(events) for _ in range(3)]
        with pytest.raises(pynvml.NVMLError):
            wait_for_xid(events)

    assert found == [79, None, None]
    assert (driver.freed, driver.inits) == (1, 0)


def test_a_gpu_without_xid_events_is_not_supported(driver: Driver) -> None:
    with pytest.raises(pynvml.NVMLError, match="Not Supported"), event_set(C):
        pass

    assert (driver.freed, driver.inits) == (1, 0)


def test_a_hanging_gpu_does_not_block_events_of_others(driver: Driver) -> None:
    events = StoppableListener()
    driver.events[A] = [event(XID, 48)]

    events.listen([B, A])
    found = until_blocking(events.drain)

    assert found == (Xid(A, 48),)


def test_a_flood_of_equal_events_does_not_drop_others() -> None:
    events = XidListener()
    events.add(Xid(B, 79))
    for _ in range(100_000):
        events.add(Xid(A, 31))

    assert events.drain() == (Xid(B, 79), Xid(A, 31))
    assert events.drain() == ()
