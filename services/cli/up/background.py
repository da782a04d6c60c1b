"""Going on in the background while the caller returns as soon as all is ready."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from services.cli.state_dir import StateDir
from shared.model.errors import LeaseholdError

_READY = b"\0"


def in_background(run: Callable[[Callable[[str], None]], int], directory: StateDir) -> int:
    """Run in a process of its own; show what it says until it is ready or ends.

    Afterwards it says it to its log. Returns 0 when it is ready, 1 when it ended before.
    """
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os._exit(_detached(run, directory, writer))
    os.close(writer)
    try:
        return 0 if _show(reader) else 1
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        return 130
    finally:
        os.close(reader)


def _show(reader: int) -> bool:
    """Print what comes through the pipe; say whether readiness was among it."""
    while heard := os.read(reader, 65536):
        text, mark, _ = heard.partition(_READY)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
        if mark:
            return True
    return False


def _detached(run: Callable[[Callable[[str], None]], int], directory: StateDir, writer: int) -> int:
    os.setsid()
    sys.excepthook = sys.__excepthook__  # a bug's traceback belongs into the log
    _log_to(directory.log("supervisor"))
    pipe: int | None = writer

    def say(text: str) -> None:
        nonlocal pipe
        print(text, flush=True)
        if pipe is None:
            return
        done = text.startswith("ready in ")
        try:
            os.write(pipe, f"{text}\n".encode() + (_READY if done else b""))
        except OSError:
            done = True
        if done:
            os.close(pipe)
            pipe = None

    try:
        return run(say)
    except LeaseholdError as error:
        say(f"leasehold up: {error}")
        return 1


def _log_to(path: Path) -> None:
    if path.exists():
        path.replace(path.with_suffix(".log.1"))
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(nothing)
