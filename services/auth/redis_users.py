"""The users of Redis or Valkey and their permissions: one per service, with the keys it needs.

A function runs with its caller's permissions. Only the binder may load functions: these decide what
all others run.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from shared.ledger.function_library import FUNCTIONS

LEDGER = "lh:*"
QUOTAS = "lh-quotas*"
PREEMPTION = "lh-preemption:*"
PLANS = (
    *("lh-preemption:preemptions", "lh-preemption:promises"),
    "lh-preemption:leader:planner",
)
"""Planners only read the rest."""
BUDGET = "lh-budget:*"
TENURES = "lh:tenures"
RUN_TIMES = "lh-run-times"

CONNECTION_COMMANDS = ("ping", "select", "client|setinfo", "client|setname", "fcall_ro", "time")
"""All other commands run inside functions."""
WRITING_COMMANDS = ("fcall",)
LOADING_COMMANDS = ("function|load", "function|list", "function|delete")
FEED_COMMANDS = ("xread",)
OF_OTHERS_THAN_BINDERS = (
    *("budget_journal", "budgets", "enroll", "read_budgets", "read_run_times", "save_run_times"),
)
BUDGET_COMMANDS = ("expire", "hdel", "hincrby", "hset", "hsetnx", "set", "xadd", "xtrim", "zadd")
"""The function `budgets` runs them for the client that writes budgets."""
READING = ("read_nodes", "status", "try_write")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUser:
    """`writes` and `reads` are patterns of keys."""

    name: str
    functions: tuple[str, ...]
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    loads_functions: bool = False
    commands: tuple[str, ...] = ()
    """In addition to those of its functions."""


USERS = (
    RedisUser(
        name="placer",
        functions=(*READING, "enroll", "load_leases", "reserve", "wait"),
        writes=(LEDGER,),
        reads=(QUOTAS,),
        commands=FEED_COMMANDS,
    ),
    RedisUser(
        name="planner",
        functions=(
            *READING,
            *("list_waiting", "preemptions", "query", "read_preemptions", "read_run_times"),
        ),
        writes=(LEDGER, *PLANS),
        reads=(QUOTAS, RUN_TIMES, PREEMPTION),
        commands=FEED_COMMANDS,
    ),
    RedisUser(
        name="binder",
        functions=tuple(name for name in FUNCTIONS if name not in OF_OTHERS_THAN_BINDERS),
        writes=(LEDGER, QUOTAS, PREEMPTION),
        loads_functions=True,
    ),
    RedisUser(
        name="timekeeper",
        functions=(
            *("read_nodes", "try_write"),
            *("budget_journal", "budgets", "load_leases", "read_budgets", "read_quotas"),
            *("read_run_times", "save_run_times"),
        ),
        writes=(BUDGET, TENURES, RUN_TIMES),
        reads=(LEDGER, QUOTAS),
        commands=BUDGET_COMMANDS,
    ),
    RedisUser(name="extender", functions=READING, reads=(LEDGER, QUOTAS), commands=FEED_COMMANDS),
    RedisUser(
        name="api",
        functions=(
            *READING,
            *("list_waiting", "read_budgets", "read_gated_pods", "read_preemptions"),
            "read_run_times",
        ),
        reads=(LEDGER, QUOTAS, PREEMPTION, BUDGET, RUN_TIMES),
        commands=FEED_COMMANDS,
    ),
    RedisUser(
        name="operator",
        functions=(
            *("read_nodes", "try_write", "read_budgets", "list_waiting", "query"),
            *("list_unreadable", "read_quotas"),
        ),
        reads=(LEDGER, QUOTAS, PREEMPTION, BUDGET),
        commands=("info", "config|get", "acl|dryrun"),
    ),
)
ADMIN = "admin"
PROBE = "probe"
"""No password, and only the command PING."""
DEFAULT_USER_RULE = "user default off resetpass ~* &* +@all"
"""The rules after `off` are for the server itself: Redis, and Valkey before 9.1, replay their
append-only file as this user, and skip what it may not do."""


def password_users() -> tuple[str, ...]:
    return (*(user.name for user in USERS), ADMIN)


def acl_rule(user: RedisUser, digest: str) -> str:
    """Return a line of an ACL file; `digest` is the SHA-256 of the password."""
    loading = LOADING_COMMANDS if user.loads_functions else ()
    writing = WRITING_COMMANDS if user.writes else ()
    of_functions = frozenset[str]().union(*(FUNCTIONS[name].commands for name in user.functions))
    allowed = sorted({*CONNECTION_COMMANDS, *writing, *loading, *of_functions, *user.commands})
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
    lines = [
        DEFAULT_USER_RULE,
        f"user {PROBE} on nopass resetkeys resetchannels -@all +ping",
        f"user {ADMIN} on #{digests[ADMIN]} ~* &* +@all",
        *(acl_rule(user, digests[user.name]) for user in USERS),
    ]
    return "\n".join(lines) + "\n"


def password_digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()
