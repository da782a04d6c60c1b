"""The parser of the whole command line, and its completion for bash, zsh, fish and kubectl.

https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/
"""

import argparse
import re
import shlex
import signal
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn

import services.cli.commands
import services.cli.local_commands  # noqa: F401 - both declare the commands
from services.cli.arguments import COMMANDS, PODS, WORKLOADS, CommandEntry
from shared.runtime.settings import add_arguments, from_arguments

EXIT_CODES = """\
exit codes:
  0  done; for audit: no difference
  1  failed; audit: there are differences; doctor: a check failed;
     explain, trace: nothing found
  2  the command line or the request is invalid
  3  a required server (Redis, the API server) is not available
  70 a bug; LEASEHOLD_DEBUG=1 shows where
"""
EXAMPLES = """\
examples:
  leasehold up                                  two simulated nodes, four T4 each
  leasehold up --nodes 3 --gpus 8xA100-80GB --headless
  leasehold up --gpus 4xT4,2xA10                a layout for each node
  leasehold up --gpus 4xA100-40GB:mig+2xT4      four GPUs in MIG mode and two that are not
  leasehold gpus                                every device and its leases
  leasehold explain my-pod -n team-a            why it waits, or why it runs on its node
  leasehold resize my-pod --memory 6Gi          change the size of a running pod's container
  leasehold audit --json
  leasehold down
"""
GROUPS = {
    "See what runs and what waits": ("gpus", "ps", "top", "explain", "trace", "preemptions"),
    "GPU time and plans": ("budget", "report", "what-if", "defrag", "migrate"),
    "Operate": (
        *("resize", "cordon", "uncordon", "doctor", "audit", "bundle", "credentials"),
        *("node-keys", "topology"),
    ),
    "On this machine": ("up", "status", "down", "sim", "version", "completion", "help"),
}
SCRIPTS = {
    "bash": """\
_leasehold() {
    local IFS=$'\\n'
    COMPREPLY=($(leasehold __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _leasehold leasehold
""",
    "zsh": """\
#compdef leasehold
_leasehold() {
    local -a found
    found=(${(f)"$(leasehold __complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -a found; else _files; fi
}
compdef _leasehold leasehold
""",
    "fish": """\
function __leasehold
    set -l found (leasehold __complete (commandline -opc)[2..] "$(commandline -ct)" 2>/dev/null)
    if test -n "$found"; printf '%s\\n' $found; else; __fish_complete_path; end
end
complete -c leasehold -f -a '(__leasehold)'
""",
}
NAMED = {
    **dict.fromkeys(("pod", "dry_run"), "pod"),
    **dict.fromkeys(("namespace", "words"), "namespace"),
    "node": "node",
    "gpu": "gpu",
}
COMPLETE_WITHIN_S = 3
"""Time limit of a completion: a shell does not wait for a cluster that does not respond."""
NO_FILES = ":4"
"""The value of cobra's ShellCompDirectiveNoFileComp, for kubectl."""


def parse(argv: Sequence[str], program: str) -> tuple[CommandEntry, Any]:
    """Exit if the command line is invalid. Raises RequestError for contradictory arguments."""
    parser = build_parser(program, only=argv[0] if argv else "")
    if not argv:
        parser.print_help()
        parser.exit()
    if argv[0].startswith("-") and argv[0] not in parser.own_flags:
        parser.error(f"flags follow the command, such as {program} ps -n team-a")
    flags, unknown = parser.parse_known_args(argv)
    kind = getattr(flags, "pod", "")
    if unknown and kind and kind in {*PODS, *WORKLOADS}:
        flags.parser.error(f"write {kind}/{unknown[0]} instead of {kind} {unknown[0]}")
    if unknown:
        flags.parser.refuse(unknown)
    if flags.command == "completion":
        print(SCRIPTS[flags.shell], end="")
        parser.exit()
    if flags.command == "help":
        _command_of(build_parser(program), [flags.topic or ""])[0].print_help()
        parser.exit()
    entry = COMMANDS[flags.command]
    return entry, from_arguments(entry.arguments, flags)


