"""The client's end of an exec session with a terminal."""

from simcluster.ports import ExecStreams


class TerminalStreams:
    """Sends errors with the output, and carriage returns before line feeds, as a terminal does."""

    def __init__(self, streams: ExecStreams) -> None:
        self._streams = streams

    async def read_stdin(self) -> bytes:
        """Wait for input and return it; empty bytes at its end."""
        return await self._streams.read_stdin()

    async def write_stdout(self, data: bytes) -> None:
        """Send output."""
        await self._streams.write_stdout(data.replace(b"\n", b"\r\n"))

    async def write_stderr(self, data: bytes) -> None:
        """Send errors."""
        await self.write_stdout(data)
