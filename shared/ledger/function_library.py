"""The Lua functions of the ledger, as one library that Redis or Valkey loads.

Each file of `functions/` is the module of a function; `functions/common/` has those that they
share. While a library is loaded it may only register its functions, so a module runs when a
function first requires it. A hash in the library's name lets several versions run side by side.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

_FOLDER = resources.files("shared.ledger") / "functions"
LIBRARY_PREFIX = "leasehold_"
_LINE = re.compile(r"\buser_function:(\d+)")
_HASH_LENGTH = 12


class LedgerFunction(NamedTuple):
    module: str
    commands: frozenset[str]
    reads_only: bool
    """Servers run it even while they refuse writes."""


_OPENING = frozenset({"hmget", "hlen", "scard", "zcard"})
"""Of every function, before it begins (`ledger.lua`)."""
_CLOSING = frozenset({"hset", "exists"})
"""Of functions that write, to save how many records there are."""


def _reading(module: str, commands: str) -> LedgerFunction:
    return LedgerFunction(module, frozenset(commands.split()) | _OPENING, reads_only=True)


def _writing(module: str, commands: str) -> LedgerFunction:
    return LedgerFunction(
        module, frozenset(commands.split()) | _OPENING | _CLOSING, reads_only=False
    )


_CHANGES = "del hdel hget hgetall hincrby hkeys xadd zadd zrange zrem"
"""Of functions that change nodes, devices and leases (`writes.lua`)."""

FUNCTIONS: Mapping[str, LedgerFunction] = {
    "advance": _writing("advance", f"{_CHANGES} time zrangebylex"),
    "budget_journal": _reading("budget_journal", "time xrange"),
    "budgets": _writing(
        "budgets", "del hdel hget hgetall hkeys set time type zrangebyscore zrem hvals mget xrange"
    ),
    "choose_offers": _writing(
        "choose_offers",
        "hdel hget hgetall hkeys spop zadd zcount zmscore zrange zrangebylex zrangebyscore zrem "
        "zrevrange",
    ),
    "cordon": _writing("cordon", f"{_CHANGES} hlen"),
    "end_leases": _writing(
        "end_leases", f"{_CHANGES} sadd srem time zcount zrangebylex zrangebyscore"
    ),
    "enroll": _writing(
        "enroll", "exists hdel hget hincrby sadd zadd zlexcount zmscore zrange zrangebylex zrem"
    ),
    "eviction_policy": _writing("eviction_policy", "hdel info"),
    "extend": _writing("extend", _CHANGES),
    "gated_pods": _writing("gated_pods", "exists hdel sadd srem"),
    "keep_library": _writing("keep_library", "hdel hgetall time"),
    "list_unreadable": _reading("list_unreadable", "hscan zscan"),
    "list_waiting": _reading("list_waiting", "hkeys hscan"),
    "load_leases": _reading("load_leases", "zrangebylex zrangebyscore"),
    "preemptions": _writing(
        "preemptions", f"{_CHANGES} get hexists hlen hvals set time xrange zmscore"
    ),
    "query": _reading("query", "hget hgetall hkeys smembers zmscore zrange"),
    "quotas": _writing("quotas", "del get hdel hget hgetall hkeys hlen hscan set time xadd"),
    "read_budgets": _reading("budgets", "hget hgetall hkeys hvals mget time xrange zrangebyscore"),
    "read_gated_pods": _reading("gated_pods", "hget hvals smembers"),
    "read_nodes": _reading("read_nodes", "hget hgetall hkeys zrangebyscore"),
    "read_preemptions": _reading("preemptions", "hexists hgetall hvals xrange"),
    "read_quotas": _reading("quotas", "hgetall"),
    "read_run_times": _reading("run_times", "get"),
    "rebuild": _writing(
        "rebuild",
        "del expire hdel hexists hget hgetall hkeys hscan scan time unlink zadd zrange zrem",
    ),
    "remove_node": _writing("remove_node", f"{_CHANGES} get hlen set srem zcount"),
    "reserve": _writing("reserve", f"{_CHANGES} exists hlen zcount zlexcount zmscore zscore"),
    "resize": _writing("resize", f"{_CHANGES} get hlen set time"),
    "resource_claims": _writing("resource_claims", f"{_CHANGES} sadd"),
    "restore": _writing(
        "restore",
        f"{_CHANGES} exists expire hlen hscan hvals srem time zmscore zscore",
    ),
    "save_devices": _writing("save_devices", f"{_CHANGES} time"),
    "save_nodes": _writing("save_nodes", f"{_CHANGES} get sadd set srem"),
    "save_run_times": _writing("run_times", "get set"),
    "silence": _writing("silence", "zadd zrem"),
    "status": _reading("status", "hlen scard zrange"),
    "try_write": _writing("try_write", "set"),
    "wait": _writing(
        "wait",
        "exists hdel hget hincrby sadd time zadd zcard zcount zlexcount zmscore zrange zrangebylex "
        "zrangebyscore zrem zremrangebyrank",
    ),
}

_GLOBALS = (
    *("cjson", "cmsgpack", "error", "ipairs", "math", "next", "pairs", "pcall", "redis", "select"),
    *("string", "struct", "table", "tonumber", "tostring", "type", "unpack"),
)
"""Global variables are slow in a function, so all share local variables of the same names; only a
function that is called can read the global ones."""
_BEGINNING = f"""\
local function globals() return {", ".join(_GLOBALS)} end
local {", ".join(_GLOBALS)}
local modules, loaded = {{}}, {{}}

