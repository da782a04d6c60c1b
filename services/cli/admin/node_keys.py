"""`leasehold node-keys`: what a node agent without a pod shows, bound to its Node object.

    DIR/api-token      for the API server and the kubelet, --kubelet-token-file
    DIR/nats-token     for NATS, --nats-token-file
    DIR/nats-ca.crt    for --nats-ca-file
    DIR/kubeconfig     names api-token; written once, for --kubeconfig

Each file is replaced as a whole, and whoever uses it reads it again.
"""

import argparse
import asyncio
import base64
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import yaml

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError, UnauthorizedError
from shared.kubernetes.kubeconfig import ClusterCredentials, load_credentials
from shared.model.errors import RequestError

ACCOUNT = "node-agent"
NATS_AUDIENCE = "leasehold-nats"
AUTHORITY_CONFIG_MAP = "auth-ca"
AUTHORITY = "ca.crt"
API_TOKEN, NATS_TOKEN, NATS_AUTHORITY, KUBECONFIG = (
    "api-token", "nats-token", "nats-ca.crt", "kubeconfig"
)  # fmt: skip
DAY_S = 24 * 3600


class _Status(msgspec.Struct, rename="camel"):
    token: str
    expiration_timestamp: datetime


class _TokenRequest(msgspec.Struct):
    status: _Status


class _ConfigMap(msgspec.Struct):
    data: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKeys:
    """What was given for a node."""

    api_token: str
    nats_token: str
    nats_authority: str
    ends_at: datetime
    """When the first of the tokens expires."""


def node_keys(flags: argparse.Namespace) -> int:
    """Run the command."""
    if flags.days < 1:
        raise RequestError(f"--days {flags.days}: at least 1 is wanted")
    credentials = load_credentials(Path(flags.kubeconfig) if flags.kubeconfig else None)
    began = datetime.now(UTC)
    keys = asyncio.run(_ask(credentials, flags.namespace, flags.node, flags.days * DAY_S))
    out = Path(flags.out)
    write(out, keys, credentials)
    print(f"{out}: tokens of node {flags.node}, good until {keys.ends_at:%Y-%m-%d %H:%M} UTC")
    if keys.ends_at < began + timedelta(days=flags.days, seconds=-DAY_S // 24):
        hours = (keys.ends_at - began) / timedelta(hours=1)
        print(
            f"The API server gives no more than {hours:.0f} hours "
            "(--service-account-max-token-expiration): renew them in less than half of that"
        )
    return 0


async def _ask(credentials: ClusterCredentials, namespace: str, node: str, life_s: int) -> NodeKeys:
    """Ask the API server. Raises RequestError, saying what to do, where it does not give them."""
    base = f"/api/v1/namespaces/{quote(namespace, safe='')}"
    async with KubernetesClient(credentials) as kube:

        async def token(audiences: list[str]) -> _Status:
            bound = {"apiVersion": "v1", "kind": "Node", "name": node}
            spec: dict[str, Any] = {"boundObjectRef": bound, "expirationSeconds": life_s}
            if audiences:
                spec["audiences"] = audiences
            body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
            path = f"{base}/serviceaccounts/{ACCOUNT}/token"
            return (await kube.create(path, body, _TokenRequest)).status

        try:
            api, nats = await token([]), await token([NATS_AUDIENCE])
            doors = await kube.read(f"{base}/configmaps/{AUTHORITY_CONFIG_MAP}", _ConfigMap)
        except NotFoundError as error:
            raise RequestError(
                f"{error}: is --node right, and is Leasehold installed in that namespace?"
            ) from error
        except UnauthorizedError as error:
            raise RequestError(
                f"{error}. Tokens that have expired, or whose Node was deleted, renew nothing: run "
                "this command as an administrator, and copy the directory to the node"
            ) from error
    authority = (doors.data or {}).get(AUTHORITY, "")
    if not authority:
        raise RequestError(
            f"ConfigMap {AUTHORITY_CONFIG_MAP} of {namespace} has no {AUTHORITY}: "
            "does the auth service run?"
        )
    return NodeKeys(
        api_token=api.token,
        nats_token=nats.token,
        nats_authority=authority,
        ends_at=min(api.expiration_timestamp, nats.expiration_timestamp),
    )


def write(out: Path, keys: NodeKeys, credentials: ClusterCredentials) -> None:
    """Write everything; a kubeconfig that is there stays. Raises RequestError if it cannot be."""
    files = {
        NATS_AUTHORITY: keys.nats_authority,
        NATS_TOKEN: keys.nats_token,
        API_TOKEN: keys.api_token,
    }
    if not (out / KUBECONFIG).exists():
        files[KUBECONFIG] = kubeconfig(credentials)
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in files.items():
            _replace(out / name, text)
    except OSError as error:
        raise RequestError(f"{error.filename} cannot be written: {error.strerror}") from error


def kubeconfig(credentials: ClusterCredentials) -> str:
    """Return a kubeconfig for the same API server whose user is the token beside it."""
    cluster: dict[str, Any] = {"server": credentials.server}
    if credentials.ca_pem:
        authority = base64.b64encode(credentials.ca_pem.encode()).decode()
        cluster["certificate-authority-data"] = authority
    if credentials.tls_server_name:
        cluster["tls-server-name"] = credentials.tls_server_name
    if credentials.insecure_skip_tls_verify:
        cluster["insecure-skip-tls-verify"] = True
    name = "leasehold"
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": name, "user": {"tokenFile": API_TOKEN}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        },
        sort_keys=False,
    )


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
