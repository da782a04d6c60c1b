"""`leasehold doors`: who may what on NATS and Redis, shown, or written with a secret for each.

    DIR/nats.conf             for nats-server --config
    DIR/users.acl             for valkey-server --aclfile; it holds digests of the secrets only
    DIR/nats/USER             user:secret, for --nats-credentials of that service
    DIR/redis/USER            likewise, for --redis-credentials

Everything is for its owner only. A secret that is there already is kept.
"""

import argparse
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.cli.doors_nats import bus_users, nats_configuration
from services.cli.doors_redis import digest_of, ledger_names, redis_acl
from shared.clients.logins import load_login
from shared.model.errors import RequestError
from shared.model.names import NodeName

NODE_SHOWN = "NODE"
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Doors:
    """Where the files of one directory are."""

    root: Path

    @property
    def nats_configuration(self) -> Path:
        """Read by nats-server."""
        return self.root / "nats.conf"

    @property
    def acl(self) -> Path:
        """Read by valkey-server."""
        return self.root / "users.acl"

    def nats(self, user: str) -> Path:
        """Return the file with a user's secret at NATS."""
        return self.root / "nats" / user

    def redis(self, user: str) -> Path:
        """Return the file with a user's secret at Redis."""
        return self.root / "redis" / user


def write(root: Path, nodes: Sequence[NodeName], *, nats: bool = True, redis: bool = True) -> Doors:
    """Write everything for these nodes. Raises RequestError if it cannot be written."""
    doors = Doors(root)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if nats:
            users = bus_users(nodes)
            said = _kept((user.name for user in users), doors.nats)
            _write(doors.nats_configuration, nats_configuration(users, said))
        if redis:
            said = _kept(ledger_names(), doors.redis)
            _write(doors.acl, redis_acl({user: digest_of(text) for user, text in said.items()}))
    except OSError as error:
        raise RequestError(f"{error.filename} cannot be written: {error.strerror}") from error
    return doors


def show(flags: argparse.Namespace) -> int:
    """Run the command."""
    nodes = [NodeName(node) for node in flags.nodes.split(",") if node]
    both = flags.nats == flags.redis
    if flags.out:
        if not nodes and (both or flags.nats):
            raise RequestError(
                "--nodes NAME,.. is needed with --out: each node's agent has a user of its own"
            )
        doors = write(Path(flags.out), nodes, nats=both or flags.nats, redis=both or flags.redis)
        print(f"written to {doors.root}; keep it from everybody but who runs the servers")
        return 0
    if both or flags.nats:
        users = bus_users(nodes or [NodeName(NODE_SHOWN)])
        print(nats_configuration(users, {user.name: f"SECRET_OF_{user.name}" for user in users}))
    if both or flags.redis:
        print(redis_acl({user: f"SHA256_OF_SECRET_OF_{user}" for user in ledger_names()}), end="")
    return 0


def _kept(users: Iterable[str], place: Callable[[str], Path]) -> dict[str, str]:
    """Return each user's secret, made now if there is none."""
    found: dict[str, str] = {}
    for user in users:
        path = place(user)
        if not path.exists():
            _write(path, f"{user}:{secrets.token_urlsafe(SECRET_BYTES)}\n")
        found[user] = load_login(path).secret
    return found


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
