"""`leasehold credentials`: the users of NATS and Redis, printed, or written with their secrets.

Only the owner can read the files, with --shared their group as well. An existing secret stays, and
so does a server's certificate in the first half of its year.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from services.auth.ca_rotation import (
    CERTIFICATE,
    KEY,
    KUBE_SCHEDULER,
    NOTHING_OBSERVED,
    SERVER,
    TRUSTED,
    create_missing,
    issue,
)
from services.auth.nats_users import all_users, nats_configuration
from services.auth.redis_users import PROBE, password_digest, password_users, redis_acl
from services.cli.commands import CredentialArguments
from shared.credentials.logins import load_login, write_private
from shared.model.errors import RequestError
from shared.model.names import NodeName

EXAMPLE_NODE = "NODE"
REDIS_PROBE_LOGIN = f"AUTH {PROBE} -\r\n".encode()
SECRET_BYTES = 32
NAMES = {
    "--nodes": re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"),
    "--names": re.compile(r"(\*\.)?\w([-\w.]{0,251}\w)?|[0-9a-f:.]+", re.ASCII | re.IGNORECASE),
}
"""Others would be paths of other files, or wildcards in the subjects of NATS."""


class CredentialFiles:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.nats_configuration = root / "nats.conf"
        self.acl = root / "users.acl"
        self.authority = root / CERTIFICATE
        self.certificate, self.key = root / f"{SERVER}.crt", root / f"{SERVER}.key"
        self.scheduler_certificate = root / f"{KUBE_SCHEDULER}.crt"
        self.scheduler_key = root / f"{KUBE_SCHEDULER}.key"

    def nats(self, user: str) -> Path:
        return self.root / "nats" / user

    def redis(self, user: str) -> Path:
        return self.root / "redis" / user


def write(
    root: Path,
    nodes: Sequence[NodeName],
    *,
    nats: bool = True,
    redis: bool = True,
    names: Sequence[str] = (),
    shared: bool = False,
) -> CredentialFiles:
    """`names` are of servers with certificates. Raises RequestError if a file cannot be written."""
    files = CredentialFiles(root.absolute())
    mode = 0o640 if shared else 0o600
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if names:
            _issue_certificates(files, names, mode)
        if nats:
            users = all_users(nodes)
            user_secrets = _ensure_secrets((user.name for user in users), files.nats, mode)
            tls = (files.certificate, files.key) if names else None
            configuration = nats_configuration(users, user_secrets, tls=tls)
            write_private(files.nats_configuration, configuration.encode(), mode)
        if redis:
            user_secrets = _ensure_secrets(password_users(), files.redis, mode)
            acl = redis_acl(
                {user: password_digest(secret) for user, secret in user_secrets.items()}
            )
            write_private(files.acl, acl.encode(), mode)
        if shared:
            for directory in (files.root, files.root / "nats", files.root / "redis"):
                if directory.exists():
                    directory.chmod(0o750)
    except OSError as error:
        raise RequestError(f"{error.filename} cannot be written: {error.strerror}") from error
    return files


def _issue_certificates(files: CredentialFiles, names: Sequence[str], mode: int) -> None:
    now = datetime.now(UTC)
    pairs = (
        (files.authority, files.root / KEY),
        (files.certificate, files.key),
        (files.scheduler_certificate, files.scheduler_key),
    )
    complete = (path for pair in pairs if pair[1].exists() for path in pair)
    stored = {path.name: path.read_bytes() for path in complete}
    data = dict(stored)
    create_missing(data, now)
    issue(data, SERVER, names, now, NOTHING_OBSERVED, client=False)
    issue(data, KUBE_SCHEDULER, [KUBE_SCHEDULER], now, NOTHING_OBSERVED)
    del data[TRUSTED]
    for name, content in data.items():
        if stored.get(name) != content:
            write_private(files.root / name, content, 0o600 if name == KEY else mode)


def show(flags: CredentialArguments) -> int:
    for flag, names in (("--nodes", flags.nodes), ("--names", flags.names)):
        if wrong := [name for name in names if not NAMES[flag].fullmatch(name)]:
            raise RequestError(f"{flag} {wrong[0]}: no node or server can have this name")
    nodes = [NodeName(node) for node in flags.nodes]
    both = flags.nats == flags.redis
    nats = both or flags.nats
    redis = both or flags.redis
    if flags.out is None:
        _print_rights(nodes or [NodeName(EXAMPLE_NODE)], nats=nats, redis=redis)
        return 0
    if nats and not nodes:
        raise RequestError(
            "--nodes NAME,.. is needed with --out: each node's agent has a user of its own"
        )
    files = write(flags.out, nodes, nats=nats, redis=redis, names=flags.names, shared=flags.shared)
    print(f"written to {files.root}; only those who run the servers may read it")
    return 0


def _print_rights(nodes: Sequence[NodeName], *, nats: bool, redis: bool) -> None:
    if nats:
        users = all_users(nodes)
        print(nats_configuration(users, {user.name: f"SECRET_OF_{user.name}" for user in users}))
    if redis:
        print(redis_acl({user: f"SHA256_OF_SECRET_OF_{user}" for user in password_users()}), end="")


def _ensure_secrets(
    users: Iterable[str], path_of: Callable[[str], Path], mode: int
) -> dict[str, str]:
    user_secrets: dict[str, str] = {}
    for user in users:
        path = path_of(user)
        if not path.exists():
            login = f"{user}:{secrets.token_urlsafe(SECRET_BYTES)}\n"
            write_private(path, login.encode(), mode)
        user_secrets[user] = load_login(path).secret
    return user_secrets
