"""`leasehold doors`: who may what on NATS and Redis, shown, or written with a secret for each.

    DIR/nats.conf             for nats-server --config
    DIR/users.acl             for valkey-server --aclfile; it holds digests of the secrets only
    DIR/nats/USER             user:secret, for --nats-credentials of that service
    DIR/redis/USER            likewise, for --redis-credentials
    DIR/ca.crt, ca.key        with --names: an authority, for --nats-ca-file and --redis-ca-file
    DIR/server.crt, .key      the certificate that it made for servers of these names

Everything is for its owner only, or with --shared for its group as well. A secret that is there
already is kept; a server's certificate is, too, in the first half of its year.
"""

import argparse
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from services.auth.nats_users import all_users, nats_configuration
from services.auth.redis_users import password_digest, password_users, redis_acl
from shared.credentials import certificates
from shared.credentials.logins import load_login
from shared.model.errors import RequestError
from shared.model.names import NodeName

NODE_SHOWN = "NODE"
SECRET_BYTES = 32
AUTHORITY_DAYS, SERVER_DAYS = 3650, 365


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

    @property
    def authority(self) -> Path:
        """By which clients know the servers."""
        return self.root / "ca.crt"

    @property
    def authority_key(self) -> Path:
        """Wanted only to make certificates."""
        return self.root / "ca.key"

    @property
    def certificate(self) -> Path:
        """Shown by the servers."""
        return self.root / "server.crt"

    @property
    def key(self) -> Path:
        """Of that certificate."""
        return self.root / "server.key"

    def nats(self, user: str) -> Path:
        """Return the file with a user's secret at NATS."""
        return self.root / "nats" / user

    def redis(self, user: str) -> Path:
        """Return the file with a user's secret at Redis."""
        return self.root / "redis" / user


def write(
    root: Path,
    nodes: Sequence[NodeName],
    *,
    nats: bool = True,
    redis: bool = True,
    names: Sequence[str] = (),
    shared: bool = False,
) -> Doors:
    """Write everything for these nodes; with `names`, certificates for servers of these, too.

    `shared`: the files' group may read them. Raises RequestError if they cannot be written.
    """
    doors = Doors(root.absolute())
    mode = 0o640 if shared else 0o600
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if names:
            _certify(doors, names, mode)
        if nats:
            users = all_users(nodes)
            said = _kept((user.name for user in users), doors.nats, mode)
            files = (doors.certificate, doors.key) if names else None
            _write(doors.nats_configuration, nats_configuration(users, said, tls=files), mode)
        if redis:
            said = _kept(password_users(), doors.redis, mode)
            acl = redis_acl({user: password_digest(text) for user, text in said.items()})
            _write(doors.acl, acl, mode)
        if shared:
            for directory in (doors.root, doors.root / "nats", doors.root / "redis"):
                if directory.exists():
                    directory.chmod(0o750)
    except OSError as error:
        raise RequestError(f"{error.filename} cannot be written: {error.strerror}") from error
    return doors


def _certify(doors: Doors, names: Sequence[str], mode: int) -> None:
    """Make the authority once, and the servers' certificate when it is due."""
    now = datetime.now(UTC)
    if not doors.authority_key.exists():
        made = certificates.authority("leasehold", now, days=AUTHORITY_DAYS)
        _write(doors.authority, made.certificate.decode(), mode)
        _write(doors.authority_key, made.key.decode(), 0o600)
    by = certificates.Issued(
        certificate=doors.authority.read_bytes(), key=doors.authority_key.read_bytes()
    )
    if doors.key.exists() and not certificates.is_due(doors.certificate.read_bytes(), names, now):
        return
    made = certificates.issue(by, names, now, days=SERVER_DAYS)
    _write(doors.key, made.key.decode(), mode)
    _write(doors.certificate, made.certificate.decode(), mode)


def show(flags: argparse.Namespace) -> int:
    """Run the command."""
    nodes = [NodeName(node) for node in flags.nodes.split(",") if node]
    both = flags.nats == flags.redis
    if flags.out:
        if not nodes and (both or flags.nats):
            raise RequestError(
                "--nodes NAME,.. is needed with --out: each node's agent has a user of its own"
            )
        doors = write(
            Path(flags.out),
            nodes,
            nats=both or flags.nats,
            redis=both or flags.redis,
            names=[name for name in flags.names.split(",") if name],
            shared=flags.shared,
        )
        print(f"written to {doors.root}; keep it from everybody but who runs the servers")
        return 0
    if both or flags.nats:
        users = all_users(nodes or [NodeName(NODE_SHOWN)])
        print(nats_configuration(users, {user.name: f"SECRET_OF_{user.name}" for user in users}))
    if both or flags.redis:
        print(redis_acl({user: f"SHA256_OF_SECRET_OF_{user}" for user in password_users()}), end="")
    return 0


def _kept(users: Iterable[str], place: Callable[[str], Path], mode: int) -> dict[str, str]:
    """Return each user's secret, made now if there is none."""
    found: dict[str, str] = {}
    for user in users:
        path = place(user)
        if not path.exists():
            _write(path, f"{user}:{secrets.token_urlsafe(SECRET_BYTES)}\n", mode)
        found[user] = load_login(path).secret
    return found


def _write(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask is
        file.write(text)
    draft.replace(path)