def build_parser(program: str = "leasehold", only: str | None = None) -> "CommandParser":
    """With `only`, other commands are left out, or, if there is no such command, all arguments."""
    parser = CommandParser(
        prog=program,
        description="GPU sharing for Kubernetes: every share is a lease.",
        epilog=f"{EXAMPLES.replace('  leasehold', f'  {program}')}\n{EXIT_CODES}",
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS
    )

    abouts: dict[str, str] = {}

    def add(name: str, about: str, examples: Sequence[str]) -> CommandParser:
        lines = "".join(f"  {program} {name} {example}".rstrip() + "\n" for example in examples)
        first_line = about.partition("\n")[0].rstrip(".")
        abouts[name] = f"  {name:<13}{first_line[0].lower()}{first_line[1:]}"
        added: CommandParser = commands.add_parser(
            name,
            description=about,
            epilog=f"examples:\n{lines}\n{EXIT_CODES}",
            formatter_class=_HelpFormatter,
        )
        added.set_defaults(parser=added)
        return added

    for entry in COMMANDS.values():
        if only in COMMANDS and only != entry.name:
            continue
        added = add(entry.name, entry.about, entry.examples)
        if only in {None, entry.name}:
            add_arguments(entry.arguments, added.group)
    completion = add(
        "completion",
        "Print the completion script of a shell.",
        (
            "bash > /etc/bash_completion.d/leasehold",
            "zsh > ~/.zfunc/_leasehold",
            "fish > ~/.config/fish/completions/leasehold.fish",
        ),
    )
    completion.add_argument("shell", metavar="SHELL", choices=tuple(SCRIPTS), help="of the user")
    topics = list(commands.choices)
    about = add("help", "Show the help of a command.", ("", "explain"))
    about.add_argument("topic", metavar="COMMAND", nargs="?", choices=topics)
    groups = (
        "\n".join((f"{title}:", *(abouts[name] for name in names if name in abouts)))
        for title, names in GROUPS.items()
    )
    parser.description = "\n\n".join((str(parser.description), *groups))
    return parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        joined = re.sub(r"(?m)^(\S(?:(?!  ).)*[^:\n])\n(?=\S)", r"\1 ", text)
        return "".join(f"{indent}{_fitted(line, width)}\n" for line in joined.splitlines())


def _fitted(line: str, width: int) -> str:
    column = re.match(r"(?:.*\S)? {2,}(?=\S)", line)
    if len(line) <= width or (column and not column[0].strip()):
        return line
    more = " " * len(column[0] if column else "")
    return textwrap.fill(line, width, subsequent_indent=more, break_on_hyphens=False)


class _PrintVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"leasehold {version('leasehold')}")
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    _connection: argparse._ArgumentGroup | None = None

    def group(self, name: str) -> argparse._ActionsContainer:
        if not name:
            return self
        if self._connection is None:
            self._connection = self.add_argument_group(
                name, "the default is a stack of `leasehold up`, else the cluster of the kubeconfig"
            )
        return self._connection

    def format_usage(self) -> str:
        self._shorten_usage()
        return super().format_usage()

    def format_help(self) -> str:
        self._shorten_usage()
        return super().format_help()

    def _shorten_usage(self) -> None:
        names = (_usage_of(action) for action in self._get_positional_actions())
        self.usage = " ".join(("%(prog)s", *names, "[flags]"))

    @property
    def own_flags(self) -> Collection[str]:
        return self._option_string_actions

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        near = (_nearest(word.partition("=")[0], self._option_string_actions) for word in unknown)
        suggestion = next(filter(None, near), "")
        self.error(f"unknown arguments: {' '.join(unknown)}{suggestion}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(
            action,
            f"{value!r} is not one of {', '.join(choices)}{_nearest(str(value), choices)}",
        )


def _usage_of(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    if action.nargs == argparse.PARSER:
        return name
    more = " ..." if action.nargs in {"*", "+"} else ""
    return f"[{name}{more}]" if action.nargs in {"?", "*"} else f"{name}{more}"


def _nearest(word: str, words: Iterable[str]) -> str:
    from difflib import get_close_matches

    matches = get_close_matches(word, list(words), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def candidates(whole: CommandParser, words: Sequence[str]) -> list[str]:
    *before, word = words or ("",)
    parser, rest = _command_of(whole, before)
    actions = parser._option_string_actions  # noqa: SLF001 - argparse has no other list of flags
    taking = actions.get(rest[-1]) if rest else None
    if taking is not None and taking.nargs != 0:
        choices = list(taking.choices or _names(whole, taking.dest, rest[:-1]))
    elif word.startswith("-"):
        choices = list(actions)
    else:
        positional = parser._get_positional_actions()  # noqa: SLF001
        choices = [
            choice
            for action in positional
            for choice in action.choices or _names(whole, action.dest, rest)
        ]
    return sorted(choice for choice in map(str, choices) if choice.startswith(word))


def _names(whole: CommandParser, dest: str, words: Sequence[str]) -> Sequence[str]:
    if dest not in NAMED:
        return ()
    from services.cli.inspect.views import names_in_cluster

    flags, _ = _command_of(whole, ["ps"])[0].parse_known_args(words)
    signal.alarm(COMPLETE_WITHIN_S)
    try:
        names = names_in_cluster(NAMED[dest], from_arguments(COMMANDS["ps"].arguments, flags))
    finally:
        signal.alarm(0)
    return [name for name in names if shlex.quote(name) == name]  # bash inserts it as it is


def _command_of(
    parser: CommandParser, words: Sequence[str]
) -> tuple[argparse.ArgumentParser, Sequence[str]]:
    (commands,) = parser._get_positional_actions()  # noqa: SLF001
    choices = dict[str, argparse.ArgumentParser](commands.choices or {})
    for number, word in enumerate(words):
        if word in choices:
            return choices[word], words[number + 1 :]
    return parser, words
