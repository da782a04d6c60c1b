"""nvidia-cuda-mps-control of the simulated GPUs: commands for a control daemon of MPS.

It speaks the protocol that drivers have from R495 on (version 2) and, with `-p 3`, that of R615
(version 3): https://docs.nvidia.com/deploy/mps/mpsv2-interface.html, and mpsv3-interface.html.
With `-d` it starts a daemon, which is `mps_daemon.py` or `mps_daemon_v3.py`; any other call follows
the version of the daemon of `CUDA_MPS_PIPE_DIRECTORY`: it sends it the lines of its standard input,
or its arguments. Each command is a process of its own, so it imports little.
"""

import os
import socket
import sys
from collections.abc import Sequence

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = "/tmp/nvidia-mps"  # noqa: S108 - the real one's
VERSION = "CUDA_MPS_PROTOCOL_VERSION"
SOCKET = "control"
MOST_PATH = 107
"""Bytes of a Unix socket's path."""
PROTOCOL = "protocol"
"""The request for a daemon's version."""
QUIT = "quit"
MULTIUSER = "multiuser"
"""The argument of a daemon in multi-user mode."""
PYTHON = (sys.executable, "-S", "-E")
_DAEMONS = {"2": "mps_daemon", "3": "mps_daemon_v3"}
_START = (
    "import sys; sys.path[0] = sys.argv.pop(1); from simcluster.gpu_driver import {0}; {0}.main()"
)
_OPTIONS = {
    "-d": "daemon",
    "-m": MULTIUSER,
    "-q": QUIT,
    "-p": "protocol",
    **{f"--{name}": name for name in ("daemon", MULTIUSER, QUIT, "protocol")},
}


def command() -> tuple[str, ...]:
    """Return the command line that stands for `nvidia-cuda-mps-control`."""
    return *PYTHON, _here()


def send(pipes: str, line: str) -> bytes | None:
    """Return a daemon's reply, or None if none runs, or it ends meanwhile."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(f"{pipes}/{SOCKET}")
            connection.sendall(os.fsencode(f"{line}\n"))
            reply = b""
            while part := connection.recv(65536):
                reply += part
        except OSError:
            return None
        return reply


def send_words(pipes: str, words: Sequence[str]) -> tuple[int, bytes]:
    """Return the exit code and the output of a command of version 3."""
    if any("\n" in word for word in words):
        return 1, b"an argument has a line break\n"
    reply = send(pipes, "\0".join(["command", *words]))
    if not reply:
        return 1, _not_running(pipes)
    code, _, output = reply.partition(b"\n")
    return int(code), output


def _not_running(pipes: str) -> bytes:
    return os.fsencode(f"Cannot find MPS control daemon process in {pipes}\n")


def _here() -> str:
    return os.path.abspath(__file__)  # noqa: PTH100 - pathlib is slow to import


def _options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options before a command, and the command. Raises ValueError."""
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        written, has_value, value = rest.pop(0).partition("=")
        name = _OPTIONS.get(written)
        if name is None or (has_value and name != "protocol"):
            raise ValueError(f"unknown option '{written}'")
        if name == "protocol" and not has_value:
            value = rest.pop(0) if rest else ""
        options[name] = value
    version = options["protocol"] = os.environ.get(VERSION) or options.get("protocol", "2")
    if version not in _DAEMONS:
        raise ValueError(f"unknown protocol version '{version}'")
    return options, rest


def _start(pipes: str, version: str, *arguments: str) -> int:
    """Start a daemon in the background; return the exit code."""
    if len(os.fsencode(f"{pipes}/{SOCKET}")) > MOST_PATH:
        return 1  # the real one writes no log either
    if send(pipes, PROTOCOL) is not None:
        sys.stderr.write("An instance of this daemon is already running\n")
        return 1
    if version == "3":
        sys.stdout.write(f"To connect CUDA applications to this daemon, set {PIPES}={pipes}\n")
        sys.stdout.flush()
    ready, started = os.pipe()
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.set_inheritable(started, True)
        root = _here().rsplit("/", 3)[0]
        start = ("-c", _START.format(_DAEMONS[version]), root, str(started), *arguments)
        os.execv(sys.executable, [*PYTHON, *start])  # noqa: S606 - our own program
    os.close(started)
    return 0 if os.read(ready, 1) else 1


def _send_lines(pipes: str) -> int:
    """Send the lines of standard input to a daemon of version 2; return the exit code."""
    for line in sys.stdin:
        reply = send(pipes, line.strip())
        if reply is None:
            return _write(1, _not_running(pipes))
        _write(0, reply)
    return 0


def _write(code: int, output: bytes) -> int:
    sys.stdout.buffer.write(output)
    sys.stdout.flush()
    return code


def _fail(why: str) -> int:
    return _write(1, os.fsencode(f"{why}\n"))


def main() -> int:
    """Run as `nvidia-cuda-mps-control` does; return the exit code."""
    pipes = os.environ.get(PIPES, DEFAULT_PIPES)
    try:
        options, words = _options(sys.argv[1:])
    except ValueError as error:
        return _fail(str(error))
    version = options["protocol"]
    if "daemon" in options:
        return _start(pipes, version, *([MULTIUSER] if MULTIUSER in options else []))
    return _send(pipes, [QUIT] if QUIT in options else words)


def _send(pipes: str, words: Sequence[str]) -> int:
    """Send a command as the running daemon's version takes it; return the exit code."""
    running = send(pipes, PROTOCOL)
    if running is None:
        return _write(1, _not_running(pipes))
    if running == b"3\n":
        return _write(*send_words(pipes, words))
    if words == [QUIT]:
        return _write(0, send(pipes, QUIT) or b"")
    if words:
        return _fail("The MPS control daemon has protocol 2, whose commands are lines of input")
    return _send_lines(pipes)


if __name__ == "__main__":
    sys.exit(main())
