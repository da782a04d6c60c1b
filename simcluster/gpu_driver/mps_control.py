"""nvidia-cuda-mps-control of the simulated GPUs: commands for a control daemon of MPS.

It speaks the protocol that drivers have from R495 on (version 2):
https://docs.nvidia.com/deploy/mps/latest/mpsv2-interface.html. With `-d` it starts a daemon, which
is `mps_daemon.py`; without an argument it sends the lines of its standard input to the daemon of
`CUDA_MPS_PIPE_DIRECTORY`. Each command is a process of its own, so it imports little.
"""

import os
import socket
import sys

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
SOCKET = "control"
MOST_PATH = 107
"""Bytes of a Unix socket's path."""
DAEMON = os.path.join(os.path.dirname(os.path.abspath(__file__)), "mps_daemon.py")  # noqa: PTH100, PTH118, PTH120
PYTHON = (sys.executable, "-S", "-E")


def command() -> tuple[str, ...]:
    """Return the command line that stands for `nvidia-cuda-mps-control`."""
    return *PYTHON, os.path.abspath(__file__)  # noqa: PTH100 - pathlib is slow to import


def send(pipes: str, line: str) -> str | None:
    """Return a daemon's reply, or None if none runs."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(f"{pipes}/{SOCKET}")
        except OSError:
            return None
        connection.sendall(f"{line}\n".encode())
        reply = b""
        while part := connection.recv(65536):
            reply += part
        return reply.decode()


def _start(pipes: str) -> int:
    """Start a daemon in the background; return the exit code."""
    if len(os.fsencode(f"{pipes}/{SOCKET}")) > MOST_PATH:
        return 1  # the real one writes no log either
    if send(pipes, "get_server_list") is not None:
        sys.stderr.write("An instance of this daemon is already running\n")
        return 1
    ready, started = os.pipe()
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.set_inheritable(started, True)
        os.execv(sys.executable, [*PYTHON, DAEMON, str(started)])  # noqa: S606 - our own program
    os.close(started)
    return 0 if os.read(ready, 1) else 1


def main() -> int:
    """Run as `nvidia-cuda-mps-control` does; return the exit code."""
    pipes = os.environ.get(PIPES, "/tmp/nvidia-mps")  # noqa: S108 - the real one's default
    if sys.argv[1:] == ["-d"]:
        return _start(pipes)
    for line in sys.stdin:
        reply = send(pipes, line.strip())
        if reply is None:
            sys.stdout.write(f"Cannot find MPS control daemon process in {pipes}\n")
            return 1
        sys.stdout.write(reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
