"""The state of containers, which survives restarts of the kubelet; pure."""

import enum
from dataclasses import dataclass, field


class ContainerPhase(enum.StrEnum):
    """The phase of a container, with the words of a container status."""

    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


@dataclass(frozen=True, slots=True)
class ContainerTermination:
    """The termination of a container."""

    exit_code: int
    reason: str
    started_at: float
    finished_at: float
    container_id: str


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
    log: list[tuple[float, str]] = field(default_factory=list)
    previous_log: list[tuple[float, str]] = field(default_factory=list)

    def set_waiting(self, reason: str, message: str = "") -> None:
        """Record why the container is not running."""
        self.phase, self.reason, self.message = ContainerPhase.WAITING, reason, message

    def set_running(self, container_id: str, at: float, ends_at: float | None) -> None:
        """Record the start of the container."""
        self.phase, self.reason, self.message = ContainerPhase.RUNNING, "", ""
        self.container_id, self.started_at, self.ends_at = container_id, at, ends_at
        self.termination = None

    def set_terminated(self, exit_code: int, at: float) -> None:
        """Record the end of the container, also as its last termination."""
        reason = "Completed" if exit_code == 0 else "Error"
        self.phase = ContainerPhase.TERMINATED
        self.termination = ContainerTermination(
            exit_code, reason, self.started_at, at, self.container_id
        )
        self.last_termination = self.termination


@dataclass(slots=True)
class PodState:
    """An admitted pod and its containers."""

    uid: str
    namespace: str
    name: str
    pod_ip: str
    started_at: float
    containers: dict[str, ContainerState]
    stopping: bool = False
