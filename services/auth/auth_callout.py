"""Whom NATS lets in, and with which rights: decided from whose token it is; no I/O.

A service's account is that service; a node's agent is its service and the node that the API server
wrote into its token when it bound it to a pod there, or to the Node itself. What the caller calls
itself is not looked at.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.auth.nats_users import BusUser, operator_user, users_of
from services.auth.nkeys import SERVER, Issuer, read_claims
from services.topology import OPERATOR, ServiceListed
from shared.model.errors import RequestError
from shared.model.names import NodeName
from shared.runtime.service import Role

REQUEST_AUDIENCE = "nats-authorization-request"
ACCOUNT = "$G"
"""The account of NATS in which everything of ours is."""
NODE_NAME = "authentication.kubernetes.io/node-name"
"""Where Kubernetes says to which node a token's pod is bound, or the token itself.

The first from 1.30 on, the second from 1.31.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who wants to be let in, as a server of NATS tells it."""

    server: str
    """Its id, to which the answer goes."""
    user_key: str
    """Made by the server for this connection."""
    token: str
    name: str = ""
    """What the client calls itself, for logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewed:
    """Whose token it is, as the API server tells it."""

    user: str
    extra: Mapping[str, Sequence[str]]


class RefusedError(RequestError):
    """The caller is not let in; the message is for our log and the server's."""


def read_caller(request: str) -> Caller:
    """Read what a server of NATS asks. Raises RequestError for what no server has signed."""
    claims = read_claims(request, kind=SERVER)
    told = claims.get("nats", {})
    options = told.get("connect_opts", {})
    if claims.get("aud") != REQUEST_AUDIENCE or not told.get("user_nkey"):
        raise RequestError("this is no question of a NATS server")
    return Caller(
        server=str(told.get("server_id", {}).get("id", "")),
        user_key=str(told["user_nkey"]),
        token=str(options.get("pass") or options.get("auth_token") or ""),
        name=str(options.get("name", "")),
    )


def user_for(
    reviewed: Reviewed,
    namespace: str,
    services: Sequence[ServiceListed],
    roles: Mapping[str, tuple[Role, ...]],
) -> BusUser:
    """Return as which user a token's bearer is let in. Raises RefusedError saying why it is not."""
    kind, _, account = reviewed.user.rpartition(":")
    if reviewed.user == f"system:serviceaccount:{namespace}:{OPERATOR.name}":
        return operator_user()
    listed = next((service for service in services if service.name == account), None)
    if kind != f"system:serviceaccount:{namespace}" or listed is None:
        raise RefusedError(f"{reviewed.user} is no service account of a service of ours")
    nodes = [NodeName(name) for name in reviewed.extra.get(NODE_NAME, ()) if name]
    if listed.per_node and len(nodes) != 1:
        raise RefusedError(
            f"the token of {reviewed.user} does not name its node: it must be of a projected "
            "volume and Kubernetes 1.30 or newer, or bound to a Node (leasehold node-keys) and "
            "Kubernetes 1.31 or newer"
        )
    found = users_of([listed], roles, nodes if listed.per_node else [], asked_by=services)
    return found[0]


def admission(issuer: Issuer, caller: Caller, user: BusUser, *, now_s: int, life_s: int) -> str:
    """Return the answer that lets a caller in as a user, until `now_s + life_s`."""
    claims = {
        "aud": ACCOUNT,
        "exp": now_s + life_s,
        "name": user.name,
        "nats": {
            "pub": {"allow": list(user.publish)},
            "sub": {"allow": list(user.subscribe)},
            "subs": -1,
            "data": -1,
            "payload": -1,
            "type": "user",
            "version": 2,
        },
    }
    token = _signed(issuer, claims, caller.user_key, now_s)
    return _answer(issuer, caller, {"jwt": token}, now_s)


def refusal(issuer: Issuer, caller: Caller, why: str, *, now_s: int) -> str:
    """Return the answer that keeps a caller out."""
    return _answer(issuer, caller, {"error": why}, now_s)


def _answer(issuer: Issuer, caller: Caller, told: dict[str, Any], now_s: int) -> str:
    claims = {
        "aud": caller.server,
        "nats": {**told, "type": "authorization_response", "version": 2},
    }
    return _signed(issuer, claims, caller.user_key, now_s)


def _signed(issuer: Issuer, claims: dict[str, Any], subject: str, now_s: int) -> str:
    whole = {**claims, "iat": now_s, "iss": issuer.public, "sub": subject}
    return issuer.sign({**whole, "jti": hashlib.sha256(repr(whole).encode()).hexdigest()[:32]})
