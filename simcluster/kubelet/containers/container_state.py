"""The state of containers, which survives restarts of the kubelet; pure."""

import enum
from dataclasses import dataclass, field

from simcluster.apimachinery.objects import Json


class ContainerPhase(enum.StrEnum):
    """The phase of a container, with the words of a container status."""

    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


CANNOT_START = 128
"""The exit code of a container whose command cannot be started."""


@dataclass(frozen=True, slots=True)
class ContainerTermination:
    """The termination of a container."""

    exit_code: int
    reason: str
    started_at: float
    finished_at: float
    container_id: str
    message: str = ""


MAX_LOG_BYTES = 1 << 20


@dataclass(slots=True)
class ContainerLog:
    """The latest output of a container: the time and the text of each line."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    dropped: int = 0
    """How many lines were before these."""
    size: int = 0

    def add(self, at: float, text: str) -> None:
        """Add a line; beyond 1 MiB, the older half of the lines is dropped."""
        self.lines.append((at, text))
        self.size += len(text) + 1
        if self.size > MAX_LOG_BYTES:
            half = max(len(self.lines) // 2, 1)
            self.size -= sum(len(line) + 1 for _, line in self.lines[:half])
            self.dropped += half
            del self.lines[:half]


@dataclass(frozen=True, slots=True)
class MountPoint:
    """A host path in a container."""

    container_path: str
    host_path: str
    read_only: bool


@dataclass(slots=True)
class ContainerState:
    """The present state of one container, and its last termination."""

    phase: ContainerPhase = ContainerPhase.WAITING
    reason: str = "ContainerCreating"
    message: str = ""
    container_id: str = ""
    started_at: float = 0.0
    ends_at: float | None = None
    termination: ContainerTermination | None = None
    last_termination: ContainerTermination | None = None
    restarts: int = 0
    env: dict[str, str] = field(default_factory=dict)
    mounts: list[MountPoint] = field(default_factory=list)
    device_nodes: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    """UUIDs of the GPUs and MIG instances that its runtime gave it, numbers of GPUs, or `all`."""
    log: ContainerLog = field(default_factory=ContainerLog)
    previous_log: ContainerLog = field(default_factory=ContainerLog)
    directory: str = ""
    """The pod's workingDir; empty: that of the image."""
    resources: Json = field(default_factory=dict)
    """What the node has given it of what its spec has, in the form of the spec."""
    is_process: bool = False
    """Whether its command is a process of this machine; otherwise it is simulated."""

    def set_waiting(self, reason: str, message: str = "") -> None:
        """Record why the container is not running."""
        self.phase = ContainerPhase.WAITING
        self.reason = reason
        self.message = message

    def set_running(self, container_id: str, at: float, ends_at: float | None) -> None:
        """Record the start of the container."""
        self.phase = ContainerPhase.RUNNING
        self.reason = ""
        self.message = ""
        self.container_id = container_id
        self.started_at = at
        self.ends_at = ends_at
        self.termination = None

    def set_terminated(self, exit_code: int, at: float) -> None:
        """Record the end of the container, also as its last termination."""
        reason = "Completed" if exit_code == 0 else "Error"
        self._end(ContainerTermination(exit_code, reason, self.started_at, at, self.container_id))

    def set_unstartable(self, container_id: str, at: float, message: str) -> None:
        """Record that its command cannot be started, as its termination."""
        self.container_id = container_id
        self._end(ContainerTermination(CANNOT_START, "StartError", 0.0, at, container_id, message))

    def _end(self, ending: ContainerTermination) -> None:
        self.phase = ContainerPhase.TERMINATED
        self.termination = ending
        self.last_termination = ending


@dataclass(slots=True)
class PodState:
    """An admitted pod and its containers."""

    uid: str
    namespace: str
    name: str
    pod_ip: str
    started_at: float
    containers: dict[str, ContainerState]
    past_deadline: bool = False
    """It was active for longer than its spec allows, and has ended or ends."""
    stopping: bool = False
    waiting_resize: tuple[str, str] | None = None
    """Why changed resources are not given yet: a reason and a message."""
