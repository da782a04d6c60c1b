"""Pods and webhook configurations for the tests of admission."""

from typing import Any

from simcluster.apimachinery.objects import Json
from tests.support.simcluster.admission_webhook import configuration
from tests.support.simcluster.apiserver import Client, create

CONFIGS = "/apis/admissionregistration.k8s.io/v1"


def rule(*resources: str, group: str = "", version: str = "v1", **more: Any) -> Json:
    return {"operations": ["*"], "apiGroups": [group], "apiVersions": [version],
            "resources": list(resources), **more}  # fmt: skip


async def assert_installed(client: Client, kind: str, *hooks: Json, name: str = "a") -> None:
    url = f"{CONFIGS}/{kind.lower()}webhookconfigurations"
    await create(client, url, configuration(kind, name, *hooks))
