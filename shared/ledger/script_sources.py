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
"""Put before every script, in this order."""


def script_source(name: str) -> str:
    """Return a script with everything that it needs."""
    common = (_FOLDER / "common" / f"{part}.lua" for part in _COMMON)
    parts = [file.read_text() for file in (*common, _FOLDER / f"{name}.lua")]
    return "".join((_constants(), *parts))


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
