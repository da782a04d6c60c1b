"""What mutating and validating webhooks see, change and deny."""

import asyncio

from simcluster.apimachinery.objects import Json
from tests.support.simcluster.admission_webhook import (
    WebhookUnderTest,
    allow,
    deny,
    label,
    patch,
)
from tests.support.simcluster.apiserver import (
    PODS,
    Client,
    a_pod,
    create,
    refusal,
)
from tests.support.simcluster.reviewed import (
    assert_installed,
)


async def test_a_webhook_sees_the_request_as_kubernetes_describes_it(
    client: Client, hooks: WebhookUnderTest
) -> None:
    await assert_installed(client, "Mutating", hooks.hook("see", allow))

    await client.post(PODS, json=a_pod(), params={"fieldManager": "me", "dryRun": "All"})

    [seen] = hooks.requests("/see")
    assert seen["kind"] == {"group": "", "version": "v1", "kind": "Pod"}
    assert seen["resource"] == {"group": "", "version": "v1", "resource": "pods"}
    assert (seen["operation"], seen["name"], seen["namespace"]) == ("CREATE", "web", "default")
    assert (seen["dryRun"], seen["oldObject"]) == (True, None)
    assert seen["options"]["kind"] == "CreateOptions"
    assert seen["options"]["fieldManager"] == "me"
    spec = seen["object"]["spec"]
    assert (spec["restartPolicy"], spec["priority"]) == ("Always", 0)
    assert seen["object"]["kind"] == "Pod"
    assert (await client.get(f"{PODS}/web")).status == 404


async def test_mutations_apply_in_the_order_of_names_and_are_completed(
    client: Client, hooks: WebhookUnderTest
) -> None:
    sidecar = {"name": "side", "image": "example/side:1"}
    await assert_installed(client, "Mutating", hooks.hook("late", label("order", "late")), name="z")
    await assert_installed(
        client,
        "Mutating",
        hooks.hook("early", label("order", "early")),
        hooks.hook("side", patch({"op": "add", "path": "/spec/containers/-", "value": sidecar})),
    )

    created = await create(client, PODS, a_pod())

    assert [path for path, _ in hooks.received] == ["/early", "/side", "/late"]
    assert created["metadata"]["labels"] == {"order": "late"}
    added = created["spec"]["containers"][1]
    assert (added["name"], added["imagePullPolicy"]) == ("side", "IfNotPresent")


async def test_a_webhook_is_reinvoked_after_later_changes_if_configured(
    client: Client, hooks: WebhookUnderTest
) -> None:
    await assert_installed(
        client,
        "Mutating",
        hooks.hook("again", allow, reinvocationPolicy="IfNeeded"),
        hooks.hook("never", allow),
        hooks.hook("change", label("a", "b"), reinvocationPolicy="IfNeeded"),
    )

    await client.post(PODS, json=a_pod())

    assert [path for path, _ in hooks.received] == ["/again", "/never", "/change", "/again"]
    assert hooks.requests("/again")[1]["object"]["metadata"]["labels"] == {"a": "b"}


async def test_a_mutated_object_is_validated(client: Client, hooks: WebhookUnderTest) -> None:
    bad = patch({"op": "replace", "path": "/spec/containers/0/image", "value": ""})
    await assert_installed(client, "Mutating", hooks.hook("bad", bad))
    assert "spec.containers[0].image: Required value" in await refusal(
        client, PODS, a_pod(), code=422
    )

    hooks.answers["/bad"] = patch({"op": "remove", "path": "/spec/nothing"})
    message = await refusal(client, PODS, a_pod(), code=500)
    assert message.startswith("Internal error occurred: ")


async def test_a_webhook_may_not_change_the_priority_class_only(
    client: Client, hooks: WebhookUnderTest
) -> None:
    high = {"metadata": {"name": "high"}, "value": 1000}
    await client.post("/apis/scheduling.k8s.io/v1/priorityclasses", json=high)
    named = {"op": "add", "path": "/spec/priorityClassName", "value": "high"}
    await assert_installed(client, "Mutating", hooks.hook("name", patch(named)))

    message = await refusal(client, PODS, a_pod(), code=403)
    assert message == (
        'pods "web" is forbidden: the integer value of priority (0) must not be provided in pod '
        "spec; priority admission controller computed 1000 from the given PriorityClass name"
    )
    hooks.answers["/name"] = patch(named, {"op": "remove", "path": "/spec/priority"})
    created = await create(client, PODS, a_pod())
    assert created["spec"]["priority"] == 1000


async def test_a_denial_has_kubernetes_text(client: Client, hooks: WebhookUnderTest) -> None:
    await assert_installed(
        client, "Validating", hooks.hook("no", deny("no GPUs for you", code=403))
    )
    assert await refusal(client, PODS, a_pod(), code=403) == (
        'admission webhook "no.leasehold.dev" denied the request: no GPUs for you'
    )

    hooks.answers["/no"] = deny()
    assert await refusal(client, PODS, a_pod(), code=400) == (
        'admission webhook "no.leasehold.dev" denied the request without explanation'
    )
    hooks.answers["/no"] = deny(reason="Gone")
    assert (await refusal(client, PODS, a_pod(), code=400)).endswith("request: Gone")
    assert (await client.get(f"{PODS}/web")).status == 404


async def test_validating_webhooks_run_in_parallel_and_see_the_final_object(
    client: Client, hooks: WebhookUnderTest
) -> None:
    both = asyncio.Barrier(2)

    async def meet(_request: Json) -> Json:
        async with asyncio.timeout(30):
            await both.wait()
        return {"allowed": True, "warnings": ["mind the gap"]}

    await assert_installed(client, "Mutating", hooks.hook("change", label("a", "b")))
    await assert_installed(client, "Validating", hooks.hook("one", meet), hooks.hook("two", meet))

    created = await client.post(PODS, json=a_pod())

    assert created.status == 201
    assert created.headers.getall("Warning") == ['299 - "mind the gap"'] * 2
    final = hooks.requests("/one")[0]["object"]
    assert final["metadata"]["labels"] == {"a": "b"}
    assert final["metadata"]["uid"] == (await created.json())["metadata"]["uid"]
    assert final["status"]["phase"] == "Pending"
