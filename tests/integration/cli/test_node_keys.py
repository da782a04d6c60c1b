"""Tokens of a node agent without a pod: bound to its Node, used with a real nats-server."""

import asyncio
import stat
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from services.auth.__main__ import token_reviewer
from services.auth.nats_users import all_users
from services.cli.__main__ import main
from services.cli.admin.node_keys import API_TOKEN, KUBECONFIG, NATS_AUTHORITY, NATS_TOKEN
from services.cli.doctor.cluster_probes import ClusterProbes, ClusterServers
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import ExpiringMap
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.node_events import DeviceReported
from shared.model.findings import Outcome, SkipError
from shared.model.names import AGENTS_NAMESPACE, NodeName
from shared.nats import subjects
from shared.nats.bus import Bus
from tests.support.auth.cluster import AUDIENCE
from tests.support.auth.world import AuthWorld, auth_world
from tests.support.servers.nats import flush
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.installed import install_rights

A, B = NodeName("node-a"), NodeName("node.b")
POLICY = Path(__file__).parents[3] / "k8s" / "components" / "node-unit" / "node-unit.yaml"
USERS = {user.name: user for user in all_users([A, B])}


@dataclass
class Hosts:
    """NATS behind its auth service, an API server that reviews tokens, and directories of nodes."""

    world: AuthWorld
    api: ApiUnderTest
    folder: Path

    async def issue(self, node: str, *flags: str, kubeconfig: Path | None = None) -> Path:
        out = self.folder / f"keys-{node}"
        used = str(kubeconfig or self.api.kubeconfig)
        words = ["node-keys", "--node", node, "--out", str(out), "--kubeconfig", used, *flags]
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, words)
        assert ended.value.code == 0
        return out

    async def token_by(self, kubeconfig: Path, **spec: Any) -> str:
        """A token of the agent's account, by hand."""
        path = f"/api/v1/namespaces/{AGENTS_NAMESPACE}/serviceaccounts/node-agent/token"
        async with KubernetesClient(load_credentials(kubeconfig)) as kube:
            answer = await kube.create(path, {"spec": spec}, dict[str, Any])
        return str(answer["status"]["token"])

    async def is_refused(self, token: str, user: str) -> bool:
        try:
            async with self.world.raw(token, user):
                return False
        except nats.errors.TimeoutError:
            raise
        except nats.errors.Error:
            return True


@pytest.fixture
async def hosts() -> AsyncIterator[Hosts]:
    with tempfile.TemporaryDirectory(prefix="lh-keys-") as name:
        folder = Path(name)
        async with auth_world(folder) as world, api_server() as api:
            await install_rights(api, POLICY)
            for node in (A, B):
                api.store.create("nodes", {"metadata": {"name": node}})
            authority = (folder / "run" / "ca.crt").read_text()
            authority_map = {"metadata": {"name": "node-agent-ca", "namespace": AGENTS_NAMESPACE}}
            api.store.create("configmaps", {**authority_map, "data": {"ca.crt": authority}})
            async with KubernetesClient(load_credentials(api.kubeconfig)) as kube:
                world.auth.review = token_reviewer(kube, AUDIENCE)
                yield Hosts(world, api, folder)


async def test_the_keys_of_a_node_are_valid_for_its_nats_subjects_and_the_api_server(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    out = await hosts.issue(B)
    user = "node-agent.node.b"
    keys = replace(hosts.world.credentials("", user), token_file=out / NATS_TOKEN)

    async with (
        Bus.connect(hosts.world.url, name="agent", credentials=keys) as agent,
        hosts.world.raw((out / NATS_TOKEN).read_text(), "node-agent.node-a") as (client, errors),
        KubernetesClient(load_credentials(out / KUBECONFIG)) as kube,
    ):
        await agent.client.subscribe(subjects.subscribe_subject(DeviceReported, B))
        for subject in (
            one for one in USERS["node-agent.node-a"].publish if one.endswith("node-a")
        ):
            await client.publish(subject, b"x")
        await flush(client)
        found = await kube.read(f"/api/v1/nodes/{B}", dict[str, Any])

    assert len([text for text in errors if "permissions violation" in text]) >= 4
    assert found["metadata"]["name"] == B
    assert {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()
    } == dict.fromkeys((API_TOKEN, NATS_TOKEN, NATS_AUTHORITY, KUBECONFIG), 0o600)
    assert "tokens of node node.b, valid until" in capsys.readouterr().out


async def test_keys_of_a_deleted_node_are_rejected_and_renew_nothing(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts.world.auth._authorized = ExpiringMap(time.monotonic, expires_s=0.0, most=1)
    out = await hosts.issue(A)
    token = (out / NATS_TOKEN).read_text()
    assert not await hosts.is_refused(token, "node-agent.node-a")

    hosts.api.store.delete("nodes", None, A)
    hosts.api.store.create("nodes", {"metadata": {"name": A}})

    assert await hosts.is_refused(token, "node-agent.node-a")
    words = ["node-keys", "--node", A, "--out", str(out), "--kubeconfig", str(out / KUBECONFIG)]
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(main, words)
    assert ended.value.code == 2
    assert "run this command as an administrator" in capsys.readouterr().err


async def test_a_node_renews_its_own_keys_and_gets_none_for_another(hosts: Hosts) -> None:
    out = await hosts.issue(A)
    before = {path.name: path.read_text() for path in out.iterdir()}
    month_s = 30 * 24 * 3600
    own = {"apiVersion": "v1", "kind": "Node", "name": A}

    await hosts.issue(A, kubeconfig=out / KUBECONFIG)

    after = {path.name: path.read_text() for path in out.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {API_TOKEN, NATS_TOKEN}
    for spec in (
        {"expirationSeconds": month_s},
        {"expirationSeconds": month_s, "boundObjectRef": own | {"name": B}},
        {"expirationSeconds": month_s, "boundObjectRef": {**own, "kind": "Secret"}},
        {"expirationSeconds": 4 * month_s, "boundObjectRef": own},
    ):
        with pytest.raises(RequestError, match="a node agent may request"):
            await hosts.token_by(out / KUBECONFIG, **spec)


async def test_the_doctor_on_a_node_finds_that_nats_accepts_its_agent(
    hosts: Hosts,
) -> None:
    out = await hosts.issue(A)

    async def found(token: str) -> tuple[Outcome, str]:
        login = hosts.world.credentials(token, "node-agent.node-a")
        servers = ClusterServers(nats_url=hosts.world.url, nats_credentials=login)
        probes = ClusterProbes(servers, SkipError("not checked"))
        with pytest.raises(SkipError, match="log in as operator"):
            await probes.components()
        finding = await probes.nats()
        return finding.outcome, finding.text

    outcome, text = await found((out / NATS_TOKEN).read_text())

    assert outcome is Outcome.OK
    assert "NATS accepts the connection and the user" in text
    with pytest.raises(UnavailableError, match="rejects the token in"):
        await found("made-up")
