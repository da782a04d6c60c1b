"""Whose process is it? Read from the cgroup that the kubelet put it in.

A driver names processes by the node's pids; the kubelet names a pod's cgroup after its uid, and the
runtime a container's after its id, in one of a few forms. Nothing a container says about itself is
believed here.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shared.model.names import PodUid

_POD = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./:]|$)"
)
"""`pod<uid>` with cgroupfs; `...-pod<uid>.slice` with systemd, dashes written as `_`. Pods from
files have uids without dashes."""
_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")
"""`<id>`, `cri-containerd-<id>.scope`, `crio-<id>.scope`, `docker-<id>.scope`, and containerd's
`...:cri-containerd:<id>`."""

_STARTED = 19
"""Field 22 of `/proc/<pid>/stat` is the 20th after the name."""
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOrigin:
    """Where a process comes from."""

    pod: PodUid | None
    """None: from no pod."""
    container_id: str = ""
    """The runtime's; empty: unknown."""
    inner_pid: int = 0
    """Its pid as it sees itself."""


def parse_cgroup(text: str) -> tuple[PodUid | None, str]:
    """Return pod and container id from a `/proc/<pid>/cgroup`, of either version of cgroups.

    The outermost pod of a path counts: what is below it is the pod's own doing. Hierarchies that
    name different pods name none.
    """
    found = {
        _parse_path(line.split(":", 2)[2]) for line in text.splitlines() if line.count(":") > 1
    }
    pods = {pod for pod, _ in found if pod is not None}
    if len(pods) != 1:
        return None, ""
    ids = {container for pod, container in found if pod is not None and container}
    return pods.pop(), ids.pop() if len(ids) == 1 else ""


def _parse_path(path: str) -> tuple[PodUid | None, str]:
    pod = _POD.search(path)
    if pod is None:
        return None, ""
    container = _CONTAINER.search(path, pod.end())
    return PodUid(pod[1].replace("_", "-")), container[1] if container else ""


def parse_inner_pid(status: str) -> int:
    """Return the pid that a process sees itself, from its `/proc/<pid>/status`; 0 if untold."""
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            pids = line.split()[1:]
            return int(pids[-1]) if pids and pids[-1].isdecimal() else 0
    return 0


def parse_started_s(stat: str) -> float:
    """Return when a process began, from its `/proc/<pid>/stat`, in seconds since the machine did.

    0 if untold. The name in it may hold anything, blanks and brackets too.
    """
    fields = stat.rpartition(")")[2].split()
    if len(fields) <= _STARTED or not fields[_STARTED].isdecimal():
        return 0.0
    return int(fields[_STARTED]) / _TICKS_A_SECOND


def read_origin(
    pid: int, proc: Path, *, reported_at_s: float | None = None
) -> ProcessOrigin | None:
    """Look a process up below `proc`; None if there is none of that pid (any more).

    One that began after `named_at_s`, when the pid was named, has taken the number of another: an
    answer of a driver that hung may be old.
    """
    try:
        cgroup = (proc / str(pid) / "cgroup").read_text(errors="replace")
        status = (proc / str(pid) / "status").read_text(errors="replace")
        stat = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    if reported_at_s is not None and parse_started_s(stat) > reported_at_s:
        return None
    pod, container = parse_cgroup(cgroup)
    return ProcessOrigin(pod=pod, container_id=container, inner_pid=parse_inner_pid(status))
