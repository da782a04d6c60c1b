"""What a simulated cluster installs before it serves."""

from pathlib import Path

import msgspec
import pytest

from services.cli.up.installation import agent_account, installation
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import read_kubeconfig
from shared.model.errors import RequestError
from simcluster.apiserver.kinds.service_account_tokens import ServiceAccountTokens
from simcluster.installation import Installation
from tests.support.simcluster.apiserver import ApiUnderTest, api_server

POLICIES = "validatingadmissionpolicies"
NODE = "/api/v1/nodes"
PATCH = {"metadata": {"annotations": {"volcano.sh/node-vgpu-register": "x"}}}


def installed(api: ApiUnderTest, directory: Path) -> None:
    nodes = ("node-0", "node-1")
    described = installation(str(directory), nodes, policies=True, aggregated="127.0.0.1:8443")
    installed = msgspec.convert(described, Installation)
    installed.create_objects(api.store)
    tokens = ServiceAccountTokens(api.store, api.token)
    installed.write_kubeconfigs(tokens, api.url, api.ca.read_bytes())


async def test_the_account_of_an_agent_is_that_of_its_node(tmp_path: Path) -> None:
    async with api_server() as api:
        for name in ("node-0", "node-1"):
            api.store.create("nodes", {"metadata": {"name": name}})
        installed(api, tmp_path)
        credentials = read_kubeconfig(tmp_path / agent_account("node-0"))
        async with KubernetesClient(credentials) as agent:
            await agent.patch_merge(f"{NODE}/node-0", PATCH)
            with pytest.raises(RequestError, match="writes only for its own"):
                await agent.patch_merge(f"{NODE}/node-1", PATCH)


async def test_a_later_release_replaces_what_an_earlier_one_installed(tmp_path: Path) -> None:
    async with api_server() as api:
        installed(api, tmp_path)
        first = api.store.list(POLICIES)
        changed = {
            **first[0],
            "spec": {**first[0]["spec"], "validations": [{"expression": "true"}]},
        }
        api.store.update(POLICIES, changed)
        installed(api, tmp_path)
        again = api.store.list(POLICIES)

    assert [obj["spec"] for obj in again] == [obj["spec"] for obj in first]
