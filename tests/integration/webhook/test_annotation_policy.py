"""The annotation policy, as an API server enforces it without the webhook."""

import json
from typing import Any

import aiohttp
import pytest

from services.webhook.registration import admission_policies
from shared.dialects.reserved import EXEMPT
from shared.model.events.event import ADMISSION
from shared.model.names import BUDGET_GATE, EXPECTED_RUN_TIME, ISOLATION, MAX_RUN_TIME
from tests.support.kubernetes.kubectl import Kubectl, kubectl_on
from tests.support.simcluster.apiserver import api_server

PODS = "/api/v1/namespaces/default/pods"
RESOURCES = {
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}
BINDER = "system:serviceaccount:leasehold-system:binder"
EXEMPT_LABEL = "leasehold.dev/sees-devices"
IDS = "volcano.sh/vgpu-ids-new"
CDI = {"cdi.k8s.io/gpus": "nvidia.com/gpu=all"}
kubectl = kubectl_on(api_server)


async def install(client: aiohttp.ClientSession, user: str = BINDER) -> None:
    """Create the policies, with this user in place of the binder."""
    for obj in json.loads(json.dumps(admission_policies()).replace(BINDER, user)):
        path = f"/apis/{obj['apiVersion']}/{RESOURCES[str(obj['kind'])]}"
        async with client.post(path, json=obj) as response:
            assert response.status == 201, await response.text()


def pod(name: str, **notes: str) -> dict[str, Any]:
    main = {"name": "main", "image": "app"}
    meta: dict[str, Any] = {"name": name} | ({"annotations": notes} if notes else {})
    return {"metadata": meta, "spec": {"containers": [main]}}


async def created(client: aiohttp.ClientSession, obj: dict[str, Any]) -> tuple[int, str]:
    async with client.post(PODS, json=obj) as response:
        return response.status, str((await response.json()).get("message"))


async def patched(
    client: aiohttp.ClientSession, path: str, body: object, **headers: str
) -> tuple[int, str]:
    given = {"Content-Type": "application/merge-patch+json"} | headers
    async with client.patch(path, json=body, headers=given) as response:
        return response.status, str((await response.json()).get("message"))


async def annotated(
    client: aiohttp.ClientSession, name: str, notes: dict[str, str | None]
) -> tuple[int, str]:
    return await patched(client, f"{PODS}/{name}", {"metadata": {"annotations": notes}})


@pytest.mark.parametrize("key", [IDS, "leasehold.dev/lease", "tencent.com/predicate-gpu-idx-0"])
async def test_gpusharing_8_a_pod_that_is_created_with_an_assignment_is_denied(key: str) -> None:
    async with api_server() as api, api.client() as client:
        await install(client)

        status, text = await created(client, pod("forged", **{key: "x"}))
        plain, _ = await created(client, pod("plain", mine="stays"))

    assert (status, plain) == (403, 201)
    assert key in text


async def test_assignments_are_neither_added_changed_nor_removed_by_others() -> None:
    async with api_server() as api, api.client() as client:
        await created(client, pod("assigned", **{IDS: "GPU-a,NVIDIA,1,1:"}))
        await created(client, pod("free"))
        await install(client)

        answers = [
            await annotated(client, "free", {IDS: "GPU-b"}),
            await annotated(client, "assigned", {IDS: "GPU-b"}),
            await annotated(client, "assigned", {IDS: None}),
        ]
        own, _ = await annotated(client, "assigned", {"mine": "x"})

    assert [status for status, _ in answers] == [403, 403, 403]
    assert own == 200


async def test_a_pod_is_exempt_from_its_creation_on_and_only_in_a_labelled_namespace() -> None:
    exempt = {EXEMPT: "true"}
    async with api_server() as api, api.client() as client:

        async def label(value: str) -> None:
            body = {"metadata": {"labels": {EXEMPT_LABEL: value}}}
            assert (await patched(client, "/api/v1/namespaces/default", body))[0] == 200

        await install(client)
        forged, text = await created(client, pod("forged", **exempt))
        await created(client, pod("plain"))
        await label("true")
        new, _ = await created(client, pod("driver", **exempt, **CDI))
        later, _ = await annotated(client, "plain", {EXEMPT: "true"})
        await label("false")
        kept, _ = await annotated(client, "driver", {"mine": "x"})
        again, _ = await created(client, pod("other", **exempt))

    assert (forged, new, later, kept, again) == (403, 201, 403, 200, 403)
    assert EXEMPT_LABEL in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nvidia.cdi.k8s.io/container.main", "nvidia.com/gpu=all"),
        ("devices.noderesource.dev", "- {path: x, type: c, major: 195, minor: 0}"),
        ("io.kubernetes.cri-o.Devices", "/dev/shm/../nvidia0"),
    ],
)
async def test_no_annotation_names_a_gpu_for_the_runtime_at_creation_or_later(
    key: str, value: str
) -> None:
    naming: dict[str, str | None] = {key: value}
    binding = {
        "metadata": {"name": "plain", "annotations": naming},
        "target": {"kind": "Node", "name": "node-0"},
    }
    async with api_server() as api, api.client() as client:
        await created(client, pod("plain"))
        await created(client, pod("older", **{key: value}))
        await install(client)

        new, text = await created(client, pod("new", **{key: value}))
        later = [
            (await annotated(client, path, naming))[0]
            for path in ("plain", "plain/status", "plain/ephemeralcontainers")
        ]
        async with client.post(f"{PODS}/plain/binding", json=binding) as response:
            bound = response.status
        found = api.store.read("pods", "default", "plain")["metadata"].get("annotations", {})
        kept, _ = await annotated(client, "older", {"mine": "x"})
        removed, _ = await annotated(client, "older", {key: None})

    assert (new, bound, found) == (403, 403, {})
    assert later[:2] == [403, 403]
    assert key in text
    assert (kept, removed) == (200, 200)


