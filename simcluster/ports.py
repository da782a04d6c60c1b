"""The ports between the API server and the kubelets.

A kubelet takes a `ClusterStore`, which the API server's store implements. The API server takes a
`ContainerRuntime`, which the fleet of kubelets implements. Neither half imports the other.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from simcluster.apimachinery.objects import Json, Objects


class ExecStreams(Protocol):
    """The client's end of an exec session."""

    @property
    def size(self) -> tuple[int, int] | None:
        """The latest columns and rows of the client's terminal, if it has one."""
        ...

    async def read_stdin(self) -> bytes:
        """Wait for input and return it; empty bytes at its end."""
        ...

    async def write_stdout(self, data: bytes) -> None:
        """Send output to the client; dropped if the client did not request it."""
        ...

    async def write_stderr(self, data: bytes) -> None:
        """Send errors to the client; dropped if the client did not request them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """The query of `pods/log`, with the defaults that Kubernetes documents."""

    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    tail_lines: int | None = None
    since_s: int | None = None
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a container's processes use."""

    node: str
    cores: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time without the API server, and what follows on the nodes."""

    for_s: float
    denied_s: float = 30.0
    """How long kubelets remember that an API server that started denied something."""
    relist_s: float = 15.0
    """After what pause kubelets list their pods again. A real one waits up to a minute, and longer
    with the API server's own start."""


class ContainerRuntime(Protocol):
    """Runs commands in containers and reads their logs.

    The caller has checked that the pod exists, is bound, and has the container. Implementations
    raise `ApiError` for other obstacles, such as a container that is not running.
    """

    async def exec(
        self,
        namespace: str,
        pod: str,
        container: str,
        command: Sequence[str],
        *,
        tty: bool,
        streams: ExecStreams,
    ) -> int:
        """Run `command` to its end and return its exit code (126, 127 as in a shell)."""
        ...

    async def attach(self, namespace: str, pod: str, container: str, streams: ExecStreams) -> None:
        """Attach a client to a container's own command until that ends."""
        ...

    def log(
        self, namespace: str, pod: str, container: str, options: LogOptions
    ) -> AsyncIterator[bytes]:
        """Yield the container's log in chunks; with `follow`, until the container ends."""
        ...

    def usage(self) -> Mapping[str, Usage]:
        """Return the use of the containers with processes, by the last part of their ID."""
        ...

    def miss_api_server(self, outage: Outage) -> None:
        """Do without the API server for a while."""
        ...


class StoredObject(Protocol):
    """One version of an object."""

    @property
    def obj(self) -> Json:
        """The object; shared, so copy it before you change it."""
        ...


class ClusterEvent(Protocol):
    """One change of a watched object."""

    @property
    def type(self) -> str:
        """ADDED, MODIFIED or DELETED."""
        ...

    @property
    def object(self) -> Json:
        """The object as of the change; shared, so copy it before you change it."""
        ...


class ObjectWatch(Protocol):
    """The changes of selected objects, starting with an ADDED event for each present one."""

    def poll(self) -> Sequence[ClusterEvent]:
        """Return the changes since the last call; `ApiError` 410 if they are dropped."""
        ...

    async def wait(self) -> None:
        """Return when `poll` may have something to return."""
        ...


class ClusterStore(Protocol):
    """The API server as a kubelet uses it; refusals are `ApiError`s."""

    def now(self) -> str:
        """Return the cluster's time as a `metav1.Time`."""
        ...

    def find(self, resource: str, namespace: str | None, name: str) -> StoredObject | None:
        """Return the current version of an object, or None."""
        ...

    def read(self, resource: str, namespace: str | None, name: str) -> Json:
        """Return an object; 404 if there is none."""
        ...

    def list(self, resource: str, *, fields: str = "") -> Objects:
        """Return the objects of all namespaces that a field selector selects."""
        ...

    def watch(self, resource: str, *, fields: str = "") -> ObjectWatch:
        """Watch the objects of all namespaces that a field selector selects."""
        ...

    def create(self, resource: str, obj: Json) -> Json:
        """Store a new object and return it with its defaults."""
        ...

    def patch(
        self,
        resource: str,
        namespace: str | None,
        name: str,
        patch: Json | Callable[[Json], Json],
        *,
        subresource: str = "",
    ) -> Json:
        """Apply a JSON merge patch, or a function from object to object."""
        ...

    def delete(
        self,
        resource: str,
        namespace: str | None,
        name: str,
        *,
        grace_s: int | None = None,
        uid: str | None = None,
    ) -> Json:
        """Delete an object, or mark it if a grace period or a finalizer requires that."""
        ...
