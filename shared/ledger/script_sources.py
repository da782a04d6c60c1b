"""Sources of the Lua scripts that Redis runs for the ledger, with what all of them share."""

import re
from collections.abc import Mapping
from importlib import resources

from shared.ledger.rows.lease_rows import NUMBER_OF_STATE
from shared.model.lease import TRANSITIONS, LeaseState
from shared.model.node import CORDON_PREFIX

_FOLDER = resources.files("shared.ledger") / "scripts"
_COMMON = (
    "state",
    "capacity",
    "fair_share",
    "waiting_queue",
    "quota",
    "writes",
    "gone_pods",
    "tenures",
    "claims",
)
"""Put before the scripts that use them, in this order; the first one, before every script."""
_COMMENT = re.compile(r"--.*")
_NAME = re.compile(r"\w+(?:\.\w+)?")
_DEFINED = re.compile(r"^(?:local (?:function )?|function )([\w., ]+)", re.MULTILINE)


def script_source(name: str) -> str:
    """Return a script with those common parts that it uses.

    The server creates every function of a source anew in each call: that is most of the time of a
    short script.
    """
    parts = [(_FOLDER / "common" / f"{part}.lua").read_text() for part in _COMMON]
    source = (_FOLDER / f"{name}.lua").read_text()
    used = _names_used(source)
    for part in reversed(parts):
        if part is parts[0] or not used.isdisjoint(_names_defined(part)):
            used |= _names_used(part)
            source = part + source
    return _constants() + source


def script_names() -> tuple[str, ...]:
    """Return the names of all scripts."""
    files = (file.name for file in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".lua") for name in files if name.endswith(".lua")))


def _names_used(text: str) -> set[str]:
    found = set(_NAME.findall(_COMMENT.sub("", text)))
    return found | {name.partition(".")[0] for name in found}


def _names_defined(part: str) -> set[str]:
    return {name.strip() for names in _DEFINED.findall(part) for name in names.split(",")}


def script_commands() -> frozenset[str]:
    """Return the Redis commands that the scripts call, in lower case."""
    files = [*_FOLDER.iterdir(), *(_FOLDER / "common").iterdir()]
    texts = [file.read_text() for file in files if file.name.endswith(".lua")]
    found = {word for text in texts for word in re.findall(r"\bcall\('([A-Z]+)'", text)}
    return frozenset(word.lower() for word in found)


def reachable() -> Mapping[LeaseState, frozenset[LeaseState]]:
    """Return which states a lease in each state can come to, in one or more transitions."""
    found: dict[LeaseState, frozenset[LeaseState]] = {}

    def search(state: LeaseState) -> frozenset[LeaseState]:
        if state not in found:
            found[state] = TRANSITIONS[state].union(*map(search, TRANSITIONS[state]))
        return found[state]

    return {state: search(state) for state in TRANSITIONS}


def _constants() -> str:
    """Return constants shared with Python: the lease's life cycle and the prefix of cordons."""
    numbers = ", ".join(str(NUMBER_OF_STATE[state]) for state in LeaseState)
    return (
        f"local {', '.join(state.name for state in LeaseState)} = {numbers}\n"
        f"local MAY_BECOME = {_lua_sets(TRANSITIONS)}\n"
        f"local MAY_REACH = {_lua_sets(reachable())}\n"
        f"local CORDON_PREFIX = '{CORDON_PREFIX}'\n"
    )


def _lua_sets(sets: Mapping[LeaseState, frozenset[LeaseState]]) -> str:
    rows = (
        f"[{state.name}] = {{{', '.join(f'[{each.name}] = true' for each in sorted(sets[state]))}}}"
        for state in LeaseState
    )
    return f"{{{', '.join(rows)}}}"
