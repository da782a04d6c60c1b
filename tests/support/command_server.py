"""Our programs without their starts: `python -m tests.support.command_server SOCKET`.

A process that has imported the `leasehold` command, and what services share, is forked for each
call, since the imports take a second of processor time and tests call it hundreds of times.
`leasehold up` forks it for each service.
"""

import atexit
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

import services.cli
from services.cli.__main__ import main
from tests.support.forked_modules import (
    become,
    fork_modules,
    import_package,
    import_what_services_share,
)

ROOT = Path(__file__).parents[2]
MOST_BYTES = 1 << 20
"""Of a call: its words and variables."""
STREAMS = 3
COMMAND = services.cli.__name__
NUMBER_BYTES = 16
"""Of an answer: the process's id, then its exit code."""
FORKED_S = 60.0
"""A process has an id within this time, also on a machine that has much else to do."""


class Forked:
    """A process that runs the `leasehold` command with some words, or a module of ours."""

    def __init__(
        self,
        words: Sequence[str],
        variables: Mapping[str, str],
        *,
        streams: Sequence[int],
        module: str = COMMAND,
        folder: Path = ROOT,
    ) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.settimeout(FORKED_S)
        self._server.connect(_server())
        request = json.dumps([module, list(words), dict(variables), str(folder)]).encode()
        socket.send_fds(self._server, [request], streams)
        self._server.shutdown(socket.SHUT_WR)
        self.pid = self._number()
        self.returncode: int | None = None
        """The negative number of a signal that ended it, or None while it runs."""

    def _number(self) -> int:
        return int(self._server.recv(NUMBER_BYTES))

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                self.wait(0)
        return self.returncode

    def wait(self, limit_s: float | None = None) -> int:
        """Wait until it has ended, and return its exit code. Raises TimeoutError."""
        if self.returncode is None:
            self._server.settimeout(limit_s)
            self.returncode = self._number()
            self.close()
        return self.returncode

    def close(self) -> None:
        """Take no more notice of it."""
        self._server.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def call(
    words: Sequence[str],
    variables: Mapping[str, str],
    *,
    limit_s: float,
    module: str = COMMAND,
    folder: Path = ROOT,
) -> tuple[int, str, str]:
    """Run a command or a module to its end; return its exit code, output and errors.

    Raises TimeoutError if it takes longer than `limit_s`.
    """
    with (
        Path(os.devnull).open("rb") as nothing,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        streams = [stream.fileno() for stream in (nothing, out, err)]
        forked = Forked(words, variables, streams=streams, module=module, folder=folder)
        with contextlib.closing(forked):
            code = forked.wait(limit_s)
        return code, _text(out), _text(err)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


@cache
def _server() -> str:
    """Start the server of this process, and return the path of its socket.

    A signal to this process and its group does not end it: `leasehold down` has to run after that.
    """
    folder = tempfile.TemporaryDirectory(prefix="lh-commands-")
    path = f"{folder.name}/s"
    command = [sys.executable, "-m", __name__, path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True)

    def stop() -> None:
        process.kill()
        process.wait()
        folder.cleanup()

    atexit.register(stop)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    return path


def serve(path: str) -> None:
    """Fork for each connection, until killed."""
    import_package(services.cli)
    import_what_services_share()
    gc.freeze()  # a collection in a fork would copy the memory of what is imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that serve a call
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _serve_call(connection)
                os._exit(0)
            connection.close()


def _serve_call(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, STREAMS)
    while more := connection.recv(MOST_BYTES):
        request += more
    module, words, variables, folder = json.loads(request)
    command = os.fork()
    if command == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(folder)
        if module != COMMAND:
            become((module, *words), variables)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv = [str(Path(services.cli.__path__[0], "__main__.py")), *words]
        fork_modules()
        _run()
    connection.sendall(f"{command:{NUMBER_BYTES}}".encode())
    _, status = os.waitpid(command, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status):{NUMBER_BYTES}}".encode())


def _run() -> None:
    """Run the command of `sys.argv`, and exit as its interpreter would."""
    code: object = 1
    try:
        main()
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - what the interpreter does with it
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    serve(sys.argv[1])
