"""Who may touch what in Redis or Valkey: one user per service, with the keys it needs.

A script runs with its caller's rights, so that a user's keys and commands bind what scripts do for
it, too. Which commands those are is read from the scripts themselves.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.ledger.script_sources import script_commands

LEDGER, QUOTAS, PREEMPTION, BUDGET = "lh:*", "lh-quotas*", "lh-preemption:*", "lh-budget:*"
TENURES = "lh:tenures"

CONNECTING = ("ping", "select", "client|setinfo", "client|setname")
CALLED = ("evalsha", "eval", "xread")
"""What the clients call themselves; all else happens inside scripts."""
ACCOUNTING = ("hdel", "hincrby", "hset", "hsetnx", "set", "xadd", "xtrim", "zadd")
"""What the budgets' client has its script `budget_write` do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerUser:
    """One user of Redis: patterns of the keys it may change, and of those it may read."""

    name: str
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    """Beyond those that the ledger's clients need."""


USERS = (
    LedgerUser(name="placer", writes=(LEDGER,), reads=(QUOTAS,)),
    LedgerUser(name="binder", writes=(LEDGER, QUOTAS, PREEMPTION)),
    LedgerUser(name="timekeeper", writes=(BUDGET, TENURES), reads=(LEDGER, QUOTAS)),
    LedgerUser(name="dashboard", reads=(LEDGER, QUOTAS, PREEMPTION, BUDGET)),
    LedgerUser(
        name="operator",
        writes=(BUDGET,),
        reads=(LEDGER, QUOTAS, PREEMPTION),
        commands=("info", "config|get", "acl|dryrun"),
    ),
)
ADMIN = "admin"
"""For whoever looks after the server: may everything; no service uses it."""
PROBE = "probe"
"""For health checks: has no secret, and may ask whether the server answers."""
NOBODY = "user default off resetpass ~* &* +@all"
"""Whoever names no user may nothing. The words after `off` are for the server itself: Redis, and
Valkey before 9.1, read their file of writes back with the rights of this user, and leave out what
it may not do."""


def ledger_names() -> tuple[str, ...]:
    """Return the names of all users that have a secret."""
    return (*(user.name for user in USERS), ADMIN)


def acl_of(user: LedgerUser, digest: str, commands: Sequence[str]) -> str:
    """Write a user's line of an ACL file; `digest` is the SHA-256 of its secret."""
    allowed = sorted({*CONNECTING, *CALLED, *commands, *user.commands})
    words = [
        *("user", user.name, "on", f"#{digest}", "resetkeys", "resetchannels"),
        *(f"~{pattern}" for pattern in user.writes),
        *(f"%R~{pattern}" for pattern in user.reads),
        "-@all",
        *(f"+{command}" for command in allowed),
        *(() if user.writes else ("-@write",)),
    ]
    return " ".join(words)


def redis_acl(digests: Mapping[str, str]) -> str:
    """Write the ACL file; who names no user may nothing."""
    commands = (*script_commands(), *ACCOUNTING)
    lines = [
        NOBODY,
        f"user {PROBE} on nopass resetkeys resetchannels -@all +ping",
        f"user {ADMIN} on #{digests[ADMIN]} ~* &* +@all",
        *(acl_of(user, digests[user.name], sorted(commands)) for user in USERS),
    ]
    return "\n".join(lines) + "\n"


def digest_of(secret: str) -> str:
    """Return what an ACL file holds in place of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()
