"""Checks that are taken out of a script, one at a time: each must be found by the model."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import shared.ledger.scripts
from shared.ledger.script_sources import script_source

MUTATIONS: Mapping[str, tuple[str, str]] = {
    "reserve without memory": (
        "  if device[D_MEMORY_USED] + memory > device[D_MEMORY] then return 'memory' end\n",
        "",
    ),
    "release keeps totals": ("  add_demand(demand, resources, groups_text, -1)\n", ""),
    "fences stay": ("  device[D_FENCE] = device[D_FENCE] + 1\n", ""),
    "gangs begin short": (
        "gang_lease_count(gang_needs[1]) + #reserved_pods < gang_needs[2]",
        "false",
    ),
    "lost writes unseen": (
        "if is_ready and tonumber(ARGV[6]) > last_version then",
        "if false then",
    ),
}
FOLDER = Path(shared.ledger.scripts.__file__).parent


def mutated(name: str) -> dict[str, tuple[str, str]]:
    """Return the scripts that a mutation changes, as a connection caches them."""
    before, after = MUTATIONS[name]
    found = {}
    for script in sorted(file.stem for file in FOLDER.glob("*.lua")):
        source = script_source(script)
        if before in source:
            source = source.replace(before, after)
            sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            found[script] = (sha, source)
    if not found:
        raise ValueError(f"no script contains what {name!r} takes out: {before!r}")
    return found
