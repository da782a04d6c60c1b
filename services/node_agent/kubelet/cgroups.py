"""The pod and container of a process, by the cgroup that the kubelet put it in.

Nothing that a container writes is trusted.
"""

import errno
import os
import re
from collections.abc import Container, Iterator
from pathlib import Path

from services.node_agent.kubelet.pods import ProcessOrigin
from shared.model.errors import UnavailableError
from shared.model.names import PodUid

_POD = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./:]|$)"
)
"""`pod<uid>` with cgroupfs; `...-pod<uid>.slice` with systemd, dashes written as `_`. The UIDs of
static pods have no dashes."""
_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")
"""`<id>`, `cri-containerd-<id>.scope`, `crio-<id>.scope`, `docker-<id>.scope`, and containerd's
`...:cri-containerd:<id>`."""

_NODE_NAMESPACE = "pid:[4026531836]"
"""`PROC_PID_INIT_INO`: the number of the kernel's first PID namespace."""
_START_TIME_FIELD = 19
"""Field 22 of `/proc/<pid>/stat` is the 20th after the name."""
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO})
MOST_COMMAND = 63
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def parse_cgroup(text: str) -> tuple[PodUid | None, str]:
    """The outermost pod counts, as a pod can create cgroups below its own.

    If hierarchies name different pods, there is none.
    """
    owners = {
        _parse_path(line.split(":", 2)[2]) for line in text.splitlines() if line.count(":") > 1
    }
    pods = {pod for pod, _ in owners if pod is not None}
    if len(pods) != 1:
        return None, ""
    ids = {container for pod, container in owners if pod is not None and container}
    return pods.pop(), ids.pop() if len(ids) == 1 else ""


def _parse_path(path: str) -> tuple[PodUid | None, str]:
    pod = _POD.search(path)
    if pod is None:
        return None, ""
    container = _CONTAINER.search(path, pod.end())
    return PodUid(pod[1].replace("_", "-")), container[1] if container else ""


def parse_inner_pid(status: str) -> int:
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            pids = line.split()[1:]
            return int(pids[-1]) if pids and pids[-1].isdecimal() else 0
    return 0


def parse_command(status: str) -> str:
    """The kernel escapes line breaks in the name."""
    first = status.partition("\n")[0]
    return first.removeprefix("Name:").strip()[:MOST_COMMAND] if first.startswith("Name:") else ""


def parse_start_time_s(stat: str) -> float:
    """Return seconds since boot, or 0, from `/proc/<pid>/stat`.

    The process name in that file may contain spaces and parentheses.
    """
    fields = stat.rpartition(")")[2].split()
    if len(fields) <= _START_TIME_FIELD or not fields[_START_TIME_FIELD].isdecimal():
        return 0.0
    return int(fields[_START_TIME_FIELD]) / _TICKS_PER_S


def pods_of_processes(proc: Path) -> dict[int, PodUid]:
    """Costs 20 µs for every process. Raises UnavailableError if processes cannot be seen."""
    return {pid: pod for pid, pod, _ in _pod_processes(proc)}


def containers_of_processes(proc: Path) -> dict[PodUid, set[str]]:
    """Include sandboxes; the ID of an unknown container is ""."""
    containers: dict[PodUid, set[str]] = {}
    for _, pod, container in _pod_processes(proc):
        containers.setdefault(pod, set()).add(container)
    return containers


def _pod_processes(proc: Path) -> Iterator[tuple[int, PodUid, str]]:
    try:
        entries = list(os.scandir(proc))
    except OSError as error:
        raise UnavailableError(f"processes cannot be listed: {proc}: {error.strerror}") from error
    for entry in entries:
        if entry.name.isdecimal():
            pod, container = _origin(proc / entry.name)
            if pod is not None:
                yield int(entry.name), pod, container


def pod_of_process(process: Path) -> PodUid | None:
    return _origin(process)[0]


def in_node_namespace(process: Path) -> bool:
    try:
        return (process / "ns" / "pid").readlink().name == _NODE_NAMESPACE
    except OSError:
        return False


def _origin(process: Path) -> tuple[PodUid | None, str]:
    try:
        return parse_cgroup(_read(process / "cgroup"))
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            raise UnavailableError(f"processes cannot be seen: {error.strerror}") from error
        return None, ""  # it has ended


def _read(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return file.read().decode(errors="replace")


def processes_of(pods: Container[PodUid], proc: Path) -> dict[int, ProcessOrigin]:
    pids = (pid for pid, pod in pods_of_processes(proc).items() if pod in pods)
    origins = ((pid, read_origin(pid, proc)) for pid in pids)
    return {pid: origin for pid, origin in origins if origin is not None}


def read_origin(
    pid: int, proc: Path, *, reported_at_s: float | None = None
) -> ProcessOrigin | None:
    """Return None if no process has that PID.

    A process that started after `reported_at_s`, when the driver listed the PID, reuses it.
    """
    try:
        cgroup, status, stat = (_read(proc / str(pid) / of) for of in ("cgroup", "status", "stat"))
    except OSError:
        return None
    if reported_at_s is not None and parse_start_time_s(stat) > reported_at_s:
        return None
    pod, container = parse_cgroup(cgroup)
    return ProcessOrigin(
        pod=pod,
        container_id=container,
        inner_pid=parse_inner_pid(status),
        command=parse_command(status),
    )
