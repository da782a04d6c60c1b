"""Pods and Events of a simulated API server, to viewers with the rights of its roles."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from services.api.http.pod_objects import PodObjects
from shared.credentials.authorization import KubernetesAuthenticator
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import SystemClock
from tests.support.api.aggregated import RBAC
from tests.support.api.running import RunningApi, reserve_lease
from tests.support.simcluster.apiserver import PODS, a_pod, api_server, create
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVENTS = "/api/v1/namespaces/default/events"
ACCOUNTS = "/api/v1/namespaces/default/serviceaccounts"
RIGHTS = {"all": {"pods": "get", "events": "list"}, "pods": {"pods": "get"}, "none": {}}
"""Of each service account, by resource."""
PATH = "/api/v1/pods/default/web"


@dataclass
class Cluster:
    shown: RunningApi
    tokens: dict[str, str]


async def token_of(client: Any, account: str, rights: dict[str, str]) -> str:
    """Create a service account with rights in its namespace, and return a token of it."""
    await create(client, ACCOUNTS, {"metadata": {"name": account}})
    rules = [
        {"apiGroups": [""], "resources": [resource], "verbs": [verb]}
        for resource, verb in rights.items()
    ]
    inside = f"{RBAC}/namespaces/default"
    await create(client, f"{inside}/roles", {"metadata": {"name": account}, "rules": rules})
    group = "rbac.authorization.k8s.io"
    binding = {
        "metadata": {"name": account},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": account},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "default"}],
    }
    await create(client, f"{inside}/rolebindings", binding)
    issued = await create(client, f"{ACCOUNTS}/{account}/token", {"spec": {}})
    return str(issued["status"]["token"])


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(serve: Any) -> AsyncIterator[Cluster]:
    """A pod with a lease and an Event, and three service accounts."""
    async with (
        api_server() as api,
        api.client() as client,
        KubernetesClient(load_credentials(api.kubeconfig)) as kube,
    ):
        pod = a_pod()
        pod["spec"]["containers"][0]["env"] = [{"name": "PASSWORD", "value": "of-somebody"}]
        uid = (await create(client, PODS, pod))["metadata"]["uid"]
        for name, of in (("mine", uid), ("of-another", "uid-of-another")):
            subject = {"kind": "Pod", "namespace": "default", "name": "web", "uid": of}
            event = {
                "metadata": {"name": name},
                "involvedObject": subject,
                "reason": name,
                "message": "said so",
                "type": "Normal",
                "lastTimestamp": "2031-05-01T10:00:00Z",
            }
            await create(client, EVENTS, event)
        tokens = {name: await token_of(client, name, rights) for name, rights in RIGHTS.items()}
        authenticator = KubernetesAuthenticator(kube, SystemClock())
        async with serve(authenticator, pods=PodObjects(kube)) as shown:
            await reserve_lease(shown, uid, name="web")
            await until(shown.service.projection.leased_nodes)
            yield Cluster(shown, tokens)


async def test_a_pod_is_shown_to_those_who_may_get_it_and_events_to_those_who_may_list_them(
    cluster: Cluster,
) -> None:
    status, whole = await cluster.shown.get(PATH, cluster.tokens["all"])
    _, without = await cluster.shown.get(PATH, cluster.tokens["pods"])
    hidden = await cluster.shown.get(PATH, cluster.tokens["none"])
    gone = await cluster.shown.get("/api/v1/pods/default/gone", cluster.tokens["all"])

    assert (status, whole["name"], whole["containers"][0]["image"]) == (
        200,
        "web",
        "example/image:1",
    )
    assert [event["reason"] for event in whole["events"]] == ["mine"]
    assert "of-somebody" not in whole["manifest"]
    assert (without["events"], without["events_hidden"]) == (
        [],
        "you may not list Events in default",
    )
    assert hidden == (404, {"error": "no such pod that you may see"})
    assert gone == (404, {"error": "the API server has no such pod any more"})


async def test_an_api_without_credentials_says_where_to_look(serve: Any) -> None:
    async with serve() as shown:
        await reserve_lease(shown, name="web")
        status, reply = await shown.get(PATH)

    assert status == 503
    assert "kubectl describe pod web -n default" in reply["error"]
