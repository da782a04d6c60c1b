"""The users of Redis or Valkey and their permissions: one per service, with the keys it needs.

A script runs with its caller's permissions, so a user's keys and commands also limit its scripts.
The commands are read from the scripts themselves.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from shared.ledger.script_sources import script_commands, script_names

LEDGER, QUOTAS, PREEMPTION, BUDGET = "lh:*", "lh-quotas*", "lh-preemption:*", "lh-budget:*"
TENURES, RUN_TIMES = "lh:tenures", "lh-run-times"

CONNECTION_COMMANDS = ("ping", "select", "client|setinfo", "client|setname", "evalsha", "time")
"""What clients of all users send; all other commands run inside scripts."""
LOADING_COMMANDS = ("script|load",)
"""Commands of users who may run scripts of their own choice, apart from those that are loaded."""
FEED_COMMANDS = ("xread",)
"""Of users who follow the ledger's changes."""
OF_OTHERS_THAN_BINDERS = ("budget_journal", "budgets", "enroll")
BUDGET_COMMANDS = ("expire", "hdel", "hincrby", "hset", "hsetnx", "set", "xadd", "xtrim", "zadd")
"""Commands that the script `budgets` runs for the client that writes budgets."""
READING = ("read_nodes", "status", "try_write")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUser:
    """One user of Redis: patterns of the keys that it may write, and of those that it may read."""

    name: str
    scripts: tuple[str, ...]
    """Those that its service runs; their commands are permitted."""
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    loads_scripts: bool = False
    """It works while no binder runs, which loads the scripts for all others."""
    commands: tuple[str, ...] = ()
    """In addition to those of its scripts."""


USERS = (
    RedisUser(
        name="placer",
        scripts=(*READING, "enroll", "load_leases", "reserve", "wait"),
        writes=(LEDGER,),
        reads=(QUOTAS,),
        loads_scripts=True,
        commands=FEED_COMMANDS,
    ),
    RedisUser(
        name="binder",
        scripts=tuple(name for name in script_names() if name not in OF_OTHERS_THAN_BINDERS),
        writes=(LEDGER, QUOTAS, PREEMPTION),
        reads=(RUN_TIMES,),
        loads_scripts=True,
    ),
    RedisUser(
        name="timekeeper",
        scripts=(
            *("read_nodes", "try_write"),
            *("budget_journal", "budgets", "load_leases", "quotas", "run_times"),
        ),
        writes=(BUDGET, TENURES, RUN_TIMES),
        reads=(LEDGER, QUOTAS),
        loads_scripts=True,
        commands=BUDGET_COMMANDS,
    ),
    RedisUser(name="extender", scripts=READING, reads=(LEDGER, QUOTAS), commands=FEED_COMMANDS),
    RedisUser(
        name="api",
        scripts=(*READING, "budgets", "gated_pods", "list_waiting", "preemptions", "run_times"),
        reads=(LEDGER, QUOTAS, PREEMPTION, BUDGET, RUN_TIMES),
        commands=FEED_COMMANDS,
    ),
    RedisUser(
        name="operator",
        scripts=("read_nodes", "try_write", "budgets", "list_waiting", "query", "quotas"),
        writes=(BUDGET,),
        reads=(LEDGER, QUOTAS, PREEMPTION),
        commands=("info", "config|get", "acl|dryrun"),
    ),
)
ADMIN = "admin"
"""The server's administrator: all permissions; no service uses it."""
PROBE = "probe"
"""For health checks: no password, and only the command PING."""
DEFAULT_USER_RULE = "user default off resetpass ~* &* +@all"
"""Clients without a user have no permissions. The rules after `off` are for the server itself:
Redis, and Valkey before 9.1, replay their append-only file as this user, and skip what it may not
do."""


def password_users() -> tuple[str, ...]:
    """Return the names of all users with a password."""
    return (*(user.name for user in USERS), ADMIN)


def acl_rule(user: RedisUser, digest: str) -> str:
    """Return a user's line of an ACL file; `digest` is the SHA-256 of its password."""
    loading = LOADING_COMMANDS if user.loads_scripts else ()
    of_scripts = frozenset[str]().union(*map(script_commands, user.scripts))
    allowed = sorted({*CONNECTION_COMMANDS, *loading, *of_scripts, *user.commands})
    rule = [
        *("user", user.name, "on", f"#{digest}", "resetkeys", "resetchannels"),
        *(f"~{pattern}" for pattern in user.writes),
        *(f"%R~{pattern}" for pattern in user.reads),
        "-@all",
        *(f"+{command}" for command in allowed),
        *(() if user.writes else ("-@write",)),
    ]
    return " ".join(rule)


def redis_acl(digests: Mapping[str, str]) -> str:
    """Return the ACL file. Clients without a user have no permissions."""
    lines = [
        DEFAULT_USER_RULE,
        f"user {PROBE} on nopass resetkeys resetchannels -@all +ping",
        f"user {ADMIN} on #{digests[ADMIN]} ~* &* +@all",
        *(acl_rule(user, digests[user.name]) for user in USERS),
    ]
    return "\n".join(lines) + "\n"


def password_digest(password: str) -> str:
    """Return the SHA-256 digest of a password, as an ACL file contains it."""
    return hashlib.sha256(password.encode()).hexdigest()
