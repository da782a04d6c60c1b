"""Pods and webhook configurations for the tests of admission."""

from typing import Any

import aiohttp

from simcluster.apimachinery.objects import Json
from tests.support.simcluster.admission_webhook import (
    configuration,
)

PODS = "/api/v1/namespaces/default/pods"
CONFIGS = "/apis/admissionregistration.k8s.io/v1"
MERGE = {"Content-Type": "application/merge-patch+json"}


def a_pod(name: str = "web", **labels: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **({"labels": labels} if labels else {})},
        "spec": {"containers": [{"name": "main", "image": "example/image:1"}]},
    }


def rule(*resources: str, group: str = "", version: str = "v1", **more: Any) -> Json:
    return {"operations": ["*"], "apiGroups": [group], "apiVersions": [version],
            "resources": list(resources), **more}  # fmt: skip


async def assert_installed(
    client: aiohttp.ClientSession, kind: str, *hooks: Json, name: str = "a"
) -> None:
    url = f"{CONFIGS}/{kind.lower()}webhookconfigurations"
    response = await client.post(url, json=configuration(kind, name, *hooks))
    assert response.status == 201, await response.text()


async def assert_refused(response: aiohttp.ClientResponse, code: int) -> str:
    body = await response.json()
    assert response.status == code, body
    return str(body["message"])
