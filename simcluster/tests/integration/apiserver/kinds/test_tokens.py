"""Tokens of service accounts: requests, reviews and expiry."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from simcluster.apiserver.kinds.service_account_tokens import AUDIENCE
from tests.support.kubernetes.kubectl import Kubectl
from tests.support.simcluster.apiserver import ApiUnderTest, api_server

Json = dict[str, Any]
ACCOUNTS = "/api/v1/namespaces/default/serviceaccounts"
REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
EXTRA = "authentication.kubernetes.io"


@dataclass
class Issuing:
    """An API server with an account, a node and a pod on it."""

    api: ApiUnderTest
    session: aiohttp.ClientSession
    now_s: float = 1_800_000_000.0

    async def request(
        self, kind: str = "", name: str = "", account: str = "agent", **spec: Any
    ) -> tuple[int, Json]:
        if kind:
            bound = {"apiVersion": "v1", "kind": kind, "name": name}
            spec["boundObjectRef"] = bound | spec.pop("ref", {})
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        async with self.session.post(f"{ACCOUNTS}/{account}/token", json=body) as answer:
            return answer.status, await answer.json()

    async def assert_issued(self, kind: str = "", name: str = "", **spec: Any) -> str:
        code, answer = await self.request(kind, name, **spec)
        assert code == 201, answer
        return str(answer["status"]["token"])

    async def assert_reviewed(self, token: str, *audiences: str) -> Json:
        body = {"spec": {"token": token, **({"audiences": audiences} if audiences else {})}}
        async with self.session.post(REVIEWS, json=body) as answer:
            assert answer.status == 201
            status: Json = (await answer.json())["status"]
            return status

    async def assert_refused(self, token: str, *audiences: str) -> str:
        status = await self.assert_reviewed(token, *audiences)
        assert not status["authenticated"]
        return str(status["error"])


@pytest.fixture
async def issuing() -> AsyncIterator[Issuing]:
    async with api_server() as api, api.client() as session:
        issuer = Issuing(api, session)
        api.store.clock = lambda: issuer.now_s
        api.store.create("serviceaccounts", {"metadata": {"name": "agent", "namespace": "default"}})
        api.store.create("nodes", {"metadata": {"name": "gpu-1"}})
        spec = {"serviceAccountName": "agent", "nodeName": "gpu-1",
                "containers": [{"name": "main", "image": "app"}]}  # fmt: skip
        api.store.create("pods", {"metadata": {"name": "p", "namespace": "default"}, "spec": spec})
        yield issuer


async def test_a_token_bound_to_a_node_names_it_until_the_node_is_deleted(issuing: Issuing) -> None:
    token = await issuing.assert_issued("Node", "gpu-1", audiences=["nats"])
    uid = issuing.api.store.read("nodes", None, "gpu-1")["metadata"]["uid"]

    status = await issuing.assert_reviewed(token, "other", "nats")
    issuing.api.store.delete("nodes", None, "gpu-1")
    error = await issuing.assert_refused(token, "nats")
    issuing.api.store.create("nodes", {"metadata": {"name": "gpu-1"}})
    made_anew = await issuing.assert_refused(token, "nats")

    assert status["authenticated"]
    assert status["audiences"] == ["nats"]
    assert status["user"]["username"] == "system:serviceaccount:default:agent"
    assert "system:serviceaccounts:default" in status["user"]["groups"]
    extra = status["user"]["extra"]
    assert (extra[f"{EXTRA}/node-name"], extra[f"{EXTRA}/node-uid"]) == (["gpu-1"], [uid])
    assert f"{EXTRA}/pod-name" not in extra
    assert "service account token has been invalidated" in error
    assert "does not match service account node ref claim" in made_anew


async def test_a_token_bound_to_a_pod_names_pod_and_node_and_outlives_only_the_node(
    issuing: Issuing,
) -> None:
    token = await issuing.assert_issued("Pod", "p")

    issuing.api.store.delete("nodes", None, "gpu-1")
    extra = (await issuing.assert_reviewed(token))["user"]["extra"]
    issuing.api.store.delete("pods", "default", "p", grace_s=0)
    error = await issuing.assert_refused(token)

    assert extra[f"{EXTRA}/pod-name"] == ["p"]
    assert extra[f"{EXTRA}/node-name"] == ["gpu-1"]
    assert "has been invalidated" in error


async def test_an_unbound_token_names_no_node(issuing: Issuing) -> None:
    status = await issuing.assert_reviewed(await issuing.assert_issued())

    assert status["authenticated"]
    assert status["audiences"] == [AUDIENCE]
    assert list(status["user"]["extra"]) == [f"{EXTRA}/credential-id"]


async def test_a_token_is_valid_for_its_audiences_its_lifetime_and_its_account_only(
    issuing: Issuing,
) -> None:
    token = await issuing.assert_issued(audiences=["nats"], expirationSeconds=600)

    other = await issuing.assert_refused(token)
    forged = await issuing.assert_refused(token[:-4] + "AAAA", "nats")
    nonsense = await issuing.assert_refused("made-up", "nats")
    issuing.now_s += 599
    good = await issuing.assert_reviewed(token, "nats")
    issuing.now_s += 1
    late = await issuing.assert_refused(token, "nats")
    fresh = await issuing.assert_issued(audiences=["nats"])
    issuing.api.store.delete("serviceaccounts", "default", "agent")
    orphaned = await issuing.assert_refused(fresh, "nats")

    assert f'token audiences ["nats"] is invalid for the target audiences ["{AUDIENCE}"]' in other
    assert (forged, nonsense) == ("invalid bearer token", "invalid bearer token")
    assert good["authenticated"]
    assert "service account token has expired" in late
    assert 'serviceaccounts "agent" not found' in orphaned


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"account": "unknown"}, 404, 'serviceaccounts "unknown" not found'),
        ({"kind": "Node", "name": "gpu-9"}, 404, 'nodes "gpu-9" not found'),
        ({"kind": "Node", "name": "gpu-1", "ref": {"uid": "x"}}, 409, "deleted and then recreated"),
        ({"kind": "ConfigMap", "name": "x"}, 400, "cannot bind token to object of type"),
        ({"kind": "Pod", "name": "p", "account": "default"}, 400, "different serviceaccount name"),
        ({"expirationSeconds": 599}, 422, "may not specify a duration less than 10 minutes"),
        ({"expirationSeconds": 2**32 + 1}, 422, "may not specify a duration larger than 2^32"),
    ],
)
async def test_invalid_token_requests_are_refused_with_the_reason(
    issuing: Issuing, fields: Json, code: int, text: str
) -> None:
    status, body = await issuing.request(**fields)

    assert status == code
    assert text in body["message"]


async def test_only_tokens_for_the_api_server_authenticate(issuing: Issuing) -> None:
    good = await issuing.assert_issued("Node", "gpu-1")
    other = await issuing.assert_issued(audiences=["nats"])

    codes = []
    for token in (good, other, "", "made-up"):
        headers = {"Authorization": f"Bearer {token}"}
        async with issuing.session.get("/api/v1/nodes", headers=headers) as answer:
            codes.append(answer.status)

    assert codes == [403, 401, 401, 401], "the first is known, and has no role"


@pytest.mark.kubectl
async def test_kubectl_creates_a_token_that_is_bound_to_a_node(
    issuing: Issuing, tmp_path: Path
) -> None:
    binary = shutil.which("kubectl")
    if binary is None:
        pytest.skip("no kubectl in PATH: install it to run this test")
    output = await Kubectl(binary, issuing.api, tmp_path).run(
        "create token agent --audience nats --duration 48h "
        "--bound-object-kind Node --bound-object-name gpu-1"
    )

    status = await issuing.assert_reviewed(output.strip(), "nats")

    assert status["user"]["extra"][f"{EXTRA}/node-name"] == ["gpu-1"]
