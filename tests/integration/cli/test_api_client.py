"""The commands with nothing but a kubeconfig: through the API server to the API."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from services.cli.api_client import APISERVICE
from shared.credentials.authorization import KubernetesAuthenticator
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import SystemClock
from shared.model.events.pod_events import PodTerminated
from shared.model.names import Namespace
from simcluster.credentials import kubeconfig
from tests.support.api.aggregated import RBAC, SYSTEM, aggregated
from tests.support.api.running import RunningApi, reserve_lease, running_api
from tests.support.placer.ledger import queued, verdict
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.installed import created
from tests.support.stack import Done, command
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]


@dataclass
class Cluster:
    """An API behind the proxy of a simulated API server."""

    api: ApiUnderTest
    shown: RunningApi
    folder: Path

    async def leasehold(self, *words: str, account: str = "member", **env: str) -> Done:
        """Run a command with the kubeconfig of an account."""
        config = self.folder / account
        if not config.exists():
            await self.write_kubeconfig(config, account)
        return await command(
            *words,
            env={"KUBECONFIG": str(config), "HOME": str(self.folder)} | env,
            folder=self.folder,
        )

    async def write_kubeconfig(self, path: Path, account: str) -> None:
        """Write a kubeconfig whose token an exec plugin returns."""
        async with self.api.client() as client:
            issued = await created(
                client,
                f"/api/v1/namespaces/team/serviceaccounts/{account}/token",
                {"spec": {}},
            )
        credential = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "kind": "ExecCredential",
            "status": {"token": issued["status"]["token"]},
        }
        answer = path.with_suffix(".json")
        answer.write_text(json.dumps(credential))
        content = kubeconfig(self.api.url, self.api.ca.read_bytes(), "")
        plugin = {"apiVersion": credential["apiVersion"], "command": "cat", "args": [str(answer)]}
        content["users"][0]["user"] = {"exec": plugin}
        path.write_text(yaml.safe_dump(content))


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Start everything; `member` may get pods in `default`, `stranger` nowhere."""
    async with (
        api_server() as api,
        KubernetesClient(load_credentials(api.kubeconfig)) as kube,
        running_api(KubernetesAuthenticator(kube, SystemClock())) as shown,
        aggregated(api, shown, tmp_path),
        api.client() as client,
    ):
        await create_accounts(client)
        yield Cluster(api, shown, tmp_path)


async def create_accounts(client: aiohttp.ClientSession) -> None:
    """Create the accounts and the role of one."""
    await created(client, "/api/v1/namespaces", {"metadata": {"name": "team"}})
    for name in ("member", "stranger"):
        await created(
            client, "/api/v1/namespaces/team/serviceaccounts", {"metadata": {"name": name}}
        )
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]
    inside = f"{RBAC}/namespaces/default"
    await created(client, f"{inside}/roles", {"metadata": {"name": "pods"}, "rules": rules})
    await created(
        client,
        f"{inside}/rolebindings",
        {
            "metadata": {"name": "pods"},
            "roleRef": {"kind": "Role", "name": "pods"},
            "subjects": [{"kind": "ServiceAccount", "name": "member", "namespace": "team"}],
        },
    )


async def documents(at: Cluster, *words: str, account: str = "member") -> Any:
    done = await at.leasehold(*words, "-o", "json", account=account)
    assert done.code == 0, done.err
    return json.loads(done.out)


async def waiting_pod(at: Cluster, name: str, namespace: str = "default") -> Any:
    """Create a pod, and have it wait."""
    async with at.api.client() as client:
        if namespace != "default":
            await created(client, "/api/v1/namespaces", {"metadata": {"name": namespace}})
        pod = await created(
            client,
            f"/api/v1/namespaces/{namespace}/pods",
            {
                "metadata": {"name": name},
                "spec": {
                    "schedulerName": "leasehold",
                    "containers": [{"name": "main", "image": "app"}],
                },
            },
        )
    waits = replace(
        queued(pod["metadata"]["uid"], units=99_000), name=name, namespace=Namespace(namespace)
    )
    capacity = await at.shown.ledger.capacity()
    await at.shown.ledger.waiting_pods.enqueue([verdict(waits, capacity)])
    await at.shown.publish(waits)
    return waits


