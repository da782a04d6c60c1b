"""What an API server enforces for Leasehold: its webhooks and its admission policies.

They are the files in `manifests`, which `k8s/base` installs, too.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import yaml

from shared.model.errors import RequestError

NAME = "leasehold"
PATH = "/mutate"
EXEMPT_PATH = "/mutate-exempt"
ALL_PODS_PATH = "/mutate-all-pods"
CLAIMS_PATH = "/mutate-claims"
ALLOCATIONS_PATH = "/lease-allocation"
CLAIMS_WEBHOOK = "claims.pods.leasehold.dev"
"""Where ResourceClaims are served."""

Manifest = dict[str, Any]
_WEBHOOKS = "webhook-configuration.yaml"


def configuration(clients: Mapping[str, Mapping[str, str]] = MappingProxyType({})) -> Manifest:
    """`clients` has the `clientConfig` of webhooks that are behind no Service."""
    (made,), (claims,) = map(_objects, (_WEBHOOKS, f"claims/{_WEBHOOKS}"))
    hooks = [*made["webhooks"], *claims["webhooks"]]
    for hook in hooks:
        hook["clientConfig"] = clients.get(hook["name"], hook["clientConfig"])
    return made | {"webhooks": hooks}


@cache
def webhook_paths() -> Mapping[str, str]:
    hooks = configuration()["webhooks"]
    return {hook["name"]: hook["clientConfig"]["service"]["path"] for hook in hooks}


def admission_policies() -> list[Manifest]:
    return [*_objects("annotation-policy.yaml"), *_objects("service-policies.yaml")]


def _objects(file: str) -> list[Manifest]:
    text = Path(__file__).with_name("manifests").joinpath(file).read_text()
    return list(yaml.safe_load_all(text))


def registered_url(url: str, port: int) -> str:
    """Return `url`, with `port` if it has none. Raises RequestError."""
    parts = urlsplit(url)
    try:
        has_port = parts.port is not None
    except ValueError as error:
        raise RequestError(f"--url {url!r}: {error}") from error
    if parts.scheme != "https" or not parts.hostname:
        raise RequestError(f"--url {url!r} is not https://HOST or https://HOST:PORT")
    address = parts.netloc if has_port else f"{parts.netloc}:{port}"
    return f"https://{address}{parts.path.rstrip('/')}"
