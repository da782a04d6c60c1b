"""What the API server needs from simulated kubelets: containers to reach into."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class ExecStreams(Protocol):
    """The client's end of an exec session."""

    async def read_stdin(self) -> bytes:
        """Wait for input and return it; empty bytes when the client has closed it."""
        ...

    async def write_stdout(self, data: bytes) -> None:
        """Send output to the client; dropped when the client did not ask for it."""
        ...

    async def write_stderr(self, data: bytes) -> None:
        """Send errors to the client; dropped when the client did not ask for them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """The query of `pods/log`, defaults as documented by Kubernetes."""

    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    tail_lines: int | None = None
    since_s: int | None = None
    limit_bytes: int | None = None


class ContainerRuntime(Protocol):
    """Runs commands in containers and reads their logs.

    The server has already checked that the pod exists, is bound, and has a container of that
    name. Raise `ApiError` for anything else that prevents the answer, such as a container that is
    not running.
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
        """Run `command` to its end and return its exit code (126, 127 as a shell would)."""
        ...

    def log(
        self, namespace: str, pod: str, container: str, options: LogOptions
    ) -> AsyncIterator[bytes]:
        """Yield the container's log in chunks; with `follow`, until the container ends."""
        ...
