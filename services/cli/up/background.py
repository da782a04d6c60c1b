"""Runs in the background, and returns to the caller as soon as everything is ready."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from services.cli.state_dir import StateDir
from shared.model.errors import LeaseholdError

_READY = b"\0"


def run_in_background(run: Callable[[Callable[[str], None]], int], directory: StateDir) -> int:
    """Run in a process of its own, and print what it reports until it is ready or exits.

    Later reports go to its log. Returns 0 when it is ready, 1 when it exited before.
    """
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os._exit(_detached(run, directory, writer))
    os.close(writer)
    try:
        return 0 if _print_until_ready(reader) else 1
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        return 130
    finally:
        os.close(reader)


def _print_until_ready(reader: int) -> bool:
    """Print the lines from the pipe until it closes; return whether the last one is readiness."""
    while received := os.read(reader, 65536):
        text, mark, _ = received.partition(_READY)
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
        if mark:
            return True
    return False


def _detached(run: Callable[[Callable[[str], None]], int], directory: StateDir, writer: int) -> int:
    os.setsid()
    sys.excepthook = sys.__excepthook__  # a bug's traceback goes to the log
    _redirect_output(directory.log("supervisor"))
    pipe: int | None = writer

    def report(text: str) -> None:
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
        return run(report)
    except LeaseholdError as error:
        report(f"leasehold up: {error}")
        return 1


def _redirect_output(path: Path) -> None:
    if path.exists():
        path.replace(path.with_suffix(".log.1"))
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(devnull)
