"""The part of an API server that the auth service needs: objects by name, and token reviews."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from services.auth.auth_callout import NODE_NAME_KEY
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from shared.runtime import health
from shared.runtime.bodies import BODY
from tests.support.simcluster.installed import namespace_of

AUDIENCE = "leasehold-nats"
SECRETS = (
    *("auth", "auth-nats", "auth-redis", "auth-extender", "auth-kube-scheduler", "auth-api"),
    *(f"redis-{user}" for user in ("placer", "planner", "binder", "timekeeper", "api", "operator")),
    "redis-extender",
)
Json = dict[str, Any]


class AuthCluster:
    """Secrets and a ConfigMap, installed empty; a write must name the version that was read."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Json] = {
            **{("secrets", name): {} for name in SECRETS},
            ("configmaps", "auth-ca"): {},
            ("configmaps", "node-agent-ca"): {},
        }
        self.versions = dict.fromkeys(self.objects, 1)
        self.tokens: dict[str, Json] = {}
        self.reviews = 0
        self.url = ""

    def issue_token(
        self,
        account: str,
        *,
        node: str = "",
        namespace: str = "",
        audience: str = AUDIENCE,
    ) -> str:
        """Issue a token of a service account's pod, on a node, in the namespace that it is in."""
        namespace = namespace or namespace_of(account)
        token = f"token-{len(self.tokens)}-{account}-{node}"
        extra = {NODE_NAME_KEY: [node]} if node else {}
        self.tokens[token] = {
            "audience": audience,
            "user": {"username": f"system:serviceaccount:{namespace}:{account}", "extra": extra},
        }
        return token

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[KubernetesClient]:
        """Serve, and yield a client."""
        app = web.Application()
        path = "/api/v1/namespaces/{namespace}/{kind}/{name}"
        app.router.add_get(path, self._read)
        app.router.add_patch(path, self._patch)
        app.router.add_post("/apis/authentication.k8s.io/v1/tokenreviews", self._review)
        async with health.served(app, "127.0.0.1:0") as address:
            self.url = f"http://{address}"
            async with KubernetesClient(ClusterCredentials(server=self.url)) as kube:
                yield kube

    async def _read(self, request: web.Request) -> web.Response:
        key = self._key(request)
        if key not in self.objects:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        return web.json_response(self._shape(key))

    def _key(self, request: web.Request) -> tuple[str, str]:
        """Return the kind and name of the object of a path, which is in its namespace."""
        kind = request.match_info["kind"]
        name = request.match_info["name"]
        in_agents = (kind, name) == ("configmaps", "node-agent-ca")
        expected = AGENTS_NAMESPACE if in_agents else SYSTEM_NAMESPACE
        return (kind, name) if request.match_info["namespace"] == expected else (kind, "")

    async def _patch(self, request: web.Request) -> web.Response:
        key = self._key(request)
        body = json.loads(request[BODY])
        if body["metadata"]["resourceVersion"] != str(self.versions[key]):
            conflict = {"kind": "Status", "code": 409, "reason": "Conflict", "message": "changed"}
            return web.json_response(conflict, status=409)
        self.objects[key] |= body["data"]
        self.versions[key] += 1
        return web.json_response(self._shape(key))

    def _shape(self, key: tuple[str, str]) -> Json:
        version = str(self.versions[key])
        shape: Json = {"metadata": {"name": key[1], "uid": key[1], "resourceVersion": version}}
        return shape | ({"data": self.objects[key]} if self.objects[key] else {})

    async def _review(self, request: web.Request) -> web.Response:
        self.reviews += 1
        spec = json.loads(request[BODY])["spec"]
        user = self.tokens.get(spec["token"])
        if user is None or user["audience"] not in spec["audiences"]:
            status: Json = {"authenticated": False, "error": "token is not for this audience"}
        else:
            audiences = [user["audience"]]
            status = {"authenticated": True, "user": user["user"], "audiences": audiences}
        return web.json_response({"status": status})