@pytest.mark.parametrize(
    "key", ["leasehold.dev/lease", EXEMPT, ADMISSION, IDS, "cdi.k8s.io/any", "hami.io/vgpu-node"]
)
@pytest.mark.parametrize("path", ["plain", "gated", "plain/status", "plain/ephemeralcontainers"])
async def test_no_subresource_of_a_pod_changes_an_assignment(path: str, key: str) -> None:
    async with api_server() as api, api.client() as client:
        await created(client, pod("plain"))
        gated = pod("gated")
        gated["spec"]["schedulingGates"] = [{"name": "example.org/wait"}]
        await created(client, gated)
        await install(client)

        await annotated(client, path, {key: "GPU-a", "mine": "x"})
        found = api.store.read("pods", "default", path.partition("/")[0])
        status, text = await annotated(client, "plain/status", {"mine": "x"})

    assert key not in found["metadata"].get("annotations", {})
    assert status == 200, text


async def test_only_the_binder_lets_a_pod_through_the_gate_of_its_budget() -> None:
    gated = pod("gated")
    gates = [{"name": "example.org/wait"}, {"name": BUDGET_GATE}]
    gated["spec"]["schedulingGates"] = gates

    async def ungated(client: aiohttp.ClientSession, *left: dict[str, str]) -> int:
        body = {"spec": {"schedulingGates": list(left)}}
        return (await patched(client, f"{PODS}/gated", body))[0]

    async with api_server() as api, api.client() as client:
        await created(client, gated)
        await install(client)
        answers = [await ungated(client), await ungated(client, gates[1])]
        other, _ = await annotated(client, "gated", {"mine": "x"})
        last = await ungated(client)

    assert answers == [403, 200]
    assert (other, last) == (200, 403)


async def token_of_control_plane(client: aiohttp.ClientSession) -> str:
    """Return a token of an account in kube-system that may write the status of pods."""
    accounts = "/api/v1/namespaces/kube-system/serviceaccounts"
    rbac = "rbac.authorization.k8s.io"
    meta = {"name": "pod-garbage-collector"}
    rule = {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}
    subject = {"kind": "ServiceAccount", "namespace": "kube-system"} | meta
    binding = {
        "metadata": meta,
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole"} | meta,
        "subjects": [subject],
    }
    roles, bindings = (
        f"/apis/{rbac}/v1/{kind}" for kind in ("clusterroles", "clusterrolebindings")
    )
    await client.post(accounts, json={"metadata": meta})
    await client.post(roles, json={"metadata": meta, "rules": [rule]})
    await client.post(bindings, json=binding)
    async with client.post(f"{accounts}/{meta['name']}/token", json={}) as response:
        return str((await response.json())["status"]["token"])


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_a_pod_with_a_lease_is_ended_by_its_kubelet_and_the_control_plane_only(
    phase: str,
) -> None:
    async def ended(client: aiohttp.ClientSession, name: str, **headers: str) -> int:
        body = {"status": {"phase": phase}}
        return (await patched(client, f"{PODS}/{name}/status", body, **headers))[0]

    async with api_server() as api, api.client() as client:
        await created(client, pod("leased", **{"leasehold.dev/lease": "{}"}))
        await created(client, pod("plain"))
        await install(client)
        token = await token_of_control_plane(client)

        of_admin = [await ended(client, "leased"), await ended(client, "plain")]
        of_control_plane = await ended(client, "leased", Authorization=f"Bearer {token}")

    assert of_admin == [403, 200]
    assert of_control_plane == 200


@pytest.mark.parametrize("path", [f"{PODS}/waiting/binding", "/api/v1/namespaces/default/bindings"])
async def test_a_binding_carries_an_assignment_only_from_the_binder(path: str) -> None:
    binding = {
        "metadata": {"name": "waiting", "annotations": {"leasehold.dev/lease": "{}"}},
        "target": {"kind": "Node", "name": "node-0"},
    }
    async with api_server() as api, api.client() as client:
        await created(client, pod("waiting"))
        await install(client)
        async with client.post(path, json=binding) as response:
            status = response.status
            text = await response.text()
        binding["metadata"] = {"name": "waiting", "annotations": {"mine": "x"}}
        async with client.post(path, json=binding) as response:
            assert response.status == 201, await response.text()

    assert status == 403
    assert "leasehold.dev/lease" in text


