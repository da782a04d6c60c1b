"""Completion of command lines for bash, zsh, fish and `kubectl leasehold`.

The scripts call `leasehold __complete WORDS`, so that they never differ from the commands.
https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/
"""

import argparse
from collections.abc import Sequence

from services.cli.command_parser import CommandParser

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
NO_FILES = ":4"
"""To kubectl: do not offer names of files. The value of cobra's ShellCompDirectiveNoFileComp."""


def candidates(whole: CommandParser, words: Sequence[str]) -> list[str]:
    """Return how the last word may continue; empty also where its values are not known."""
    *before, word = words or ("",)
    parser, rest = _command_of(whole, before)
    actions = parser._option_string_actions  # noqa: SLF001 - argparse has no other list of flags
    taking = actions.get(rest[-1]) if rest else None
    if taking is not None and taking.nargs != 0:
        known = list(taking.choices or ())
    elif word.startswith("-"):
        known = list(actions)
    else:
        positional = parser._get_positional_actions()  # noqa: SLF001
        known = [choice for action in positional for choice in action.choices or ()]
    return sorted(choice for choice in map(str, known) if choice.startswith(word))


def _command_of(
    parser: CommandParser, words: Sequence[str]
) -> tuple[argparse.ArgumentParser, Sequence[str]]:
    """Return the parser of the command among these words, and the words after it."""
    (commands,) = parser._get_positional_actions()  # noqa: SLF001
    choices = dict[str, argparse.ArgumentParser](commands.choices or {})
    for number, word in enumerate(words):
        if word in choices:
            return choices[word], words[number + 1 :]
    return parser, words
