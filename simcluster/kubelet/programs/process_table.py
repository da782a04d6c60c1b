"""The node's /proc: the processes of its containers, each with its container's cgroup."""

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

HOST = Path("/proc")
_LINKED = ("status", "stat")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WINDOW_S = 15.0
"""How long a rate is measured against the same earlier time."""


class ProcessTable:
    """The node's /proc, with the processes of its containers only.

    A node agent finds a process's container by its cgroup. The processes of simulated containers
    have no cgroup of their own: here each has one, with the name that a kubelet gives it, beside
    links to its other files. Its methods may run in any thread.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._started: defaultdict[str, dict[int, str]] = defaultdict(dict)
        """By container, the start time of each of its processes: a PID may be used again."""
        self._kept: dict[str, list[Path]] = {}
        """By container, the entries of processes that outlive it."""
        self._samples: dict[str, tuple[float, float]] = {}
        """By process, an earlier time and the seconds of CPU that it had used by then."""

    def clear(self) -> None:
        """Forget the processes of an earlier run."""
        with self._lock:
            self._started.clear()
            self._kept.clear()
            shutil.rmtree(self.root, ignore_errors=True)
            self.root.mkdir(parents=True)

    def add_tree(self, pid: int, pod_uid: str, container_id: str) -> None:
        """Add a process of a container and its present children; remove those that have ended."""
        with self._lock:
            self._remove_ended(container_id)
            if container_id in self._kept:
                return
            started = self._started[container_id]
            for process in (pid, *_descendants(pid)):
                if process not in started and (since := _start_of(process)) is not None:
                    started[process] = since
                    self._add(process, cgroup(pod_uid, container_id))

    def _add(self, process: int, own_cgroup: str) -> None:
        entry = self.root / str(process)
        draft = self.root / f".{process}"
        for left in (entry, draft):  # of an earlier process with this PID
            shutil.rmtree(left, ignore_errors=True)
        draft.mkdir()
        (draft / "cgroup").write_text(own_cgroup)
        for name in _LINKED:
            (draft / name).symlink_to(HOST / str(process) / name)
        draft.rename(entry)

    def kill(self, container_id: str) -> bool:
        """Kill the container's processes that still run; return whether there were any.

        The entries of the others are removed.
        """
        with self._lock:
            self._remove_ended(container_id)
            left = tuple(self._started.get(container_id, ()))
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        return bool(left)

    def remove_ended(self, container_id: str) -> None:
        """Remove the entries of the container's processes that have ended."""
        with self._lock:
            self._remove_ended(container_id)

    def keep(self, container_id: str) -> None:
        """Show the container's present processes in uninterruptible sleep, until `drop`."""
        with self._lock:
            self._remove_ended(container_id)
            kept = self._kept[container_id] = []
            for process in self._started.get(container_id, ()):
                entry = self.root / str(process)
                with contextlib.suppress(OSError):  # it has ended since
                    texts = {name: _asleep((entry / name).read_text()) for name in _LINKED}
                    for name, text in texts.items():
                        (entry / name).unlink()
                        (entry / name).write_text(text)
                    kept.append(entry)

    def drop(self, container_id: str) -> None:
        """Remove the entries of a container that were kept."""
        with self._lock:
            for entry in self._kept.pop(container_id, ()):
                shutil.rmtree(entry, ignore_errors=True)

    def _remove_ended(self, container_id: str) -> None:
        """Remove the entries of processes that have ended, reaped by their parent or not."""
        started = self._started.get(container_id, {})
        kept = self._kept.get(container_id, ())
        for process in [pid for pid, since in started.items() if _start_of(pid) != since]:
            del started[process]
            if (entry := self.root / str(process)) not in kept:
                shutil.rmtree(entry, ignore_errors=True)
        if not started:
            self._started.pop(container_id, None)

    def usage(self) -> Mapping[str, tuple[float, int]]:
        """Return the cores in use and the bytes of memory of each container's processes."""
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        usage: dict[str, tuple[float, int]] = {}
        samples: dict[str, tuple[float, float]] = {}
        for entry in self.root.glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                container = (entry / "cgroup").read_text().rpartition("-")[2].partition(".")[0]
                used_s = (int(fields[11]) + int(fields[12])) / _TICKS
                since_s, used_then_s = self._samples.get(entry.name, (int(fields[19]) / _TICKS, 0))
                is_old = now_s - since_s > _WINDOW_S
                samples[entry.name] = (now_s, used_s) if is_old else (since_s, used_then_s)
                cores, memory_bytes = usage.get(container, (0.0, 0))
                usage[container] = (
                    cores + (used_s - used_then_s) / max(now_s - since_s, 1 / _TICKS),
                    memory_bytes + int(fields[21]) * _PAGE_BYTES,
                )
        self._samples = samples
        return usage


def cgroup(pod_uid: str, container_id: str) -> str:
    """Return the content of a process's `cgroup`, with systemd as the cgroup driver."""
    slice_name = f"kubepods-pod{pod_uid.replace('-', '_')}.slice"
    container = container_id.rpartition("/")[2]
    return f"0::/kubepods.slice/{slice_name}/cri-containerd-{container}.scope\n"


_START_FIELD = 19
"""Field 22 of `/proc/<pid>/stat` is the 20th after the name."""
_ENDED = frozenset("ZX")
"""States of a process that has ended, but that its parent has not reaped yet, or never will."""


def _start_of(pid: int) -> str | None:
    """Return when a process started, in ticks since boot; None if it has ended."""
    try:
        fields = (HOST / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in _ENDED else fields[_START_FIELD]


def _asleep(text: str) -> str:
    """Return a process's `stat` or `status` with uninterruptible sleep as its state."""
    if "\nState:" in text:
        return re.sub(r"(?m)^State:.*$", "State:\tD (disk sleep)", text)
    name, _, fields = text.rpartition(") ")
    return f"{name}) D{fields[1:]}"


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in (HOST / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))
