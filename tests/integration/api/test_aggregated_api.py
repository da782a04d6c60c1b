"""The group visibility.leasehold.dev, through an API server that passes requests on to the API."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from services.api.aggregated.front_proxy import FrontProxy
from shared.credentials.authorization import KubernetesViewer
from shared.credentials.shares import OpenResponses
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.runtime.bodies import BODY
from tests.support.api.aggregated import GROUP, RBAC, aggregated
from tests.support.api.running import RunningApi, reserve_lease, running_api
from tests.support.clock import FakeClock
from tests.support.kubernetes.reviews import Reviews, reviewed
from tests.support.servers.tls import Made
from tests.support.simcluster.apiserver import ApiUnderTest, api_server, read
from tests.support.simcluster.installed import created
from tests.support.waiting import until

TABLE = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}
DEFAULT = f"{GROUP}/namespaces/default"
OTHER = f"{GROUP}/namespaces/other"


@dataclass
class Group:
    """The group, and what is behind it."""

    client: aiohttp.ClientSession
    shown: RunningApi
    address: str
    api: ApiUnderTest
    folder: Path

    async def names(self, path: str, **query: str) -> list[str]:
        found = await read(self.client, path, params=query)
        return [each["metadata"]["name"] for each in found["items"]]


@pytest.fixture
async def group(tmp_path: Path) -> AsyncIterator[Group]:
    async with (
        api_server() as api,
        running_api() as shown,
        aggregated(api, shown, tmp_path) as address,
        api.client() as client,
    ):
        yield Group(client, shown, address, api, tmp_path)


async def test_tables_documents_and_selectors_are_those_of_kubectl(group: Group) -> None:
    lease = await reserve_lease(group.shown, cores=30, name="first")
    await reserve_lease(group.shown, "p2", gpu=1, namespace=Namespace("other"), name="theirs")
    group.shown.usage.measure(lease, memory_mib=77)
    await until(
        lambda: read(group.client, f"{GROUP}/gpuleases"),
        lambda found: (
            len(found["items"]) == 2 and "usedMemoryMib" in found["items"][0]["status"]["shares"][0]
        ),
    )

    table = await read(group.client, f"{DEFAULT}/gpuleases", headers=TABLE)
    device = await read(group.client, f"{GROUP}/gpudevices/a-0")
    everywhere = await group.names(f"{GROUP}/gpuleases")
    by_label = await group.names(f"{GROUP}/gpuleases", labelSelector="leasehold.dev/node in (a,b)")
    by_absence = await group.names(f"{GROUP}/gpuleases", labelSelector="!leasehold.dev/node")
    by_field = await group.names(f"{GROUP}/gpudevices", fieldSelector="status.usedShares=0")
    unequal = await group.names(f"{GROUP}/gpuleases", fieldSelector="metadata.namespace!=other")

    titles = [column["name"] for column in table["columnDefinitions"]]
    (row,) = [dict(zip(titles, row["cells"], strict=True)) for row in table["rows"]]
    assert (row["Name"], row["Node"], row["Used MiB"], row["Cores"]) == ("first", "a", 77, "30%")
    assert table["rows"][0]["object"]["kind"] == "PartialObjectMetadata"
    assert (device["kind"], device["status"]["usedShares"]) == ("GPUDevice", 1)
    assert "first" not in json.dumps(device)
    assert everywhere == ["first", "theirs"]
    assert (by_label, by_absence) == (everywhere, [])
    assert (by_field, unequal) == ([], ["first"])


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        (f"{GROUP}/gpudevices/none", 404, 'gpudevices.visibility.leasehold.dev "none" not found'),
        (f"{GROUP}/gpudevices?fieldSelector=status.x=1", 400, "is not FIELD=VALUE of status.node"),
        (f"{GROUP}/gpuleases?labelSelector=a=(", 400, "is not one from 'a=(' on"),
        (f"{GROUP}/gpudevices/a%0Ab", 404, '"a\\nb" not found'),
        (f"{GROUP}/gpuleases?labelSelector={','.join(['!a'] * 51)}", 400, "50 terms"),
        (f"{GROUP}/gpuleases?fieldSelector=status.node={'n' * 2000}", 400, "2000 characters"),
        (f"{GROUP}/gpuleases?continue=x", 400, "lists are returned whole, whatever `limit`"),
        (f"{GROUP}/gpuleases?watch=1&sendInitialEvents=true", 422, "list first"),
    ],
)
async def test_a_refusal_is_a_status_in_words(
    group: Group, path: str, code: int, said: str
) -> None:
    found = await read(group.client, path, code=code)

    assert (found["kind"], found["code"]) == ("Status", code)
    assert said in found["message"]


async def test_what_would_write_is_refused(group: Group) -> None:
    refused = await group.client.delete(f"{DEFAULT}/gpuleases/first")

    found = await refused.json()
    assert (refused.status, found["reason"]) == (405, "MethodNotAllowed")
    assert "is read-only" in found["message"]


async def test_a_watch_continues_after_a_list_and_ends_what_is_selected_no_more(
    group: Group,
) -> None:
    listed = await read(group.client, f"{DEFAULT}/gpuleases")
    query = {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"]}
    devices = {"watch": "1", "fieldSelector": "status.usedShares=0"}
    async with (
        group.client.get(f"{DEFAULT}/gpuleases", params=query) as leases,
        group.client.get(f"{GROUP}/gpudevices", params=devices) as free,
        asyncio.timeout(20),
    ):
        before = [json.loads(await free.content.readline()) for _ in range(2)]
        lease = await reserve_lease(group.shown, name="first")
        added = json.loads(await leases.content.readline())
        taken = json.loads(await free.content.readline())
        await group.shown.ledger.release([lease.pod], reason="ended")
        ended = json.loads(await leases.content.readline())

    assert listed["items"] == []
    assert [(each["type"], each["object"]["metadata"]["name"]) for each in before] == [
        ("ADDED", "a-0"),
        ("ADDED", "a-1"),
    ]
    assert (added["type"], added["object"]["metadata"]["name"]) == ("ADDED", "first")
    assert (taken["type"], taken["object"]["metadata"]["name"]) == ("DELETED", "a-0")
    assert (ended["type"], ended["object"]["status"]["state"]) == ("DELETED", "reserved")


async def test_lists_and_watches_of_any_replica_continue_each_other(group: Group) -> None:
    seen: dict[str, set[str]] = {}
    async with (
        api_server() as other_api,
        running_api(beside=group.shown) as other,
        aggregated(other_api, other, group.folder / "other"),
        other_api.client() as other_client,
        asyncio.timeout(120),
    ):
        clients = (group.client, other_client)
        for number in range(20):
            lists = clients[number % 2]
            watches = clients[(number + 1) % 2]
            early = await reserve_lease(group.shown, f"early-{number}", name=f"early-{number}")
            listed = await read(lists, f"{DEFAULT}/gpuleases")
            named = {each["metadata"]["name"] for each in listed["items"]}
            late = await reserve_lease(group.shown, f"late-{number}", name=f"late-{number}")
            await group.shown.ledger.release([early.pod], reason="ended")
            await group.shown.ledger.release([late.pod], reason="ended")
            last = await reserve_lease(group.shown, f"last-{number}", name=f"last-{number}")
            query = {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"]}
            async with watches.get(f"{DEFAULT}/gpuleases", params=query) as changes:
                while named != {f"last-{number}"}:
                    event = json.loads(await changes.content.readline())
                    assert event["type"] != "ERROR", event
                    name = event["object"]["metadata"]["name"]
                    seen.setdefault(event["type"], set()).add(name)
                    (named.discard if event["type"] == "DELETED" else named.add)(name)
            await group.shown.ledger.release([last.pod], reason="ended")

    assert seen["ADDED"] >= {f"last-{number}" for number in range(20)}


async def test_a_watch_from_an_unknown_version_ends_so_that_clients_list_again(
    group: Group,
) -> None:
    path = f"{GROUP}/gpudevices?watch=1&resourceVersion=12"

    lines = (await (await group.client.get(path)).text()).splitlines()

    (event,) = map(json.loads, lines)
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
    assert event["object"]["reason"] == "Expired"


async def test_one_user_has_so_many_watches_at_a_time(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.shown.server._open = OpenResponses(most=10, of_one=2, reserved=1)
    monkeypatch.setattr("services.api.aggregated.server.GONE_S", 0.1)
    path = f"{GROUP}/gpudevices?watch=1"
    async with group.client.get(path) as first, group.client.get(path) as second:
        assert (first.status, second.status) == (200, 200)
        refused = await read(group.client, path, code=429)
        second.close()

        async def status() -> int:
            async with group.client.get(path) as third:
                return third.status

        await until(status, lambda code: code == 200)

    assert refused["reason"] == "TooManyRequests"
    assert refused["message"] == (
        "2 watches and live pages of kubernetes-admin are open, the most at a time: close some"
    )


async def test_discovery_and_explanations_name_the_kinds(group: Group) -> None:
    kind = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    groups = await read(group.client, "/apis", headers={"Accept": kind})
    explained = await read(group.client, f"/openapi/v3{GROUP}")

    (found,) = [e for e in groups["items"] if e["metadata"]["name"] == "visibility.leasehold.dev"]
    kinds = {each["resource"]: each for each in found["versions"][0]["resources"]}
    assert set(kinds) == {"gpudevices", "gpuleases", "waitingpods"}
    assert kinds["gpuleases"]["shortNames"] == ["gl"]
    assert {each["categories"][0] for each in kinds.values()} == {"leasehold"}
    status = explained["components"]["schemas"]["GpuDeviceStatus"]
    assert "Ready, Reserved, Closed" in status["properties"]["phase"]["description"]
    assert all("description" in each for each in status["properties"].values())


async def test_those_who_may_view_a_namespace_see_its_objects_only(group: Group) -> None:
    await reserve_lease(group.shown, name="first")
    await created(
        group.client,
        f"{RBAC}/namespaces/default/rolebindings",
        {
            "metadata": {"name": "viewers"},
            "roleRef": {"kind": "ClusterRole", "name": "leasehold-view"},
            "subjects": [{"kind": "User", "name": "ada"}],
        },
    )
    ada = {"Impersonate-User": "ada", "Impersonate-Group": "system:authenticated"}
    await until(lambda: group.names(f"{GROUP}/gpuleases"))

    own = await read(group.client, f"{DEFAULT}/gpuleases", headers=ada)
    refused = [
        await read(group.client, path, headers=ada, code=403)
        for path in (f"{OTHER}/gpuleases", f"{GROUP}/gpuleases", f"{GROUP}/gpudevices")
    ]
    view = await read(group.client, f"{GROUP}/views/gpus", headers=ada)
    await read(group.client, f"{GROUP}/views/allocation?window=1d", headers=ada)

    assert [each["metadata"]["name"] for each in own["items"]] == ["first"]
    assert all('User "ada" cannot list' in each["message"] for each in refused)
    (share,) = view["nodes"][0]["devices"][0]["shares"]
    assert (share["name"], share["memory_mib"] > 0) == ("", True)


async def test_nobody_but_the_api_server_is_served(group: Group) -> None:
    """Neither a client without a certificate, nor one with another name of the same authority."""
    tls = group.api.ca.with_name("front-proxy")
    other = ssl.create_default_context()
    other.check_hostname = False
    other.verify_mode = ssl.CERT_NONE
    other.load_cert_chain(*Made(group.folder).issue("stranger"))
    user = {"X-Remote-User": "system:admin", "X-Remote-Group": "system:masters"}

    async with aiohttp.ClientSession(headers=user) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"https://{group.address}{GROUP}/gpuleases", ssl=other)
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"https://{group.address}{GROUP}/gpuleases", ssl=False)

    proxied = await read(group.client, f"{GROUP}/gpuleases")
    assert (tls.exists(), proxied["items"]) == (True, [])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"client-ca-file": "A"}, "any user could pretend to be any other"),
        ({"client-ca-file": "A", "requestheader-allowed-names": '["front-proxy"]'}, ""),
        ({"client-ca-file": "B"}, ""),
        ({"requestheader-client-ca-file": ""}, "aggregation layer is off"),
        ({"requestheader-group-headers": "["}, "is invalid"),
    ],
)
def test_an_api_server_that_cannot_be_told_from_users_is_not_served(
    changes: dict[str, str], said: str
) -> None:
    end = "-----END CERTIFICATE-----"
    data = {
        "requestheader-client-ca-file": "A",
        "requestheader-username-headers": '["X-Remote-User"]',
        "requestheader-allowed-names": "[]",
    } | changes
    given = {key: f"{text}{end}" if text in {"A", "B"} else text for key, text in data.items()}

    if said:
        with pytest.raises(RequestError, match=said):
            FrontProxy.parse(given)
    else:
        assert FrontProxy.parse(given).user == ("X-Remote-User",)


class ScopedReviews(Reviews):
    """An API server whose users may what the scopes of their tokens say, as OpenShift's."""

    async def access(self, request: web.Request) -> web.Response:
        spec = json.loads(request[BODY])["spec"]
        allowed = spec["extra"] == {"example.com/scopes": ["full"]}
        return web.json_response({"status": {"allowed": allowed}}, status=201)


async def test_what_is_reviewed_of_a_user_includes_what_its_token_may() -> None:
    data = {
        "requestheader-client-ca-file": "A",
        "requestheader-username-headers": '["X-Remote-User"]',
        "requestheader-extra-headers-prefix": '["X-Remote-Extra-"]',
    }
    proxy = FrontProxy.parse(data)
    transport = Mock()
    transport.get_extra_info.return_value = {"subject": ()}
    async with reviewed(ScopedReviews(), FakeClock()) as reviews:
        for scopes, seen in (("full", None), ("user:info", frozenset()), ("full", None)):
            headers = {"X-Remote-User": "ada", "X-Remote-Extra-Example.com%2fscopes": scopes}
            request = make_mocked_request("GET", "/", headers, transport=transport)
            user = proxy.user_of(request)
            assert user is not None
            assert await KubernetesViewer(reviews, user).visible([Namespace("a")]) == seen
