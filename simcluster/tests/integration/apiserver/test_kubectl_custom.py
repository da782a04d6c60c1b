"""Stock kubectl and custom kinds, webhooks, policies, quotas: applied, shown, waited for."""

import json

import pytest

from tests.support.kubernetes.kubectl import Kubectl, kubectl_on
from tests.support.simcluster.admission_webhook import configuration, deny, webhook_server
from tests.support.simcluster.apiserver import api_server
from tests.support.simcluster.definitions import DEVICES, POD_GROUPS, device, pod_group

pytestmark = pytest.mark.kubectl
kubectl = kubectl_on(api_server)


async def test_a_definition_and_its_objects_are_applied(kubectl: Kubectl) -> None:
    assert "created" in await kubectl.run("apply -f -", json.dumps(POD_GROUPS))
    waited = await kubectl.run(
        "wait --for=condition=Established crd/podgroups.scheduling.volcano.sh --timeout=20s"
    )
    assert "condition met" in waited
    assert "unchanged" in await kubectl.run("apply -f -", json.dumps(POD_GROUPS))
    assert "podgroups.scheduling.volcano.sh" in await kubectl.run("get crd")

    assert "podgroup.scheduling.volcano.sh/gang created" in await kubectl.run(
        "apply -f -", json.dumps(pod_group("gang"))
    )
    assert "configured" in await kubectl.run(
        "apply -f -", json.dumps(pod_group("gang", minMember=4))
    )
    table = (await kubectl.run("get pg")).splitlines()
    assert table[0].split() == ["NAME", "STATUS", "MINMEMBER", "AGE"]
    assert table[1].split()[:2] == ["gang", "4"]
    assert "QUEUE" in (await kubectl.run("get podgroups.scheduling.volcano.sh -owide"))
    assert "must be of type integer" in await kubectl.run(
        "apply -f -", json.dumps(pod_group("gang", minMember="x")), code=1
    )
    assert "minMember" in await kubectl.run("explain podgroups.spec")
    assert "gang" in await kubectl.run("describe pg gang")
    assert "deleted" in await kubectl.run("delete crd podgroups.scheduling.volcano.sh")
    assert "could not find the requested resource" in await kubectl.run("get pg", code=1)


async def test_a_cluster_scoped_kind_is_edited_by_every_kind_of_patch(kubectl: Kubectl) -> None:
    await kubectl.run("apply -f -", json.dumps(DEVICES))
    await kubectl.run("create -f -", json.dumps(device("node-1", {"id": "GPU-1", "minor": 0})))

    await kubectl.run("label device node-1 tier=a")
    await kubectl.run('patch device node-1 --type=merge -p {"spec":{"devices":[{"id":"GPU-2"}]}}')
    patch = '[{"op":"add","path":"/spec/devices/0/minor","value":3}]'
    await kubectl.run(f"patch device node-1 --type=json -p {patch}")
    applied = json.dumps(device("node-1", {"id": "GPU-3"}))
    await kubectl.run("apply --server-side --force-conflicts --dry-run=server -f -", applied)

    shown = json.loads(await kubectl.run("get devices.scheduling.koordinator.sh node-1 -ojson"))
    assert shown["spec"]["devices"] == [{"health": False, "id": "GPU-2", "minor": 3}]
    assert shown["metadata"]["labels"] == {"tier": "a"}
    assert "node-1" in await kubectl.run("get devices -l tier=a -o name")


async def test_objects_of_an_undefined_kind_are_refused(kubectl: Kubectl) -> None:
    output = await kubectl.run("apply -f -", json.dumps(device("node-1")), code=1)

    assert 'no matches for kind "Device" in version "scheduling.koordinator.sh/v1alpha1"' in output
    assert "doesn't have a resource type" in await kubectl.run("get devices", code=1)


async def test_quotas_and_classes_are_created_and_shown(kubectl: Kubectl) -> None:
    await kubectl.run("create quota gpus --hard=pods=1,requests.nvidia.com/gpu=4")
    await kubectl.run("create priorityclass high --value=10")
    await kubectl.run("run first --image=example/image:1")

    output = await kubectl.run("run second --image=example/image:1", code=1)
    described = await kubectl.run("describe quota gpus")

    assert "exceeded quota: gpus, requested: pods=1, used: pods=1, limited: pods=1" in output
    assert ["requests.nvidia.com/gpu", "0", "4"] in [
        line.split() for line in described.splitlines()
    ]
    assert "pods: 1/1" in await kubectl.run("get quota")
    assert "high" in await kubectl.run("get priorityclasses")


async def test_a_webhook_is_installed_and_its_denial_is_shown(kubectl: Kubectl) -> None:
    async with webhook_server() as hooks:
        config = configuration("Validating", "guard", hooks.hook("guard", deny("not today")))
        await kubectl.run("apply -f -", json.dumps(config))
        version = kubectl.api.store.version
        await kubectl.run("apply -f -", json.dumps(config))
        assert kubectl.api.store.version == version

        output = await kubectl.run("run web --image=example/image:1", code=1)

        assert 'admission webhook "guard.leasehold.dev" denied the request: not today' in output
        await kubectl.run("delete validatingwebhookconfiguration guard")
        await kubectl.run("run web --image=example/image:1")
        assert "web" in await kubectl.run("get events.events.k8s.io,pods")


async def test_a_policy_is_installed_and_warns(kubectl: Kubectl) -> None:
    rule = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"],
            "resources": ["pods"]}  # fmt: skip
    head = "admissionregistration.k8s.io/v1"
    policy = {"apiVersion": head, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": "p"},
              "spec": {"matchConstraints": {"resourceRules": [rule]},
                       "validations": [{"expression": "false", "message": "mind"}]}}  # fmt: skip
    binding = {"apiVersion": head, "kind": "ValidatingAdmissionPolicyBinding",
               "metadata": {"name": "b"},
               "spec": {"policyName": "p", "validationActions": ["Warn"]}}  # fmt: skip
    for obj in (policy, binding):
        await kubectl.run("apply -f -", json.dumps(obj))

    output = await kubectl.run("run web --image=example/image:1")

    assert "Validation failed for ValidatingAdmissionPolicy 'p' with binding 'b': mind" in output
