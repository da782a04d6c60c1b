"""The root Secret, and the objects and files that are derived from it.

Only the auth service may read the root Secret, and it creates the keys that are missing. All other
objects are derived from it, so that several replicas may write them at once.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from services.auth.nats_users import NatsUser, auth_callout_configuration
from services.auth.nkeys import SEED_BYTES, TokenIssuer
from services.auth.redis_users import ADMIN, PROBE, password_digest, password_users, redis_acl
from shared.credentials import certificates
from shared.credentials.certificates import EARLY, Issued

AUTHORITY_DAYS, SERVER_DAYS = 3650, 365
SECRET_BYTES = 32
ISSUER, RENEWAL_COUNT = "issuer", "server.renewals"
AUTH, SYSTEM = "auth", "system"
"""The two users of NATS with a password; all other users are authorized by token."""
EXTENDER, KUBE_SCHEDULER = "extender", "kube-scheduler"
"""Server and client of the extender; its client's certificate is for the name of the latter."""
DASHBOARD = "dashboard"
ISSUED = (EXTENDER, KUBE_SCHEDULER, DASHBOARD)
"""Who has a certificate in a Secret of its own."""
LOCAL_NAMES = ("localhost", "127.0.0.1")
"""Names under which `kubectl port-forward` shows the dashboard."""
PROPAGATED = timedelta(minutes=5)
"""After this time, the kubelet has written a new certificate to the servers' files."""
RECENT = timedelta(days=7)
SecretData = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedObject:
    """An object of the cluster, and the data that it must hold."""

    kind: str
    """`secrets` or `configmaps`."""
    name: str
    data: Mapping[str, bytes]
    for_agents: bool = False
    """It is in the namespace of the node agents."""


def complete(
    stored: SecretData,
    names: Sequence[str],
    now: datetime,
    random_bytes: Callable[[int], bytes],
    *,
    namespace: str,
) -> dict[str, bytes]:
    """Return the stored data, with missing entries created and due certificates renewed.

    `names` are those of the servers NATS and Redis, `namespace` is that of the Services. Raises
    RequestError for stored certificates that cannot be parsed.
    """
    data = dict(stored)
    if len(data.get(ISSUER, b"")) != SEED_BYTES:
        data[ISSUER] = random_bytes(SEED_BYTES)
    for key, user in _login_keys().items():
        if not data.get(key):
            password = base64.urlsafe_b64encode(random_bytes(SECRET_BYTES)).rstrip(b"=")
            data[key] = user.encode() + b":" + password
    if not (data.get("ca.crt") and data.get("ca.key")):
        created = certificates.authority("leasehold", now, days=AUTHORITY_DAYS)
        issued = (f"{name}.crt" for name in ("server", *ISSUED))
        data |= {"ca.crt": created.certificate, "ca.key": created.key, **dict.fromkeys(issued, b"")}
    if _issue(data, "server", names, now):
        renewals = int(data.get(RENEWAL_COUNT, b"-1")) + 1
        data[RENEWAL_COUNT] = str(renewals).encode()
    _issue(data, EXTENDER, [f"{EXTENDER}.{namespace}.svc"], now, client=False)
    _issue(data, KUBE_SCHEDULER, [KUBE_SCHEDULER], now)
    _issue(data, DASHBOARD, [f"{DASHBOARD}.{namespace}.svc", *LOCAL_NAMES], now, client=False)
    return data


def _issue(
    data: dict[str, bytes], name: str, names: Sequence[str], now: datetime, *, client: bool = True
) -> bool:
    """Issue a certificate, also for a `client`, if it is missing or due; return whether it was."""
    present = data.get(f"{name}.crt")
    if present and not certificates.is_due(present, names, now):
        return False
    authority = Issued(certificate=data["ca.crt"], key=data["ca.key"])
    issued = certificates.issue(authority, names, now, days=SERVER_DAYS, client=client)
    data |= {f"{name}.crt": issued.certificate, f"{name}.key": issued.key}
    return True


def managed_objects(
    data: SecretData, auth_user: NatsUser, nats_directory: str
) -> tuple[ManagedObject, ...]:
    """Return the objects of servers and services.

    `auth_user` is the user that answers the auth callout; `nats_directory` is where NATS' server
    finds its files.
    """
    passwords = {name: data[f"nats.{name}"].decode().partition(":")[2] for name in (AUTH, SYSTEM)}
    issuer = TokenIssuer(data[ISSUER]).public
    certificate = {name: data[name] for name in ("server.crt", "server.key", "ca.crt")}
    single, clustered = auth_callout_configuration(auth_user, passwords, issuer, nats_directory)
    nats = {"nats.conf": single.encode(), "nats-cluster.conf": clustered.encode()}
    acl = redis_acl(_password_digests(data))
    authority = {"ca.crt": data["ca.crt"]}
    return (
        ManagedObject(kind="configmaps", name="auth-ca", data=authority),
        ManagedObject(kind="configmaps", name="node-agent-ca", data=authority, for_agents=True),
        ManagedObject(kind="secrets", name="auth-nats", data={**nats, **certificate}),
        ManagedObject(
            kind="secrets", name="auth-redis", data={"users.acl": acl.encode(), **certificate}
        ),
        *(
            ManagedObject(
                kind="secrets",
                name=f"auth-{name}",
                data={"tls.crt": data[f"{name}.crt"], "tls.key": data[f"{name}.key"], **authority},
            )
            for name in ISSUED
        ),
        *(
            ManagedObject(
                kind="secrets", name=f"redis-{name}", data={"login": data[f"redis.{name}"]}
            )
            for name in password_users()
            if name != ADMIN
        ),
    )


def own_files(data: SecretData) -> dict[str, bytes]:
    """Return the files of the auth service's own credentials, by name."""
    return {
        "ca.crt": data["ca.crt"],
        "nats": data[f"nats.{AUTH}"],
        "nats-system": data[f"nats.{SYSTEM}"],
        "redis": data[f"redis.{ADMIN}"],
    }


def redis_user_rules(data: SecretData) -> list[list[str]]:
    """Return the arguments of one ACL SETUSER per user.

    The administrator is not changed. If an operator has given another administrator, as of a
    managed server, the users `default` and `probe` are not changed either.
    """
    administrator = data[f"redis.{ADMIN}"].decode().partition(":")[0]
    lines = [line.split()[1:] for line in redis_acl(_password_digests(data)).splitlines()]
    excluded = {administrator, ADMIN} | ({"default", PROBE} if administrator != ADMIN else set())
    return [rule for rule in lines if rule[0] not in excluded]


def should_reload(data: SecretData, now: datetime) -> bool:
    """Whether servers may still serve an older certificate than the one in their files."""
    issued_at = certificates.load(data["server.crt"]).not_valid_before_utc + EARLY
    return int(data[RENEWAL_COUNT]) > 0 and PROPAGATED <= now - issued_at < RECENT


def expires_at(data: SecretData) -> float:
    """Return when the servers' certificate expires, Unix seconds."""
    return certificates.load(data["server.crt"]).not_valid_after_utc.timestamp()


def _password_digests(data: SecretData) -> dict[str, str]:
    return {
        name: password_digest(data[f"redis.{name}"].decode().strip().partition(":")[2])
        for name in password_users()
    }


def _login_keys() -> dict[str, str]:
    """Return the keys that store logins, and the user of each."""
    nats = {f"nats.{name}": name for name in (AUTH, SYSTEM)}
    return nats | {f"redis.{name}": name for name in password_users()}
