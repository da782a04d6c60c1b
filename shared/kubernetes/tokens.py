"""Tokens of service accounts, and the users of bearer tokens."""

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.paths import objects_path


class IssuedToken(msgspec.Struct, frozen=True, rename="camel"):
    token: str
    expiration_timestamp: datetime


class _TokenRequest(msgspec.Struct, frozen=True):
    status: IssuedToken


async def request_token(
    kube: KubernetesClient, namespace: str, account: str, spec: Mapping[str, object]
) -> IssuedToken:
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    path = objects_path(namespace, "serviceaccounts", account)
    return (await kube.create(f"{path}/token", body, _TokenRequest)).status


REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"


class TokenUser(msgspec.Struct, frozen=True):
    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


class TokenStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    user: TokenUser = TokenUser()
    audiences: tuple[str, ...] = ()
    """Empty if the server does not support audiences."""
    error: str = ""


class _TokenReview(msgspec.Struct, frozen=True):
    status: TokenStatus = TokenStatus()


async def review_token(
    kube: KubernetesClient, token: str, audiences: Sequence[str] = ()
) -> TokenStatus:
    """Review for the API server's audiences without others.

    Raises UnavailableError if the API server does not respond.
    """
    spec = {"token": token, **({"audiences": list(audiences)} if audiences else {})}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
    return (await kube.create(REVIEWS, body, _TokenReview)).status
