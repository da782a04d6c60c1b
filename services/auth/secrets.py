"""What the auth service keeps, and what each server and service is given of it; no I/O.

All of it is in one Secret that nobody else may read; whatever is missing there is made anew. What
others are given follows from it, so that replicas may write it at once.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from services.auth.nats_users import BusUser, called_out_configuration
from services.auth.nkeys import SEED_BYTES, Issuer
from services.auth.redis_users import ADMIN, PROBE, digest_of, ledger_names, redis_acl
from shared.credentials import certificates
from shared.credentials.certificates import EARLY, Issued

AUTHORITY_DAYS, SERVER_DAYS = 3650, 365
SECRET_BYTES = 32
ISSUER, RENEWALS = "issuer", "server.renewals"
AUTH, SYSTEM = "auth", "system"
"""The two users of NATS whom its servers know by a secret; all others are asked for by token."""
SETTLED = timedelta(minutes=5)
"""So long after a new certificate was made it has surely reached the servers' files."""
RECENT = timedelta(days=7)
Kept = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handout:
    """One object of the cluster, and what is to be in it."""

    kind: str
    """`secrets` or `configmaps`."""
    name: str
    data: Mapping[str, bytes]


def completed(
    kept: Kept, names: Sequence[str], now: datetime, fresh: Callable[[int], bytes]
) -> dict[str, bytes]:
    """Return what is kept with what was missing or due; `fresh` gives random bytes.

    Raises RequestError for certificates that are none.
    """
    found = dict(kept)
    if len(found.get(ISSUER, b"")) != SEED_BYTES:
        found[ISSUER] = fresh(SEED_BYTES)
    for key, user in _logins().items():
        if not found.get(key):
            secret = base64.urlsafe_b64encode(fresh(SECRET_BYTES)).rstrip(b"=")
            found[key] = user.encode() + b":" + secret
    if not (found.get("ca.crt") and found.get("ca.key")):
        made = certificates.authority("leasehold", now, days=AUTHORITY_DAYS)
        found |= {"ca.crt": made.certificate, "ca.key": made.key, "server.crt": b""}
    if not found.get("server.crt") or certificates.is_due(found["server.crt"], names, now):
        by = Issued(certificate=found["ca.crt"], key=found["ca.key"])
        shown = certificates.issue(by, names, now, days=SERVER_DAYS, client=True)
        renewals = int(found.get(RENEWALS, b"-1")) + 1
        found |= {
            "server.crt": shown.certificate,
            "server.key": shown.key,
            RENEWALS: str(renewals).encode(),
        }
    return found


def handouts(kept: Kept, user: BusUser, files: str) -> tuple[Handout, ...]:
    """Return what servers and services are given; `files` is where NATS finds its own.

    `user` is the auth service's at NATS.
    """
    secrets = {name: kept[f"nats.{name}"].decode().partition(":")[2] for name in (AUTH, SYSTEM)}
    issuer = Issuer(kept[ISSUER]).public
    shown = {name: kept[name] for name in ("server.crt", "server.key", "ca.crt")}
    alone, clustered = called_out_configuration(user, secrets, issuer, files)
    nats = {"nats.conf": alone.encode(), "nats-cluster.conf": clustered.encode()}
    digests = {name: digest_of(_secret(kept, name)) for name in ledger_names()}
    return (
        Handout(kind="configmaps", name="auth-ca", data={"ca.crt": kept["ca.crt"]}),
        Handout(kind="secrets", name="auth-nats", data={**nats, **shown}),
        Handout(
            kind="secrets",
            name="auth-redis",
            data={"users.acl": redis_acl(digests).encode(), **shown},
        ),
        *(
            Handout(kind="secrets", name=f"redis-{name}", data={"login": kept[f"redis.{name}"]})
            for name in ledger_names()
            if name != ADMIN
        ),
    )


def own_files(kept: Kept) -> dict[str, bytes]:
    """Return the auth service's own files, by name."""
    return {
        "ca.crt": kept["ca.crt"],
        "nats": kept[f"nats.{AUTH}"],
        "nats-system": kept[f"nats.{SYSTEM}"],
        "redis": kept[f"redis.{ADMIN}"],
    }


def users_at_redis(kept: Kept) -> list[list[str]]:
    """Return the words by which a running Redis is told of its users.

    Whom we come as is left alone; and where that is another administrator than ours, as at a
    managed server, its default user and its health checks are its own.
    """
    us = kept[f"redis.{ADMIN}"].decode().partition(":")[0]
    digests = {name: digest_of(_secret(kept, name)) for name in ledger_names()}
    lines = [line.split()[1:] for line in redis_acl(digests).splitlines()]
    left = {us, ADMIN} | ({"default", PROBE} if us != ADMIN else set())
    return [words for words in lines if words[0] not in left]


def is_to_reload(kept: Kept, now: datetime) -> bool:
    """Say whether servers may still show another certificate than lies in their files by now."""
    made_at = certificates.load(kept["server.crt"]).not_valid_before_utc + EARLY
    return int(kept[RENEWALS]) > 0 and SETTLED <= now - made_at < RECENT


def ends_at(kept: Kept) -> float:
    """Return when the servers' certificate ends, Unix seconds."""
    return certificates.load(kept["server.crt"]).not_valid_after_utc.timestamp()


def _secret(kept: Kept, user: str) -> str:
    return kept[f"redis.{user}"].decode().strip().partition(":")[2]


def _logins() -> dict[str, str]:
    """Return the keys under which secrets are kept, and whose they are."""
    nats = {f"nats.{name}": name for name in (AUTH, SYSTEM)}
    return nats | {f"redis.{name}": name for name in ledger_names()}
