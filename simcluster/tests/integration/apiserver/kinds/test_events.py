"""Events over HTTP."""

from tests.support.simcluster.apiserver import Client, create, merge, read
from tests.support.simcluster.custom_kinds import (
    TABLE,
)


async def test_an_event_is_the_same_object_in_both_api_groups(client: Client) -> None:
    new, old = ("/apis/events.k8s.io/v1/namespaces/default/events",
                "/api/v1/namespaces/default/events")  # fmt: skip
    event = {"apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e"},
             "regarding": {"kind": "Pod", "name": "web", "namespace": "default"},
             "note": "0/3 nodes are available", "reason": "FailedScheduling", "type": "Warning",
             "action": "Scheduling", "reportingController": "leasehold",
             "reportingInstance": "leasehold-0",
             "eventTime": "2026-01-01T00:00:00.000000Z"}  # fmt: skip

    created = await create(client, new, event)
    shown = await read(client, f"{old}/e")
    chosen = await read(client, new, params={"fieldSelector": "regarding.name=web"})
    patched = await merge(client, f"{new}/e", {"note": "bound"})

    assert (created["apiVersion"], created["note"]) == ("events.k8s.io/v1", event["note"])
    assert (shown["apiVersion"], shown["message"]) == ("v1", event["note"])
    assert (shown["involvedObject"], shown["reportingComponent"]) == (
        event["regarding"],
        "leasehold",
    )
    assert [item["regarding"]["name"] for item in chosen["items"]] == ["web"]
    assert patched["note"] == "bound"
    old_fashioned = {**event, "metadata": {"name": "f"}, "deprecatedCount": 1, "action": ""}
    refused = await create(client, new, old_fashioned, code=422)
    assert {cause["field"] for cause in refused["details"]["causes"]} == {"action", "count"}
    table = await read(client, new, headers=TABLE)
    assert table["rows"][0]["cells"][1:4] == ["Warning", "FailedScheduling", "pod/web"]