async def test_engineers_read_what_their_kubeconfig_lets_them_get(at: Cluster) -> None:
    lease = await reserve_lease(at.shown)
    at.shown.usage.measure(lease, memory_mib=77)
    await waiting_pod(at, "hidden-pod", "other")
    await waiting_pod(at, "mine")
    await until(
        lambda: documents(at, "ps"),
        lambda found: found["waiting"] and found["leases"][0]["shares"][0]["measured"],
    )

    gpus, explained, top, wide = await asyncio.gather(
        documents(at, "gpus"),
        documents(at, "explain", "mine"),
        documents(at, "top"),
        at.leasehold("ps", "-o", "wide"),
    )
    foreign = await documents(at, "gpus", account="stranger")
    text = await at.leasehold("gpus", account="stranger")
    nothing = await documents(at, "ps", account="stranger")

    (share,) = gpus["nodes"][0]["devices"][0]["shares"]
    assert (share["namespace"], share["measured"]["memory_mib"]) == ("default", 77)
    assert top["shares"][0]["measured"]["memory_mib"] == 77
    assert explained["verdict"] == "waiting"
    assert explained["waiting"]["queue"]["of"] == 2
    assert lease.name in wide.out
    assert "hidden-pod" not in wide.out
    (hidden,) = foreign["nodes"][0]["devices"][0]["shares"]
    assert (hidden["namespace"], hidden["name"], hidden["container"]) == ("", "", "")
    assert hidden["memory_mib"] == share["memory_mib"]
    assert "in use by another namespace" in text.out
    assert (nothing["leases"], nothing["waiting"]) == ([], [])


async def test_namespaces_labels_and_templates_are_those_of_kubectl(at: Cluster) -> None:
    lease = await reserve_lease(at.shown)
    await waiting_pod(at, "mine")
    async with at.api.client() as client:
        labelled = {"metadata": {"labels": {"app": "train"}}}
        headers = {"Content-Type": "application/merge-patch+json"}
        path = "/api/v1/namespaces/default/pods/mine"
        async with client.patch(path, json=labelled, headers=headers) as response:
            assert response.status == 200
    await until(lambda: documents(at, "ps"), lambda found: found["waiting"] and found["leases"])
    in_team = at.folder / "in-team"
    await at.write_kubeconfig(in_team, "member")
    content = yaml.safe_load(in_team.read_text())
    content["contexts"][0]["context"]["namespace"] = "team"
    in_team.write_text(yaml.safe_dump(content))

    here, selected, gpus, there, everywhere, version = await asyncio.gather(
        documents(at, "ps"),
        at.leasehold("ps", "-l", "app=train", "-o", "name"),
        at.leasehold("gpus", "-o", "name"),
        at.leasehold("ps", KUBECONFIG=str(in_team)),
        at.leasehold("ps", "-A", "-o", "name", KUBECONFIG=str(in_team)),
        documents(at, "version"),
    )

    shown = [pod["name"] for pod in (*here["leases"], *here["waiting"])]
    assert shown == [lease.name, "mine"]
    assert selected.out == "pod/mine\n"
    assert gpus.out.splitlines()[0] == f"{lease.node}/0"
    assert "in namespace team; -A shows all namespaces" in there.out
    assert everywhere.out == f"pod/{lease.name}\npod/mine\n"
    assert version["client"] == version["server"]["version"]


async def test_a_workload_is_explained_by_its_pod_or_by_why_it_has_none(at: Cluster) -> None:
    waits = await waiting_pod(at, "web-5d9c7b8f4-abcde")
    event = {
        "metadata": {"name": "e1", "namespace": "default"},
        "involvedObject": {"kind": "ReplicaSet", "name": "denied-7f8b", "namespace": "default"},
        "reason": "FailedCreate",
        "type": "Warning",
        "message": 'Error creating: admission webhook "x" denied the request: write 8192',
        "lastTimestamp": "2031-05-01T00:00:00Z",
    }
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "uid": "r", "name": "web-5d9c7b8f4"}
    async with at.api.client() as client:
        await created(client, "/api/v1/namespaces/default/events", event)
        await allow(client, "events")
        owned = {"metadata": {"ownerReferences": [owner]}}
        headers = {"Content-Type": "application/merge-patch+json"}
        path = f"/api/v1/namespaces/default/pods/{waits.name}"
        async with client.patch(path, json=owned, headers=headers) as response:
            assert response.status == 200
    await until(lambda: documents(at, "ps"), lambda shown: shown["waiting"])

    by_kind, by_name, denied, guessed, other = await asyncio.gather(
        documents(at, "explain", "deploy/web"),
        documents(at, "explain", "web"),
        at.leasehold("explain", "deploy/denied"),
        at.leasehold("explain", "denied"),
        at.leasehold("explain", "job/web"),
    )

    assert (by_kind["name"], by_name["name"]) == (waits.name, waits.name)
    why = "its ReplicaSet denied-7f8b could not create one, last at 2031-05-01T00:00:00Z: write"
    assert f"there is no pod of Deployment default/denied: {why} 8192" in denied.err
    assert f"there is no pod of default/denied: {why} 8192" in guessed.err
    assert "there is no pod of Job default/web" in other.err
    assert {denied.code, guessed.code, other.code} == {1}


