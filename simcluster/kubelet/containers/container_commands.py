"""The built-in commands of a simulated container, and its log."""

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from simcluster.apimachinery.objects import rfc3339
from simcluster.kubelet.containers.container_state import ContainerPhase, ContainerState
from simcluster.ports import ExecStreams, LogOptions

NOT_FOUND = 127
LOG_POLL_S = 0.2
_SHELLS = frozenset({"sh", "bash"})
"""Why commands that kubectl and its users expect are missing."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The output of a command and its exit code."""

    code: int = 0
    out: str = ""
    err: str = ""


async def exec_command(
    state: ContainerState, command: Sequence[str], *, tty: bool, streams: ExecStreams
) -> int:
    """Run a command in a container; a terminal gets carriage returns, and errors in its output."""
    outcome = await asyncio.to_thread(run_command, state, command)
    out, err = outcome.out, outcome.err
    if tty:
        out, err = (out + err).replace("\n", "\r\n"), ""
    if out:
        await streams.write_stdout(out.encode())
    if err:
        await streams.write_stderr(err.encode())
    return outcome.code


def is_built_in(command: Sequence[str]) -> bool:
    """Return whether a command is built in, or a script of built-in commands."""
    name = PurePosixPath(command[0]).name
    arguments = command[1:]
    if name not in _SHELLS:
        return name in _BUILTINS
    if len(arguments) < 2 or arguments[0] not in {"-c", "-lc"} or set("|<>()`*?") & {*arguments[1]}:
        return False
    words = (line.split() for line in _lines(arguments[1]))
    return all(line[0] in _BUILTINS for line in words if line)


def run_command(state: ContainerState, command: Sequence[str]) -> CommandResult:
    """Run one of the built-in commands."""
    if not command:
        return _unknown("")
    name = PurePosixPath(command[0]).name
    arguments = command[1:]
    if name in _SHELLS and len(arguments) >= 2 and arguments[0] in {"-c", "-lc"}:
        return _script(state, arguments[1])
    builtin = _BUILTINS.get(name)
    return _unknown(command[0]) if builtin is None else builtin(state, arguments)


def _script(state: ContainerState, text: str) -> CommandResult:
    """Run simple commands in turn and expand variables; no other shell syntax works."""
    result = CommandResult()
    for line in _lines(text):
        arguments = [_expand_variable(state, word) for word in shlex.split(line)]
        if arguments:
            step = run_command(state, arguments)
            result = CommandResult(step.code, result.out + step.out, result.err + step.err)
    return result


def _lines(text: str) -> list[str]:
    return text.replace("&&", ";").replace("\n", ";").split(";")


def _expand_variable(state: ContainerState, argument: str) -> str:
    if argument.startswith("$"):
        return state.env.get(argument[1:].strip("{}"), "")
    return argument


def _unknown(name: str) -> CommandResult:
    text = f'exec: "{name}": executable file not found in $PATH\n'
    return CommandResult(NOT_FOUND, err=text)


def _env(state: ContainerState, _arguments: Sequence[str]) -> CommandResult:
    return CommandResult(out="".join(f"{name}={value}\n" for name, value in state.env.items()))


def _printenv(state: ContainerState, arguments: Sequence[str]) -> CommandResult:
    if not arguments:
        return _env(state, ())
    values = [state.env[name] for name in arguments if name in state.env]
    return CommandResult(
        int(len(values) < len(arguments)), out="".join(f"{value}\n" for value in values)
    )


def _echo(_state: ContainerState, arguments: Sequence[str]) -> CommandResult:
    return CommandResult(out=f"{' '.join(arguments)}\n")


def _cat(state: ContainerState, arguments: Sequence[str]) -> CommandResult:
    out, err = "", ""
    for path in arguments:
        host = host_path(state, path)
        if host is None or not host.is_file():
            err += f"cat: {path}: No such file or directory\n"
        else:
            out += host.read_text(errors="replace")
    return CommandResult(int(bool(err)), out, err)


def host_path(state: ContainerState, path: str) -> Path | None:
    """Return the host path of a container's path; None outside its mounts."""
    container_path = PurePosixPath(path)
    if ".." in container_path.parts:
        return None
    mounts = sorted(state.mounts, key=lambda mount: len(mount.container_path), reverse=True)
    for mount in mounts:
        if container_path.is_relative_to(mount.container_path):
            rest = container_path.relative_to(mount.container_path)
            return Path(mount.host_path) / rest if rest.parts else Path(mount.host_path)
    return None


_BUILTINS: dict[str, Callable[[ContainerState, Sequence[str]], CommandResult]] = {
    "env": _env,
    "printenv": _printenv,
    "echo": _echo,
    "cat": _cat,
    "true": lambda _state, _arguments: CommandResult(),
    "false": lambda _state, _arguments: CommandResult(1),
}


class LogReader:
    """The log of a container: the output of its command."""

    def __init__(self, state: ContainerState, options: LogOptions) -> None:
        self._state = state
        self._options = options

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the requested lines; with `follow`, also new ones until the container ends."""
        options = self._options
        state = self._state
        waits = state.phase is ContainerPhase.WAITING  # the latest log is the previous one, too
        log = state.previous_log if options.previous and not waits else state.log
        since = 0.0 if options.since_s is None else time.time() - options.since_s
        tail = len(log.lines) if options.tail_lines is None else options.tail_lines
        at = log.dropped + max(len(log.lines) - tail, 0)
        left = options.limit_bytes
        while True:
            follows = options.follow and state.phase is ContainerPhase.RUNNING and state.log is log
            for moment, text in log.lines[max(at - log.dropped, 0) :]:
                line = self._line(moment, text)[:left] if moment >= since else b""
                left = None if left is None else left - len(line)
                if line:
                    yield line
            at = log.dropped + len(log.lines)
            if not follows or left == 0:
                return
            await asyncio.sleep(LOG_POLL_S)

    def _line(self, moment: float, text: str) -> bytes:
        stamp = f"{rfc3339(moment)} " if self._options.timestamps else ""
        return f"{stamp}{text}\n".encode()
