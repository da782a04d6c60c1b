"""Python modules that tests and `leasehold up` start, as forks of a process that imported most.

A service spends two thirds of its start on imports, and end-to-end tests start hundreds. Everything
else is as after `exec`: process, session, variables, words, output and signals are its own.
`tests/integration/cli/up/test_real_components.py` starts the modules with the interpreter.
"""

import asyncio
import gc
import os
import pkgutil
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Never

import shared

HEAVY = ("aiohttp.web", "cel", "grpc.aio", "simcluster.wiring", "uvloop")
"""What takes long to import beside `shared`, and defines no metrics."""
INTERPRETER = (sys.executable, "-P", "-m")
_execute = asyncio.create_subprocess_exec


def import_package(package: ModuleType) -> None:
    """Import all modules of a package."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        import_module(module.name)


def import_what_services_share() -> None:
    """Import what modules of several services need.

    Those of one service define its metrics, which all others would serve, too.
    """
    import_package(shared)
    for name in HEAVY:
        import_module(name)


def fork_modules() -> None:
    """Let this process fork for each module that it is to start; other programs are executed."""
    asyncio.create_subprocess_exec = _start  # type: ignore[assignment]


async def _start(
    *words: str, env: Mapping[str, str], preexec_fn: Callable[[], None], **options: Any
) -> asyncio.subprocess.Process:
    def become_module() -> None:
        """Run where the new process would execute the interpreter, and never return."""
        preexec_fn()
        become(words[len(INTERPRETER) :], env)

    is_module = words[: len(INTERPRETER)] == INTERPRETER
    last = become_module if is_module else preexec_fn
    return await _execute(*words, env=env, preexec_fn=last, **options)


def become(words: tuple[str, ...], variables: Mapping[str, str]) -> Never:
    """Run a module with words as a process of its own would, and end this one."""
    code: object = 1
    try:
        _leave_parent()
        os.environ.clear()
        os.environ.update(variables)
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
    except BaseException:  # noqa: BLE001 - what the interpreter does with it
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def _leave_parent() -> None:
    """Drop what the parent's objects would do here: its loop, its files and its signal handlers."""
    gc.freeze()  # or the collection of a parent's object could close a file of this process
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    asyncio.create_subprocess_exec = _execute
    asyncio._set_running_loop(None)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as the interpreter does when it starts
    sys.excepthook = sys.__excepthook__
