"""Fixtures of the tests with a fake NVML: no thread outlives the fake driver."""

import threading
import time
from collections.abc import Iterator

import pynvml
import pytest

from services.node_agent.gpus import worker_threads
from services.node_agent.gpus.nvml.xid_listener import XidListener


@pytest.fixture(autouse=True)
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call no libnvidia-ml that an earlier test of this process has loaded.

    Fake handles are no pointers; a function without a fake raises, as without a driver.
    """
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


@pytest.fixture(autouse=True)
def joined_gpu_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for the calls of the test to end while its driver is still installed."""
    yield
    end_at = time.monotonic() + 30
    while sum(each.name == "gpu" for each in threading.enumerate()) > len(worker_threads.idle):
        assert time.monotonic() < end_at
        time.sleep(0.001)


@pytest.fixture
def no_xid_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no XID listener threads, which never end."""
    monkeypatch.setattr(XidListener, "listen", lambda *_: None)
