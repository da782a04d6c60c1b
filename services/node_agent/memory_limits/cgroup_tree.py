"""Directories of pods and containers in the node's cgroups, version 2.

https://github.com/opencontainers/cgroups. What does not match exactly one directory is refused.
"""

import re
from collections import deque
from collections.abc import Container, Iterator
from pathlib import Path

from services.node_agent.gpus.memory_limits import LimitError, LimitFault
from services.node_agent.kubelet.cgroups import parse_cgroup
from shared.model.errors import RequestError
from shared.model.names import PodUid

CGROUPS = Path("/sys/fs/cgroup")
PREFIX_LEVELS = 4
"""How deep the kubelet's directory may be: `--cgroup-root`, or a node that is a container."""
MOST_CGROUPS = 4096
"""Pods' cgroups are less deep than those that programs make in them."""
TRIAL = "leasehold-trial"
_KUBEPODS = re.compile(r"(?:.+-)?kubepods(\.slice)?")
_SLICE = ".slice"
QOS_CLASSES = ("burstable", "besteffort")
DMEM = "dmem"


def parse_process(text: str) -> tuple[PodUid, str]:
    """Return the pod and the container's ID of a process from its `/proc/<pid>/cgroup`.

    Raises RequestError for another form than one line of version 2: a path with a colon, or a
    second hierarchy, could name another cgroup than the driver's.
    """
    lines = text.splitlines()
    if len(lines) != 1 or not lines[0].startswith("0::/") or lines[0].count(":") != len("::"):
        raise RequestError(
            f"the process's cgroups are not one path of version 2: {text[:200]!r}; the node needs "
            "cgroups of version 2 only, and a runtime that uses the kubelet's cgroup driver"
        )
    pod, container_id = parse_cgroup(lines[0])
    if pod is None or not container_id:
        raise RequestError(
            f"the process's cgroup is not a container's of a pod: {lines[0][:200]!r}"
        )
    return pod, container_id


class CgroupTree:
    def __init__(self, root: Path = CGROUPS) -> None:
        self.root = root
        self._kubepods: tuple[Path, ...] = ()

    def pod_directory(self, pod: PodUid) -> Path:
        """Raises LimitError if the pod has none, RequestError if it has several."""
        found = self._pod_directories(pod)
        if not found:
            self._kubepods = tuple(_list_kubepods(self.root, PREFIX_LEVELS))
            found = self._pod_directories(pod)
        if not found:
            raise LimitError(LimitFault.NO_CGROUP, f"pod {pod} has no cgroup below {self.root}")
        if len(found) > 1:
            named = ", ".join(map(str, found))
            raise RequestError(f"pod {pod} has several cgroups: {named}")
        return found[0]

    def container_directory(self, pod: PodUid, container_id: str) -> Path:
        """Raises LimitError if the container has no cgroup in that of its pod."""
        within = self.pod_directory(pod)
        names = {
            container_id,
            *(
                f"{prefix}{container_id}.scope"
                for prefix in ("cri-containerd-", "crio-", "docker-")
            ),
        }
        found = [within / name for name in sorted(names) if _is_directory(within / name)]
        if len(found) != 1:
            raise LimitError(
                LimitFault.NO_CGROUP, f"container {container_id} has no cgroup in {within}"
            )
        return found[0]

    def list_cgroups(self, except_pods: Container[PodUid]) -> Iterator[Path]:
        directories = deque([self.root])
        count = 0
        while directories and count < MOST_CGROUPS:
            for path in _inner(directories.popleft()):
                pod, _ = parse_cgroup(f"0::/{path.relative_to(self.root)}")
                if (pod is None or pod not in except_pods) and not path.name.startswith(TRIAL):
                    count += 1
                    directories.append(path)
                    yield path

    def first_gap(self, directory: Path) -> Path | None:
        """A cgroup has the files if the one above lists them in `cgroup.subtree_control`."""
        levels = [directory, *directory.parents]
        below_root = levels[: levels.index(self.root)]
        return next((level for level in reversed(below_root) if not has_dmem(level)), None)

    def _pod_directories(self, pod: PodUid) -> list[Path]:
        return [
            path
            for kubepods in self._kubepods
            for path in _pod_paths(kubepods, pod)
            if _is_directory(path)
        ]


def has_dmem(directory: Path) -> bool:
    try:
        listed = (directory.parent / "cgroup.subtree_control").read_text()
    except OSError:
        return False
    return DMEM in listed.split()


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _inner(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if _is_directory(path))
    except OSError:
        return []  # it was removed meanwhile


def _list_kubepods(directory: Path, levels: int) -> Iterator[Path]:
    for path in _inner(directory):
        if _KUBEPODS.fullmatch(path.name):
            yield path
        elif levels > 1:
            yield from _list_kubepods(path, levels - 1)


def _pod_paths(kubepods: Path, pod: PodUid) -> Iterator[Path]:
    if not kubepods.name.endswith(_SLICE):
        yield kubepods / f"pod{pod}"
        yield from (kubepods / qos / f"pod{pod}" for qos in QOS_CLASSES)
        return
    base = kubepods.name.removesuffix(_SLICE)
    unit = f"pod{pod.replace('-', '_')}{_SLICE}"
    yield kubepods / f"{base}-{unit}"
    for qos in QOS_CLASSES:
        yield kubepods / f"{base}-{qos}{_SLICE}" / f"{base}-{qos}-{unit}"
