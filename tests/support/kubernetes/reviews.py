"""Who may what, as an API server would say it in TokenReviews and SubjectAccessReviews."""

import contextlib
import json
from collections.abc import AsyncIterator

from aiohttp import web

from shared.credentials.authorization import KubernetesAuthenticator
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.runtime import health
from shared.runtime.bodies import BODY
from tests.support.clock import FakeClock


class Reviews:
    """An API server that answers reviews: the users of tokens, and where they may get pods."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.rights = {"root": {""}, "member": {"default"}, "stranger": set[str]()}
        self.grants = {"root"}
        self.resizers = {"root"}

    async def token(self, request: web.Request) -> web.Response:
        body = json.loads(request[BODY])
        name = body["spec"]["token"].removeprefix("token-of-")
        allowed = name in self.rights
        user = {"username": name, "uid": "1", "groups": ["system:authenticated"]}
        status = {"authenticated": allowed, **({"user": user} if allowed else {})}
        return web.json_response({**body, "status": status}, status=201)

    async def access(self, request: web.Request) -> web.Response:
        body = json.loads(request[BODY])
        requests = body["spec"]["resourceAttributes"]
        assert body["spec"]["groups"] == ["system:authenticated"]
        if requests.get("subresource") == "grants":
            assert (requests["verb"], requests["group"]) == ("create", "leasehold.dev")
            allowed = body["spec"]["user"] in self.grants
            return web.json_response({**body, "status": {"allowed": allowed}}, status=201)
        if requests.get("subresource") == "resize":
            assert (requests["verb"], requests["resource"]) == ("patch", "pods")
            allowed = body["spec"]["user"] in self.resizers
            return web.json_response({**body, "status": {"allowed": allowed}}, status=201)
        assert (requests["verb"], requests["resource"]) == ("get", "pods")
        self.requests.append(f"{body['spec']['user']}:{requests['namespace']}")
        allowed = requests["namespace"] in self.rights[body["spec"]["user"]]
        return web.json_response({**body, "status": {"allowed": allowed}}, status=201)

    def application(self) -> web.Application:
        pages = web.Application()
        authentication = "authentication.k8s.io/v1"
        authorization = "authorization.k8s.io/v1"
        pages.router.add_post(f"/apis/{authentication}/tokenreviews", self.token)
        pages.router.add_post(f"/apis/{authorization}/subjectaccessreviews", self.access)
        return pages


@contextlib.asynccontextmanager
async def reviewed(reviews: Reviews, clock: FakeClock) -> AsyncIterator[KubernetesAuthenticator]:
    async with (
        health.served(reviews.application(), "127.0.0.1:0") as address,
        KubernetesClient(ClusterCredentials(server=f"http://{address}")) as kube,
    ):
        yield KubernetesAuthenticator(kube, clock)
