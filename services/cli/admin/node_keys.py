"""`leasehold node-keys`: tokens of a node agent without a pod, bound to its Node object.

    DIR/api-token      for the API server and the kubelet, --kubelet-token-file
    DIR/nats-token     for NATS, --nats-token-file
    DIR/nats-ca.crt    for --nats-ca-file
    DIR/kubeconfig     names api-token; written once, for --kubeconfig

Each file is replaced atomically, and its users read it again.
"""

import asyncio
import base64
import platform
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from services.cli.commands import NodeKeys
from shared.credentials.logins import write_private
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.errors import NotFoundError, UnauthorizedError
from shared.kubernetes.kubeconfig import ClusterCredentials, load_credentials
from shared.kubernetes.paths import objects_path
from shared.kubernetes.tokens import IssuedToken, request_token
from shared.kubernetes.types import RawObject
from shared.model.errors import RequestError

ACCOUNT = "node-agent"
NATS_AUDIENCE = "leasehold-nats"
AUTHORITY_CONFIG_MAP = "node-agent-ca"
AUTHORITY = "ca.crt"
API_TOKEN, NATS_TOKEN, NATS_AUTHORITY, KUBECONFIG = (
    "api-token", "nats-token", "nats-ca.crt", "kubeconfig"
)  # fmt: skip
DAY_S = 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTokens:
    """The tokens of one node's agent."""

    api_token: str
    nats_token: str
    nats_authority: str
    expires_at: datetime
    """When the first of the tokens expires."""


def node_keys(flags: NodeKeys) -> int:
    """Run the command."""
    credentials, node = load_credentials(flags.kubeconfig), flags.node or platform.node().lower()
    requested_at = datetime.now(UTC)
    life_s = flags.days * DAY_S
    tokens = asyncio.run(_request_tokens(credentials, flags.namespace, node, life_s))
    write(flags.out, tokens, credentials)
    expires_at = f"{tokens.expires_at:%Y-%m-%d %H:%M} UTC"
    print(f"{flags.out}: tokens of node {node}, valid until {expires_at}")
    if tokens.expires_at < requested_at + timedelta(days=flags.days, seconds=-DAY_S // 24):
        hours = (tokens.expires_at - requested_at) / timedelta(hours=1)
        print(
            f"The API server issues tokens for at most {hours:.0f} hours "
            "(--service-account-max-token-expiration): renew them in less than half of that"
        )
    return 0


async def _request_tokens(
    credentials: ClusterCredentials, namespace: str, node: str, life_s: int
) -> NodeTokens:
    """Request the tokens from the API server. Raises RequestError with what to do if it refuses."""
    async with KubernetesClient(credentials) as kubernetes:

        async def token(audiences: list[str]) -> IssuedToken:
            bound = {"apiVersion": "v1", "kind": "Node", "name": node}
            spec: dict[str, Any] = {"boundObjectRef": bound, "expirationSeconds": life_s}
            if audiences:
                spec["audiences"] = audiences
            return await request_token(kubernetes, namespace, ACCOUNT, spec)

        try:
            api, nats = await token([]), await token([NATS_AUDIENCE])
            path = objects_path(namespace, "configmaps", AUTHORITY_CONFIG_MAP)
            config_map = await kubernetes.read(path, RawObject)
        except NotFoundError as error:
            raise RequestError(
                f"{error}: is --node right, and is Leasehold installed in that namespace?"
            ) from error
        except UnauthorizedError as error:
            raise RequestError(
                f"{error}. A token that has expired, or whose Node was deleted, cannot renew "
                "itself: run this command as an administrator, and copy the directory to the node"
            ) from error
    authority = (config_map.data or {}).get(AUTHORITY, "")
    if not authority:
        raise RequestError(
            f"ConfigMap {AUTHORITY_CONFIG_MAP} of {namespace} has no {AUTHORITY}: "
            "does the auth service run?"
        )
    return NodeTokens(
        api_token=api.token,
        nats_token=nats.token,
        nats_authority=authority,
        expires_at=min(api.expiration_timestamp, nats.expiration_timestamp),
    )


def write(out: Path, tokens: NodeTokens, credentials: ClusterCredentials) -> None:
    """Write everything; an existing kubeconfig stays. Raises RequestError if it cannot write."""
    files = {
        NATS_AUTHORITY: tokens.nats_authority,
        NATS_TOKEN: tokens.nats_token,
        API_TOKEN: tokens.api_token,
    }
    if not (out / KUBECONFIG).exists():
        files[KUBECONFIG] = kubeconfig(credentials)
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in files.items():
            write_private(out / name, text.encode())
    except OSError as error:
        raise RequestError(f"{error.filename} cannot be written: {error.strerror}") from error


def kubeconfig(credentials: ClusterCredentials) -> str:
    """Return a kubeconfig for the same API server whose user has the token in this directory."""
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
