"""Containers that echo their commands, for tests of exec and logs."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from simcluster.apimachinery.errors import ApiError
from simcluster.apiserver.storage.store import ObjectStore
from simcluster.ports import ExecStreams, LogOptions, Outage, Usage


class Echo:
    """Prints its command; `cat` copies stdin, `fail` exits with 3, `refuse` is refused."""

    def __init__(self, _store: ObjectStore) -> None:
        self.log_options: list[LogOptions] = []

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
        if command[0] == "refuse":
            raise ApiError(500, "InternalError", "container is not running")
        if command[0] == "cat":
            while data := await streams.read_stdin():
                await streams.write_stdout(data)
            return 0
        if command[0] == "hang":
            await asyncio.Event().wait()
        await streams.write_stdout(f"{namespace}/{pod}/{container} {' '.join(command)}".encode())
        await streams.write_stderr(b"tty" if tty else b"no tty")
        return 3 if command[0] == "fail" else 0

    async def attach(self, namespace: str, pod: str, container: str, streams: ExecStreams) -> None:
        while data := await streams.read_stdin():
            await streams.write_stdout(data)

    async def log(
        self, namespace: str, pod: str, container: str, options: LogOptions
    ) -> AsyncIterator[bytes]:
        self.log_options.append(options)
        yield f"{namespace}/{pod}/{container}\n".encode()
        yield b"second\n"

    def miss_api_server(self, outage: Outage) -> None:
        raise AssertionError(outage)

    def usage(self) -> Mapping[str, Usage]:
        return {}
