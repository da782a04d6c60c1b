"""TokenReview: the user of a bearer token."""

from collections.abc import Sequence

import msgspec

from shared.kubernetes.client import KubernetesClient

REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"


class TokenUser(msgspec.Struct, frozen=True):
    """The user of a token."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


class TokenStatus(msgspec.Struct, frozen=True):
    """Status of a TokenReview."""

    authenticated: bool = False
    user: TokenUser = TokenUser()
    audiences: tuple[str, ...] = ()
    """The accepted audiences; empty if the server does not support audiences."""
    error: str = ""


class _TokenReview(msgspec.Struct, frozen=True):
    status: TokenStatus = TokenStatus()


async def review_token(
    kube: KubernetesClient, token: str, audiences: Sequence[str] = ()
) -> TokenStatus:
    """Review a token for one of the audiences; none: those of the API server.

    Raises UnavailableError if the API server does not respond.
    """
    spec = {"token": token, **({"audiences": list(audiences)} if audiences else {})}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
    return (await kube.create(REVIEWS, body, _TokenReview)).status