local function require(name)
  if loaded[name] == nil then
    {", ".join(_GLOBALS)} = globals()
    loaded[name] = modules[name]()
  end
  return loaded[name]
end

"""


class Library(NamedTuple):
    name: str
    text: str
    first_lines: tuple[tuple[int, str], ...]

    def full_name(self, name: str) -> str:
        return f"{self.name}_{name}"

    def located(self, message: str) -> str:
        return _LINE.sub(lambda match: self._file_and_line(int(match[1])) or match[0], message)

    def _file_and_line(self, line: int) -> str:
        place = ""
        for before, file in self.first_lines:
            if before < line:
                place = f"{file}:{line - before}"
        return place


@cache
def library() -> Library:
    return bundled(modules())


def modules() -> Mapping[str, str]:
    files = [*_FOLDER.iterdir(), *(_FOLDER / "common").iterdir()]
    texts = {file.name: file.read_text() for file in files if file.name.endswith(".lua")}
    return {name.removesuffix(".lua"): texts[name] for name in sorted(texts)}


def bundled(texts: Mapping[str, str]) -> Library:
    digest = hashlib.sha256("".join(f"{name}\n{texts[name]}" for name in texts).encode())
    digest.update(f"{_BEGINNING}{[*_registrations(LIBRARY_PREFIX)]}".encode())
    name = f"{LIBRARY_PREFIX}{digest.hexdigest()[:_HASH_LENGTH]}"
    parts = [f"#!lua name={name}\nlocal register = redis.register_function\n", _BEGINNING]
    first_lines = []
    for module, text in texts.items():
        parts.append(f"modules['{module}'] = function()\n")
        first_lines.append((sum(part.count("\n") for part in parts), f"{module}.lua"))
        parts.append(f"{text}end\n\n")
    parts.extend(_registrations(name))
    return Library(name, "".join(parts), tuple(first_lines))


def _registrations(library_name: str) -> Iterable[str]:
    for name, function in FUNCTIONS.items():
        flags = "'no-writes'" if function.reads_only else ""
        writes = "false" if function.reads_only else "true"
        yield (
            f"register{{function_name = '{library_name}_{name}', "
            f"flags = {{{flags}}},\n"
            f"  callback = function(_, argv) return require('dispatch')"
            f"(require('{function.module}'), argv, {writes}) end}}\n"
        )
