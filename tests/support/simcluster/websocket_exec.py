"""`kubectl exec` spoken by hand: Kubernetes' remote command protocol over WebSocket, version 5.

For kubectl older than 1.31, which only knows SPDY.
https://kubernetes.io/docs/reference/using-api/websockets/
"""

import asyncio
import json
from collections.abc import Sequence

import aiohttp

from shared.kubernetes.kubeconfig import ClusterCredentials, tls_context
from shared.kubernetes.paths import pod_path

PROTOCOL = "v5.channel.k8s.io"
STDOUT = 1
STDERR = 2
ERROR = 3


async def websocket_exec(
    credentials: ClusterCredentials, pod: str, command: Sequence[str]
) -> tuple[int, str, str]:
    """Run a command in the pod's first container; return its code, output and errors."""
    query = [*(("command", word) for word in command), ("stdout", "true"), ("stderr", "true")]
    channels = {STDOUT: b"", STDERR: b"", ERROR: b""}
    async with (
        asyncio.timeout(30),
        aiohttp.ClientSession(
            credentials.server,
            headers={"Authorization": f"Bearer {credentials.token}"},
            connector=aiohttp.TCPConnector(ssl=tls_context(credentials)),
        ) as session,
        session.ws_connect(
            f"{pod_path('default', pod)}/exec", params=query, protocols=(PROTOCOL,)
        ) as socket,
    ):
        async for message in socket:
            channels[message.data[0]] += message.data[1:]
    status = json.loads(channels[ERROR])
    causes = status.get("details", {}).get("causes", [])
    code = next((int(c["message"]) for c in causes if c["reason"] == "ExitCode"), 1)
    succeeded = status["status"] == "Success"
    return 0 if succeeded else code, channels[STDOUT].decode(), channels[STDERR].decode()