async def test_the_status_of_a_node_changes_no_annotation_of_its_agent() -> None:
    key = "leasehold.dev/agent"
    async with api_server() as api, api.client() as client:
        api.store.create("nodes", {"metadata": {"name": "node-0", "annotations": {key: "true"}}})
        await install(client)
        notes = ({key: None}, {key: "false"}, {"leasehold.dev/own-x": "1"}, {"mine": "x"})
        answers = [
            await patched(
                client, "/api/v1/nodes/node-0/status", {"metadata": {"annotations": each}}
            )
            for each in notes
        ]

    assert [status for status, _ in answers] == [403, 403, 403, 200]


async def test_the_services_that_write_assignments_may_change_them() -> None:
    async with api_server() as api, api.client() as client:
        await created(client, pod("assigned", **{IDS: "x"}))
        await install(client, "kubernetes-admin")  # the client's user in the simulated API server

        status, text = await annotated(client, "assigned", {IDS: "y"})

    assert status == 200, text


WISH = {"gpu-fraction": "0.5"}
OWNED = "nvidia.com/container.main.gpus.devices"


async def test_the_annotations_by_which_a_pod_got_its_gpu_do_not_change() -> None:
    def kai_pod(name: str, **limits: str) -> dict[str, Any]:
        obj = pod(name, **WISH)
        obj["spec"]["schedulerName"] = "kai-scheduler"
        obj["spec"]["containers"][0]["resources"] = {"limits": limits}
        return obj

    async with api_server() as api, api.client() as client:
        await install(client)
        for obj in (kai_pod("ours", **{"leasehold.dev/share": "1"}), kai_pod("theirs")):
            status, text = await created(client, obj)
            assert status == 201, text

        changes: tuple[dict[str, str | None], ...] = (
            {"gpu-fraction": None},
            {"gpu-fraction": "0.9"},
            {"gpu-memory": "1"},
            {"mps": "true"},
            {OWNED: "GPU-a"},
        )
        ours = [await annotated(client, "ours", change) for change in changes]
        unchanged = [
            (await annotated(client, "ours", {**WISH, "mine": "x"}))[0],
            (await annotated(client, "ours/status", {"mine": "y"}))[0],
        ]
        theirs, _ = await annotated(client, "theirs", {OWNED: "GPU-a"})

    assert [status for status, _ in ours] == [403] * len(changes)
    assert all("create a new pod" in text for _, text in ours)
    assert unchanged == [200, 200]
    assert theirs == 200


async def test_who_changes_an_annotation_of_a_placed_pod_that_counts_no_more_is_warned() -> None:
    placed = pod("placed", **{MAX_RUN_TIME: "2h"})
    placed["spec"]["nodeName"] = "node-0"

    async def warning(name: str, notes: dict[str, str | None]) -> str:
        given = {"Content-Type": "application/merge-patch+json"}
        body = {"metadata": {"annotations": notes}}
        async with client.patch(f"{PODS}/{name}", json=body, headers=given) as response:
            assert response.status == 200, await response.text()
            return response.headers.get("Warning", "")

    async with api_server() as api, api.client() as client:
        await install(client)
        await created(client, placed)
        await created(client, pod("waiting"))

        others = [
            await warning("waiting", {ISOLATION: "strict"}),
            await warning("placed", {MAX_RUN_TIME: "2h", "mine": "x"}),
        ]
        changed = await warning("placed", {MAX_RUN_TIME: "3h"})
        removed = await warning("placed", {MAX_RUN_TIME: None})
        two = await warning("placed", {EXPECTED_RUN_TIME: "1h", ISOLATION: "strict"})

    assert others == ["", ""]
    assert f"the change of {MAX_RUN_TIME} has no effect" in changed
    assert "spec.activeDeadlineSeconds" in changed
    assert removed == changed
    assert f"the change of {ISOLATION}, {EXPECTED_RUN_TIME} has no effect" in two
    assert "spec.activeDeadlineSeconds" not in two


@pytest.mark.kubectl
async def test_kubectl_prints_that_an_annotation_comes_too_late(kubectl: Kubectl) -> None:
    placed = pod("placed")
    placed["spec"]["nodeName"] = "node-0"
    async with kubectl.api.client() as client:
        await install(client)
        await created(client, placed)

    shown = await kubectl.run(f"annotate pod placed {ISOLATION}=strict")

    assert f": the change of {ISOLATION} has no effect: it counts when a pod is created" in shown
    assert shown.startswith("Warning: Validation failed for ValidatingAdmissionPolicy ")
    assert "pod/placed annotated" in shown