async def allow(client: aiohttp.ClientSession, resource: str) -> None:
    """Let `member` list these objects in `default`, too."""
    path = f"{RBAC}/namespaces/default/roles/pods"
    rules = [{"apiGroups": [""], "resources": ["pods", resource], "verbs": ["get", "list"]}]
    headers = {"Content-Type": "application/merge-patch+json"}
    async with client.patch(path, json={"rules": rules}, headers=headers) as response:
        assert response.status == 200


async def test_completion_offers_what_the_cluster_has(at: Cluster) -> None:
    lease = await reserve_lease(at.shown)
    await waiting_pod(at, "mine")
    await until(lambda: documents(at, "ps"), lambda shown: shown["waiting"] and shown["leases"])
    offered: dict[tuple[str, ...], set[str]] = {
        ("explain", ""): {lease.name, "mine"},
        ("explain", "mi"): {"mine"},
        ("ps", "-n", ""): {"default"},
        ("top", "--node", ""): {lease.node},
        ("cordon", ""): {f"{lease.node}/0"},
        ("explain", "-n", "team", ""): set(),
    }

    done = await asyncio.gather(*(at.leasehold("__complete", *words) for words in offered))

    for each, (words, expected) in zip(done, offered.items(), strict=True):
        found = set(each.out.split())
        assert found >= expected, words
        assert expected or not found, words


async def test_what_a_kubeconfig_does_not_permit_is_said_with_what_to_do(at: Cluster) -> None:
    audit = await at.leasehold("audit")
    pod = await at.leasehold("explain", "mine", account="stranger")
    nowhere = await at.leasehold("gpus", KUBECONFIG="")
    async with at.api.client() as client:
        endpoints = f"/api/v1/namespaces/{SYSTEM}/endpoints/api"
        await client.delete(endpoints)
        not_ready = await at.leasehold("gpus")
        await client.delete(f"{RBAC}/clusterrolebindings/leasehold-commands")
        denied = await at.leasehold("gpus")
        await client.delete("/apis/apiregistration.k8s.io/v1/apiservices/" + APISERVICE)
    absent = await at.leasehold("gpus")

    assert not_ready.code == 3
    assert "no replica of the API is ready: `kubectl get pods -n" in not_ready.err
    assert audit.code == 3
    assert "exec -i deploy/operator -- leasehold audit" in audit.err
    assert (pod.code, "cannot get resource" in pod.err) == (2, True)
    assert nowhere.code == 3
    assert nowhere.err.startswith("leasehold gpus: there is nothing to read: run `leasehold up`")
    assert (denied.code, "bind the ClusterRole leasehold-commands" in denied.err) == (2, True)
    assert (absent.code, "this cluster has no API of Leasehold" in absent.err) == (3, True)


async def test_a_watched_list_is_shown_again_when_it_changes(at: Cluster) -> None:
    await at.write_kubeconfig(at.folder / "member", "member")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "ps", "-w"),
        *("--state", str(at.folder / "none"), "--kubeconfig", str(at.folder / "member")),
        env={"PYTHONPATH": str(ROOT), "HOME": str(at.folder), "PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        first = await process.stdout.readline()
        lease = await reserve_lease(at.shown)
        later = await process.stdout.readuntil(lease.name.encode())
    process.terminate()
    await process.wait()

    assert b"no pod holds a lease" in first
    assert later.count(b"no pod holds a lease") == 0


async def test_a_trace_shows_the_steps_that_the_api_has_seen_and_where_all_spans_are(
    at: Cluster,
) -> None:
    pod = await waiting_pod(at, "mine")
    ended = PodTerminated(
        pod=pod.pod, namespace=pod.namespace, name=pod.name, node=None, phase="Failed"
    )
    await at.shown.publish(pod)
    await until(lambda: at.shown.service.projection.events.times_of(pod.pod))
    at.shown.service.projection.events.add([ended], time.time() + 2.5)

    shown = await documents(at, "trace", "mine")
    text = await at.leasehold("trace", "mine")

    (step,) = shown["spans"]
    assert (step["name"], step["duration_s"] >= 2.5) == ("until terminated", True)
    assert "until terminated" in text.out
    assert shown["url"] in text.out
