"""The root Secret, and the objects and files that are derived from it.

All is derived from one Secret, so that several replicas may write at once.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from services.auth import ca_rotation
from services.auth.ca_rotation import (
    API,
    EXTENDER,
    HOLDERS,
    KUBE_SCHEDULER,
    NOTHING_OBSERVED,
    SERVER,
    TRUSTED,
    Rotation,
    RotationProgress,
)
from services.auth.nats_users import NatsUser, auth_callout_configuration
from services.auth.nkeys import SEED_BYTES, TokenIssuer
from services.auth.redis_users import ADMIN, PROBE, password_digest, password_users, redis_acl
from shared.credentials import certificates

SECRET_BYTES = 32
ISSUER = "issuer"
CHANGED_AT = "server.changed"
"""When the servers' certificate or trusted CAs were replaced, Unix seconds."""
AUTH = "auth"
SYSTEM = "system"
"""All users but these two are authorized by token."""
LOCAL_NAMES = ("localhost", "127.0.0.1")
"""Of the page at `kubectl port-forward`."""
RECENT = timedelta(days=7)
ISSUING_CA = "issuing-ca.crt"
"""Without those that it replaces."""
SecretData = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedObject:
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
    observed: RotationProgress = NOTHING_OBSERVED,
) -> dict[str, bytes]:
    """Create missing entries, renew due certificates, and go on with the CA's replacement.

    `names` are those of NATS and Redis, `namespace` is that of the Services. Raises RequestError
    for stored certificates that cannot be parsed.
    """
    data = dict(stored)
    if len(data.get(ISSUER, b"")) != SEED_BYTES:
        data[ISSUER] = random_bytes(SEED_BYTES)
    for key, user in _login_keys().items():
        if not data.get(key):
            password = base64.urlsafe_b64encode(random_bytes(SECRET_BYTES)).rstrip(b"=")
            data[key] = user.encode() + b":" + password
    ca_rotation.create_missing(data, now)
    of_api = [f"{API}.{namespace}.svc", *LOCAL_NAMES]
    ca_rotation.issue(data, SERVER, names, now, observed)
    ca_rotation.issue(data, EXTENDER, [f"{EXTENDER}.{namespace}.svc"], now, observed, client=False)
    ca_rotation.issue(data, KUBE_SCHEDULER, [KUBE_SCHEDULER], now, observed)
    ca_rotation.issue(data, API, of_api, now, observed, client=False)
    ca_rotation.drop_replaced(data, observed)
    if stored.get("server.crt") and files_of_servers(data) != files_of_servers(stored):
        data[CHANGED_AT] = str(round(now.timestamp())).encode()
    return data


def files_of_servers(data: SecretData) -> tuple[bytes, bytes]:
    return data.get("server.crt", b""), data.get(TRUSTED, b"")


def managed_objects(
    data: SecretData, auth_user: NatsUser, nats_directory: str
) -> tuple[ManagedObject, ...]:
    """`auth_user` answers the auth callout; `nats_directory` has NATS' files."""
    passwords = {name: data[f"nats.{name}"].decode().partition(":")[2] for name in (AUTH, SYSTEM)}
    issuer = TokenIssuer(data[ISSUER]).public
    authority = {"ca.crt": data[TRUSTED]}
    certificate = {"server.crt": data["server.crt"], "server.key": data["server.key"], **authority}
    single, clustered = auth_callout_configuration(auth_user, passwords, issuer, nats_directory)
    nats = {"nats.conf": single.encode(), "nats-cluster.conf": clustered.encode()}
    acl = redis_acl(_password_digests(data))
    rotation = {"rotation": ca_rotation.rotation(data).encode()}
    return (
        ManagedObject(kind="configmaps", name="auth-ca", data={**authority, **rotation}),
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
            for name in HOLDERS
            if name != SERVER
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
    return {
        "ca.crt": data[TRUSTED],
        ISSUING_CA: data["ca.crt"],
        "nats": data[f"nats.{AUTH}"],
        "nats-system": data[f"nats.{SYSTEM}"],
        "redis": data[f"redis.{ADMIN}"],
    }


def redis_user_rules(data: SecretData) -> list[list[str]]:
    """Return the arguments of one ACL SETUSER per user, without the administrator.

    With another administrator, as of a managed server, `default` and `probe` are left out, too.
    """
    administrator = data[f"redis.{ADMIN}"].decode().partition(":")[0]
    lines = [line.split()[1:] for line in redis_acl(_password_digests(data)).splitlines()]
    excluded = {administrator, ADMIN} | ({"default", PROBE} if administrator != ADMIN else set())
    return [rule for rule in lines if rule[0] not in excluded]


def should_reload(data: SecretData, now: datetime) -> bool:
    """Whether servers may still use older files."""
    changed = data.get(CHANGED_AT, b"")
    changed_at = int(changed) if changed.isdigit() else 0
    is_rotating = ca_rotation.rotation(data) is not Rotation.COMPLETE
    return is_rotating or now.timestamp() - changed_at < RECENT.total_seconds()


def expires_at(data: SecretData) -> float:
    """Unix seconds."""
    return certificates.load(data["server.crt"]).not_valid_after_utc.timestamp()


def _password_digests(data: SecretData) -> dict[str, str]:
    return {
        name: password_digest(data[f"redis.{name}"].decode().strip().partition(":")[2])
        for name in password_users()
    }


def _login_keys() -> dict[str, str]:
    nats = {f"nats.{name}": name for name in (AUTH, SYSTEM)}
    return nats | {f"redis.{name}": name for name in password_users()}
