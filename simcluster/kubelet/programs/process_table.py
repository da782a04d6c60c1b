"""The node's /proc, with the processes of its containers only.

A node agent finds a process's container by its cgroup. The processes of simulated containers have
no cgroup of their own: here each has one, with the name that a kubelet gives it, beside links to
its other files.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

HOST = Path("/proc")
_LINKED = ("status", "stat")


class ProcessTable:
    """A directory with an entry per process, as /proc has."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def clear(self) -> None:
        """Forget the processes of an earlier run."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)

    def add_tree(self, pid: int, pod_uid: str, container_id: str) -> None:
        """Add a process of a container, and its present children."""
        for each in (pid, *_descendants(pid)):
            entry = self.root / str(each)
            if entry.exists():
                continue
            draft = self.root / f".{each}"
            draft.mkdir(exist_ok=True)
            (draft / "cgroup").write_text(cgroup(pod_uid, container_id))
            for name in _LINKED:
                with contextlib.suppress(FileExistsError):
                    (draft / name).symlink_to(HOST / str(each) / name)
            draft.rename(entry)

    def remove_ended(self) -> None:
        """Remove the entries of processes that have ended."""
        for entry in self.root.iterdir():
            if entry.name.isdecimal() and not (HOST / entry.name).exists():
                shutil.rmtree(entry, ignore_errors=True)


def cgroup(pod_uid: str, container_id: str) -> str:
    """Return the content of a process's `cgroup`, with systemd as the cgroup driver."""
    slice_name = f"kubepods-pod{pod_uid.replace('-', '_')}.slice"
    container = container_id.rpartition("/")[2]
    return f"0::/kubepods.slice/{slice_name}/cri-containerd-{container}.scope\n"


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in (HOST / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))
