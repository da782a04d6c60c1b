"""The protocol of NATS' auth callout: which user a token authorizes, with which permissions.

A service's account is authorized as that service. A node agent is authorized as its service and the
node in its token: the API server writes it when it binds the token to a pod there, or to the Node.
The name in the client's CONNECT message matters only where watcher and placer run in the binder's
process, with its account.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from services.auth.nats_users import (
    RESPONSE_S,
    NatsUser,
    operator_user,
    permission_of,
    service_users,
)
from services.auth.nkeys import SERVER, TokenIssuer, verify_claims
from services.topology import OPERATOR, SERVICES, ServiceEntry
from shared.kubernetes.tokens import TokenUser
from shared.model.errors import RequestError
from shared.model.names import NodeName
from shared.nats import subjects

REQUEST_AUDIENCE = "nats-authorization-request"
BINDER = "binder"
SHARING_ITS_ACCOUNT = frozenset({"watcher", "placer", "planner"})
"""Services that may run in the binder's process, with its account: `services.scheduler`."""
NODE_NAME_KEY = "authentication.kubernetes.io/node-name"
"""Key of the node to which a token's pod is bound (since Kubernetes 1.30), or the token itself
(since 1.31)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorizationRequest:
    """A NATS server's request to authorize one connection."""

    server: str
    """The server's id, the audience of the response."""
    user_key: str
    """The key that the server generated for this connection."""
    token: str
    host: str = ""
    """The client's address, as the server sees it."""
    user: str = ""
    """The user that the client names."""
    name: str = ""
    """The name that the client set in its connection, for logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceNamespaces:
    """Namespaces of service accounts: an account of the agents' namespace is only ever an agent."""

    system: str
    agents: str

    def account(self, service: ServiceEntry) -> str:
        namespace = self.agents if service.per_node else self.system
        return f"system:serviceaccount:{namespace}:{service.name}"


class AuthorizationRefusedError(RequestError):
    """The connection is refused; the message is logged here and by the server."""


TokenReviewer = Callable[[str], Awaitable[TokenUser]]
"""Reviews a token. Raises AuthorizationRefusedError if it is not valid."""


def parse_request(request: str) -> AuthorizationRequest:
    """Parse an authorization request. Raises RequestError unless a NATS server has signed it."""
    claims = verify_claims(request, kind=SERVER)
    request_claims = claims.get("nats", {})
    options = request_claims.get("connect_opts", {})
    if claims.get("aud") != REQUEST_AUDIENCE or not request_claims.get("user_nkey"):
        raise RequestError("not an authorization request of a NATS server")
    return AuthorizationRequest(
        server=str(request_claims.get("server_id", {}).get("id", "")),
        user_key=str(request_claims["user_nkey"]),
        token=str(options.get("pass") or options.get("auth_token") or ""),
        host=str(request_claims.get("client_info", {}).get("host", "")),
        user=str(options.get("user", "")),
        name=str(options.get("name", "")),
    )


def user_of_token(reviewed: TokenUser, namespaces: ServiceNamespaces) -> NatsUser:
    """Return the user that a token authorizes. Raises AuthorizationRefusedError if none."""
    account = reviewed.username
    if account == namespaces.account(OPERATOR):
        return operator_user()
    listed = next((service for service in SERVICES if account == namespaces.account(service)), None)
    if listed is None:
        raise AuthorizationRefusedError(f"{account} is not a service account of Leasehold")
    nodes = [NodeName(name) for name in reviewed.extra.get(NODE_NAME_KEY, ()) if name]
    if listed.per_node and len(nodes) != 1:
        raise AuthorizationRefusedError(
            f"the token of {account} does not name its node: it must be from a projected "
            "volume and Kubernetes 1.30 or newer, or bound to a Node (leasehold node-keys) and "
            "Kubernetes 1.31 or newer"
        )
    (user,) = service_users([listed], nodes)
    return user


def user_of_client(user: NatsUser, named: str, *, combined_scheduler: bool) -> NatsUser:
    """Return the user of a connection with the token of `user` whose client names another.

    A client with the token of the binder is authorized as the service that it names, if that may
    run in the binder's process. Raises AuthorizationRefusedError where it does not: as binder it
    could not do its work, and it tries again until it is authorized.
    """
    if user.name != BINDER or named not in SHARING_ITS_ACCOUNT:
        return user
    if not combined_scheduler:
        raise AuthorizationRefusedError(
            f"the token of the binder authorizes no {named} without --combined-scheduler"
        )
    (service_user,) = service_users((service for service in SERVICES if service.name == named), [])
    return service_user


def encode_grant(
    issuer: TokenIssuer, request: AuthorizationRequest, user: NatsUser, *, now_s: int, life_s: int
) -> str:
    """Return the response that authorizes a connection as a user, until `now_s + life_s`."""
    claims = {
        "aud": subjects.ACCOUNT,
        "exp": now_s + life_s,
        "name": user.name,
        "nats": {
            "pub": permission_of(user.publish),
            "sub": permission_of(user.subscribe),
            **({"resp": {"max": 1, "ttl": RESPONSE_S * 10**9}} if user.only_responds else {}),
            "subs": -1,
            "data": -1,
            "payload": -1,
            "type": "user",
            "version": 2,
        },
    }
    token = _sign(issuer, claims, request.user_key, now_s)
    return _encode_response(issuer, request, {"jwt": token}, now_s)


def encode_refusal(
    issuer: TokenIssuer, request: AuthorizationRequest, reason: str, *, now_s: int
) -> str:
    return _encode_response(issuer, request, {"error": reason}, now_s)


def _encode_response(
    issuer: TokenIssuer, request: AuthorizationRequest, outcome: dict[str, str], now_s: int
) -> str:
    claims = {
        "aud": request.server,
        "nats": {**outcome, "type": "authorization_response", "version": 2},
    }
    return _sign(issuer, claims, request.user_key, now_s)


def _sign(issuer: TokenIssuer, claims: dict[str, Any], subject: str, now_s: int) -> str:
    complete = {**claims, "iat": now_s, "iss": issuer.public, "sub": subject}
    return issuer.sign(
        {**complete, "jti": hashlib.sha256(repr(complete).encode()).hexdigest()[:32]}
    )
