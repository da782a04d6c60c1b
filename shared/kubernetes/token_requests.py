"""TokenRequest: a token of a service account."""

from collections.abc import Mapping
from datetime import datetime
from urllib.parse import quote

import msgspec

from shared.kubernetes.client import KubernetesClient


class IssuedToken(msgspec.Struct, frozen=True, rename="camel"):
    """A token, and when it expires."""

    token: str
    expiration_timestamp: datetime


class _TokenRequest(msgspec.Struct, frozen=True):
    status: IssuedToken


async def request_token(
    kube: KubernetesClient, namespace: str, account: str, spec: Mapping[str, object]
) -> IssuedToken:
    """Request a token of a service account, with the `spec` of a TokenRequest."""
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    accounts = f"/api/v1/namespaces/{quote(namespace, safe='')}/serviceaccounts"
    path = f"{accounts}/{quote(account, safe='')}/token"
    return (await kube.create(path, body, _TokenRequest)).status
