"""A parser whose help is short, and whose errors name what was probably meant."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """Parses the arguments of one command, or the name of the command."""

    _connection: argparse._ArgumentGroup | None = None

    @property
    def connection(self) -> argparse._ArgumentGroup:
        """The flags that locate the servers, which the help lists last."""
        if self._connection is None:
            self._connection = self.add_argument_group(
                "connection",
                "the default is a stack of `leasehold up`, else the cluster of the kubeconfig",
            )
        return self._connection

    def format_usage(self) -> str:
        """Return the positional arguments; the help lists the flags."""
        self._shorten_usage()
        return super().format_usage()

    def format_help(self) -> str:
        """Return the usage without the flags, and then everything."""
        self._shorten_usage()
        return super().format_help()

    def _shorten_usage(self) -> None:
        names = (_usage_of(action) for action in self._get_positional_actions())
        self.usage = " ".join(("%(prog)s", *names, "[flags]"))

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit because of arguments that are unknown here."""
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


def _nearest(word: str, known: Iterable[str]) -> str:
    """Return a question about the most similar word, or an empty text."""
    from difflib import get_close_matches

    found = get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
