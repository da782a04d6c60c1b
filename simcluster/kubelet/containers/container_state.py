"""What a kubelet remembers of the containers it runs, also over a kill of its process."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from simcluster.kubelet.settings import replace_file


class ContainerPhase(enum.StrEnum):
    """Where a container is; the same words as in a container status."""

    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


@dataclass(slots=True)
class ContainerTermination:
    """How a container ended, once."""

    exit_code: int
    reason: str
    started_at: float
    finished_at: float
    container_id: str


@dataclass(slots=True)
class MountPoint:
    """A host path a container sees."""

    container_path: str
    host_path: str
    read_only: bool


@dataclass(slots=True)
class ContainerState:
    """One container as it is now, and how its last life ended."""

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
        """Say why the container is not running."""
        self.phase, self.reason, self.message = ContainerPhase.WAITING, reason, message

    def set_running(self, container_id: str, at: float, ends_at: float | None) -> None:
        """Begin a life."""
        self.phase, self.reason, self.message = ContainerPhase.RUNNING, "", ""
        self.container_id, self.started_at, self.ends_at = container_id, at, ends_at
        self.termination = None

    def set_terminated(self, exit_code: int, at: float) -> None:
        """End this life; remembered as the last one too."""
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


class StateFiles:
    """One file per admitted pod."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def load(self) -> Iterator[PodState]:
        """Read what an earlier process left."""
        for path in sorted(self._directory.glob("*.json")):
            yield msgspec.json.decode(path.read_bytes(), type=PodState)

    def save(self, state: PodState) -> None:
        """Replace a pod's file in one step."""
        replace_file(self._directory / f"{state.uid}.json", msgspec.json.encode(state))

    def remove(self, uid: str) -> None:
        """Forget a pod."""
        (self._directory / f"{uid}.json").unlink(missing_ok=True)
