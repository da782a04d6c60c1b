"""The `leasehold` command without its start: `python -m tests.support.command_server SOCKET`.

A process that has imported the command is forked for each call, since the imports take a second of
processor time and end-to-end tests call the command hundreds of times. `leasehold up` forks it for
each service.
"""

import atexit
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
from tests.support.forked_modules import fork_modules, import_package, import_what_services_share

ROOT = Path(__file__).parents[2]
MOST_BYTES = 1 << 20
"""Of a call: its words and variables."""
STREAMS = 3


def call(
    words: Sequence[str], variables: Mapping[str, str], *, limit_s: float
) -> tuple[int, str, str]:
    """Run a command to its end; return its exit code, output and errors.

    Raises TimeoutError if it takes longer than `limit_s`.
    """
    with (
        socket.socket(socket.AF_UNIX) as connection,
        Path(os.devnull).open("rb") as nothing,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        connection.settimeout(limit_s)
        connection.connect(_server())
        request = json.dumps([list(words), dict(variables)]).encode()
        socket.send_fds(connection, [request], [stream.fileno() for stream in (nothing, out, err)])
        connection.shutdown(socket.SHUT_WR)
        code = int(connection.recv(16))
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
    words, variables = json.loads(request)
    command = os.fork()
    if command == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv = [str(Path(services.cli.__path__[0], "__main__.py")), *words]
        fork_modules()
        _run()
    _, status = os.waitpid(command, 0)
    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())


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
