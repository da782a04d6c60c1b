"""`leasehold node-keys`: tokens of a node agent without a pod, bound to its Node object.

Each file is replaced atomically, and its users read it again; only an existing kubeconfig stays.
"""

import asyncio
import base64
import platform
from datetime import UTC, datetime, timedelta
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
API_TOKEN = "api-token"  # noqa: S105 - the name of a file
NATS_TOKEN = "nats-token"  # noqa: S105
NATS_AUTHORITY = "nats-ca.crt"
KUBECONFIG = "kubeconfig"


def node_keys(flags: NodeKeys) -> int:
    credentials = load_credentials(flags.kubeconfig)
    node = flags.node or platform.node().lower()
    requested_at = datetime.now(UTC)
    life = timedelta(days=flags.days)
    files, expires_at = asyncio.run(_request_files(credentials, flags.namespace, node, life))
    if not (flags.out / KUBECONFIG).exists():
        files[KUBECONFIG] = kubeconfig(credentials)
    try:
        for name, text in files.items():
            write_private(flags.out / name, text.encode())
    except OSError as error:
        raise RequestError(f"{error.filename} cannot be written: {error.strerror}") from error
    print(f"{flags.out}: tokens of node {node}, valid until {expires_at:%Y-%m-%d %H:%M} UTC")
    if expires_at < requested_at + life - timedelta(hours=1):
        hours = (expires_at - requested_at) / timedelta(hours=1)
        print(
            f"The API server issues tokens for at most {hours:.0f} hours "
            "(--service-account-max-token-expiration): renew them in less than half of that"
        )
    return 0


async def _request_files(
    credentials: ClusterCredentials, namespace: str, node: str, life: timedelta
) -> tuple[dict[str, str], datetime]:
    """Return contents by file, and when the first token expires. Raises RequestError."""
    async with KubernetesClient(credentials) as kubernetes:

        async def token(**audiences: list[str]) -> IssuedToken:
            bound = {"apiVersion": "v1", "kind": "Node", "name": node}
            life_s = int(life.total_seconds())
            spec = {"boundObjectRef": bound, "expirationSeconds": life_s, **audiences}
            return await request_token(kubernetes, namespace, ACCOUNT, spec)

        try:
            api = await token()
            nats = await token(audiences=[NATS_AUDIENCE])
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
    files = {NATS_AUTHORITY: authority, NATS_TOKEN: nats.token, API_TOKEN: api.token}
    return files, min(api.expiration_timestamp, nats.expiration_timestamp)


def kubeconfig(credentials: ClusterCredentials) -> str:
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
