"""Sources of the Lua scripts that Redis runs for the ledger, with what all of them share."""

import re
from collections.abc import Container, Iterable, Mapping
from functools import cache
from importlib import resources
from itertools import chain, takewhile
from typing import NamedTuple

from shared.ledger.rows.lease_rows import NUMBER_OF_STATE
from shared.ledger.rows.record_sizes import LIMITS
from shared.ledger.server_errors import KEEPS_KEYS
from shared.model.device import NUMA_CPUS_PREFIX
from shared.model.lease import TRANSITIONS, LeaseState
from shared.model.node import CORDON_PREFIX, NOT_LISTED_CODE, REPLACED_CODE

_FOLDER = resources.files("shared.ledger") / "scripts"
_COMMON = (
    "state",
    "capacity",
    "repelling",
    "fair_share",
    "waiting_queue",
    "quota",
    "writes",
    "gone_pods",
    "tenures",
    "claims",
)
"""Parts that scripts share, in the order in which they are put before a script."""
_COMMENT = re.compile(r"--.*")
_COMMENT_LINE = re.compile(r"^\s*--.*\n", re.MULTILINE)
_COMMAND = re.compile(r"\b(?:call|pcall|call_all|run)\((?:call, )?'([A-Z]+)'")
_CONSTANT = re.compile(r"\b[A-Z][A-Z0-9_]+\b")
_NUMBERS = re.compile(
    r"^local ([A-Z][A-Z0-9_]*(?:, [A-Z0-9_]+)*) =\s+(\d+(?:, \d+)*)\n", re.MULTILINE
)
_NAME = re.compile(r"\w+(?:\.\w+)?")
_DEFINED = re.compile(r"^(?:local (?:function )?|function )([\w., ]+)", re.MULTILINE)
_DEFINED_IN_BLOCK = re.compile(r"^  function (\w+)", re.MULTILINE)
_PIECE = re.compile(
    r"^do\n(?: .*\n|\n)+end\n"  # a block of its own
    r"|^(?:do|end)\b.*\n"  # the beginning or the end of a block of several pieces
    r"|^(?:local function|function|if)\b.*\n(?: .*\n|\n)*end\n"
    r"|^\S.*\n(?: .*\n)*(?:}\n)?",
    re.MULTILINE,
)


def script_source(name: str) -> str:
    """Return a script with those functions and constants of the common parts that it uses.

    The server creates every function of a source anew in each call: that is most of the time of a
    short script.
    """
    source = (_FOLDER / f"{name}.lua").read_text()
    state, *others = map(_pieces, _COMMON)
    used = _names_used(source).union(*(piece.used for piece in state if not piece.names))
    kept = _used_pieces([*state, *chain(*others)], used)
    variables = list(takewhile(lambda piece: not piece.text.startswith("local function"), state))
    functions = [state[len(variables) :], *(part for part in others if not kept.isdisjoint(part))]
    texts = [_kept_text(part, kept) for part in functions]
    return with_literals(
        f"{_constants()}{_kept_text(variables, kept)}"
        f"local reply = (function()\n{''.join(texts)}{source}end)()\n{_finish()}"
    )


@cache
def _finish() -> str:
    return (_FOLDER / "common" / "finish.lua").read_text()


def with_literals(text: str) -> str:
    """Return a piece of a script with literals in place of the common numbers.

    Whatever a function uses of a local variable outside it costs time in each call of the script.
    """
    literals = _literals()
    return _CONSTANT.sub(lambda found: literals.get(found[0], found[0]), text)


@cache
def _literals() -> Mapping[str, str]:
    """Return the numbers that `state.lua` names, and those shared with Python."""
    found = {name: str(value) for name, value in LIMITS.items()}
    found |= {state.name: str(NUMBER_OF_STATE[state]) for state in LeaseState}
    found |= {"KEEPS_KEYS": f"'{KEEPS_KEYS}'", "CORDON_PREFIX": f"'{CORDON_PREFIX}'"}
    found["NUMA_CPUS_PREFIX"] = f"'{NUMA_CPUS_PREFIX}'"
    for names, values in _NUMBERS.findall((_FOLDER / "common" / "state.lua").read_text()):
        found |= dict(zip(names.split(", "), values.split(", "), strict=True))
    return found


class _Piece(NamedTuple):
    """A definition of a common part; or, without names, a statement that is always kept."""

    text: str
    names: frozenset[str]
    used: frozenset[str]


@cache
def _pieces(part: str) -> list[_Piece]:
    """Cut a part at its lines that are not indented."""
    text = (_FOLDER / "common" / f"{part}.lua").read_text()
    without_numbers = _NUMBERS.sub("", text) if part == "state" else text
    texts = _PIECE.findall(_COMMENT_LINE.sub("", without_numbers))
    return [_Piece(text, _names_defined(text), _names_used(text)) for text in texts]


def script_names() -> tuple[str, ...]:
    """Return the names of all scripts."""
    files = (file.name for file in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".lua") for name in files if name.endswith(".lua")))


def _used_pieces(pieces: Iterable[_Piece], used: frozenset[str]) -> set[_Piece]:
    """Return the pieces that define one of the names, or a name that such a piece uses."""
    kept: set[_Piece] = set()
    while found := {piece for piece in pieces if not used.isdisjoint(piece.names)} - kept:
        kept |= found
        used = used.union(*(piece.used for piece in found))
    return kept


def _kept_text(part: Iterable[_Piece], kept: Container[_Piece]) -> str:
    return "".join(piece.text for piece in part if piece in kept or not piece.names)


def _names_used(text: str) -> frozenset[str]:
    found = _NAME.findall(_COMMENT.sub("", text))
    return frozenset(found).union(name.partition(".")[0] for name in found)


def _names_defined(text: str) -> frozenset[str]:
    found = {name.strip() for names in _DEFINED.findall(text) for name in names.split(",")}
    return frozenset(found.union(_DEFINED_IN_BLOCK.findall(text) if text.startswith("do") else ()))


def script_commands(name: str) -> frozenset[str]:
    """Return the Redis commands that a script calls, in lower case."""
    return frozenset(word.lower() for word in _COMMAND.findall(script_source(name)))


def reachable() -> Mapping[LeaseState, frozenset[LeaseState]]:
    """Return which states a lease in each state can come to, in one or more transitions."""
    found: dict[LeaseState, frozenset[LeaseState]] = {}

    def search(state: LeaseState) -> frozenset[LeaseState]:
        if state not in found:
            found[state] = TRANSITIONS[state].union(*map(search, TRANSITIONS[state]))
        return found[state]

    return {state: search(state) for state in TRANSITIONS}


def _constants() -> str:
    """Return the life cycle of leases, and the faults of devices that are missing."""
    return (
        f"local MAY_BECOME = {_lua_sets(TRANSITIONS)}\n"
        f"local MAY_REACH = {_lua_sets(reachable())}\n"
        f"local IS_MISSING = {{{NOT_LISTED_CODE} = true, {REPLACED_CODE} = true}}\n"
    )


def _lua_sets(sets: Mapping[LeaseState, frozenset[LeaseState]]) -> str:
    rows = (
        f"[{state.name}] = {{{', '.join(f'[{each.name}] = true' for each in sorted(sets[state]))}}}"
        for state in LeaseState
    )
    return f"{{{', '.join(rows)}}}"
