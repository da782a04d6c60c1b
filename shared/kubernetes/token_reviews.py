"""Whose bearer token it is, as the API server says."""

from collections.abc import Sequence

import msgspec

from shared.kubernetes.client import KubernetesClient

REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"


class TokenUser(msgspec.Struct, frozen=True):
    """Who bears a token."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


class TokenStatus(msgspec.Struct, frozen=True):
    """What the API server says of a token."""

    authenticated: bool = False
    user: TokenUser = TokenUser()
    audiences: tuple[str, ...] = ()
    """For which of those asked for it is; none where the server does not know audiences."""
    error: str = ""


class _TokenReview(msgspec.Struct, frozen=True):
    status: TokenStatus = TokenStatus()


async def review_token(
    kube: KubernetesClient, token: str, audiences: Sequence[str] = ()
) -> TokenStatus:
    """Ask whose token it is, for one of the audiences; none: the API server's own.

    Raises UnavailableError if the API server does not answer.
    """
    spec = {"token": token, **({"audiences": list(audiences)} if audiences else {})}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
    return (await kube.create(REVIEWS, body, _TokenReview)).status
