"""Which pods kube-scheduler gets, and how others that only it could place are denied."""

from typing import Any

import msgspec
import pytest

from services.webhook.admission import AdmissionDecision
from services.webhook.pod_admission import SchedulerChoice
from services.webhook.settings import WebhookSettings
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiPod
from shared.model.errors import RequestError
from shared.placing.pod_fields import FIELDS, Effect
from shared.pods.pod_parser import PodParser
from tests.support.webhook import reviews

FULL = "leasehold-full"
LABEL = "leasehold.dev/handed-over"
INSTALLED = SchedulerChoice(served=frozenset({"leasehold", FULL}), handover=FULL)
GPU = {"name": "main", "resources": {"limits": {"volcano.sh/vgpu-number": "1"}}}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HOST_PORT = [{"containerPort": 80, "hostPort": 80}]
RULES = [{"action": "RestartAllContainers"}]
SPREAD = {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
DISKS = ["awsElasticBlockStore", "azureDisk", "azureFile", "cinder", "gcePersistentDisk", "iscsi"]
DISKS += ["portworxVolume", "rbd", "vsphereVolume"]

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "spec.containers[].restartPolicyRules[] (action: RestartAllContainers)": (
        {"containers": [{**GPU, "restartPolicyRules": RULES}]},
        "spec.containers[0].restartPolicyRules[0]",
        "node-features",
    ),
    "spec.initContainers[].restartPolicyRules[] (action: RestartAllContainers)": (
        {"initContainers": [{"name": "init", "restartPolicyRules": RULES}]},
        "spec.initContainers[0].restartPolicyRules[0]",
        "node-features",
    ),
    "spec.hostUsers (hostUsers: false, hostNetwork: true)": (
        {"hostUsers": False, "hostNetwork": True},
        "spec.hostUsers",
        "node-features",
    ),
    "spec.resourceClaims[]": (
        {"resourceClaims": [{"name": "gpu", "resourceClaimName": "mine"}]},
        "spec.resourceClaims[0]",
        "resource-claims",
    ),
    **{
        f"spec.volumes[].{name}": (
            {"volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "data", name: {"x": "y"}}]},
            f"spec.volumes[1].{name}",
            "volumes",
        )
        for name in DISKS
    },
}
HARMLESS: tuple[dict[str, Any], ...] = (
    {},
    {"hostUsers": False, "hostNetwork": False},
    {"topologySpreadConstraints": [{**SPREAD, "whenUnsatisfiable": "ScheduleAnyway"}]},
    {"topologySpreadConstraints": [SPREAD]},
    {"affinity": {"podAffinity": {REQUIRED: [{"topologyKey": "zone"}]}}},
    {"affinity": {"podAntiAffinity": {REQUIRED: [{"topologyKey": "zone"}]}}},
    {"containers": [{**GPU, "ports": HOST_PORT}]},
    {"containers": [{**GPU, "restartPolicyRules": [{"action": "Restart"}]}]},
    {
        "volumes": [
            {"name": "v", "configMap": {"name": "c"}},
            {"name": "h", "hostPath": {"path": "/data"}},
            {"name": "d", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "e", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
        ]
    },
    {"resourceClaims": []},
)


def pod(spec: dict[str, Any], **more: Any) -> dict[str, Any]:
    return reviews.pod(**({"containers": [GPU]} | spec), **more)


def decided(obj: dict[str, Any], choice: SchedulerChoice) -> AdmissionDecision:
    return reviews.decided(obj, schedulers=choice)


def patched(obj: dict[str, Any], choice: SchedulerChoice) -> Any:
    return reviews.applied(obj, decided(obj, choice))


def test_every_field_that_is_handed_over_has_a_case() -> None:
    assert set(CASES) == {row.text for row in FIELDS if row.effect is Effect.HANDED_OVER}


@pytest.mark.parametrize("name", CASES)
def test_without_the_extender_the_pod_is_denied_and_the_field_named(name: str) -> None:
    spec, path, _ = CASES[name]

    decision = decided(pod(spec), SchedulerChoice())

    assert (decision.allowed, decision.code) == (False, 403)
    assert decision.message == (
        f"{path}: only kube-scheduler supports it, and Leasehold runs without the component "
        "kube-scheduler here: remove the field, or have an administrator add the component"
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scheduler", ["", "default-scheduler", "leasehold"])
def test_with_the_extender_the_pod_is_handed_over(name: str, scheduler: str) -> None:
    spec, _, reason = CASES[name]

    given = patched(pod({**spec, "schedulerName": scheduler}, labels={"app": "x"}), INSTALLED)

    assert given["spec"]["schedulerName"] == FULL
    assert given["metadata"]["labels"] == {"app": "x", LABEL: reason}


@pytest.mark.parametrize("name", CASES)
def test_the_watcher_finds_the_field_in_pods_that_no_webhook_has_seen(name: str) -> None:
    spec, path, _ = CASES[name]
    raw = msgspec.json.encode(pod({**spec, "schedulerName": "leasehold"}))

    request = PodParser(frozenset({"leasehold"}), Rules()).parse(
        msgspec.json.decode(raw, type=ApiPod)
    ).request  # fmt: skip

    assert request is not None
    assert request.node_requirements.unsupported == (path,)


@pytest.mark.parametrize("spec", HARMLESS)
@pytest.mark.parametrize("choice", [SchedulerChoice(), INSTALLED])
def test_other_pods_go_to_the_placer(spec: dict[str, Any], choice: SchedulerChoice) -> None:
    given = patched(pod(spec), choice)

    assert given["spec"]["schedulerName"] == "leasehold"
    assert "labels" not in given["metadata"]


def test_a_pod_whose_author_chose_kube_scheduler_with_the_extender_stays_as_it_is() -> None:
    spec, _, _ = CASES["spec.resourceClaims[]"]

    given = patched(pod({**spec, "schedulerName": FULL}), INSTALLED)

    assert given["spec"]["schedulerName"] == FULL
    assert "labels" not in given["metadata"]


@pytest.mark.parametrize("choice", [SchedulerChoice(), INSTALLED])
def test_a_pod_of_another_scheduler_stays_with_it(choice: SchedulerChoice) -> None:
    spec, _, _ = CASES["spec.resourceClaims[]"]

    decision = decided(pod({**spec, "schedulerName": "other"}), choice)

    assert decision.allowed
    assert not decision.patches
    assert "does not schedule the pod" in decision.warnings[0]


NO_GPU = {"containers": [{"name": "main"}], "volumes": [{"name": "v", "iscsi": {"x": "y"}}]}


def test_a_pod_without_gpus_is_denied_or_handed_over_if_it_names_our_scheduler() -> None:
    ours = {**NO_GPU, "schedulerName": "leasehold"}
    others = {**NO_GPU, "schedulerName": "other"}

    assert not decided(pod(ours), SchedulerChoice()).allowed
    assert patched(pod(ours), INSTALLED)["spec"]["schedulerName"] == FULL
    for spec in (NO_GPU, others):
        assert decided(pod(spec), SchedulerChoice()) == AdmissionDecision(allowed=True)
        assert decided(pod(spec), INSTALLED) == AdmissionDecision(allowed=True)


def test_kube_scheduler_gets_all_pods_where_that_is_set() -> None:
    settings = WebhookSettings(kube_scheduler=True, all_pods_by="kube-scheduler")

    given = patched(pod({"schedulerName": "volcano"}), settings.policy.schedulers)

    assert given["spec"]["schedulerName"] == FULL
    assert given["metadata"]["labels"] == {LABEL: "all-pods"}


def test_settings_that_would_leave_pods_without_a_scheduler_are_refused() -> None:
    with pytest.raises(RequestError, match="needs --kube-scheduler"):
        _ = WebhookSettings(all_pods_by="kube-scheduler").policy


LABELS = {"app": "train"}
GROUPED = {"notes": {"scheduling.k8s.io/group-name": "g"}, "labels": LABELS}


def term(app: str = "train", **more: Any) -> dict[str, Any]:
    selector = {"labelSelector": {"matchLabels": {"app": app}}}
    return {"topologyKey": "example.com/rack", **selector, **more}


@pytest.mark.parametrize(
    ("terms", "more", "is_shared", "has_rule"),
    [
        ([term()], GROUPED, True, False),
        ([term(namespaces=["ns"])], GROUPED, False, True),
        ([term()], {"labels": LABELS}, False, True),
        ([term("other")], GROUPED, False, True),
        ([term(), term("other")], GROUPED, True, True),
        ([term(namespaces=["elsewhere"])], GROUPED, False, True),
        ([term(namespaceSelector={})], GROUPED, False, True),
        ([{"topologyKey": "example.com/rack"}], GROUPED, False, True),
    ],
)
def test_affinity_of_the_pods_of_a_gang_to_one_another_is_a_topology(
    terms: list[dict[str, Any]], more: dict[str, Any], is_shared: bool, has_rule: bool
) -> None:
    required = {REQUIRED: terms}
    gang = pod({"affinity": {"podAffinity": required}}, **more)
    raw = msgspec.json.encode({**gang, "spec": {**gang["spec"], "schedulerName": "leasehold"}})

    decision = decided(gang, SchedulerChoice())
    observed = PodParser(frozenset({"leasehold"}), Rules()).parse(
        msgspec.json.decode(raw, type=ApiPod)
    )

    assert decision.allowed
    assert observed.request is not None
    rules = observed.request.pod_rules
    assert (rules is not None and rules.affinity is not None) == has_rule
    shared = ("example.com/rack",) if is_shared else ()
    assert observed.group is None or observed.group.topology.required == shared


OF_GANG = {
    "koordinator": {
        "notes": {
            "gang.scheduling.koordinator.sh/name": "g",
            "gang.scheduling.koordinator.sh/min-available": "2",
        }
    },
    "volcano": {"notes": {"scheduling.k8s.io/group-name": "g"}},
    "coscheduling": {"labels": {"scheduling.x-k8s.io/pod-group": "g"}},
}
ALONE = {
    "notes": {
        "gang.scheduling.koordinator.sh/name": "g",
        "gang.scheduling.koordinator.sh/min-available": "1",
    }
}


@pytest.mark.parametrize("gang", OF_GANG)
@pytest.mark.parametrize("name", CASES)
def test_a_gang_is_told_which_field_it_cannot_have(name: str, gang: str) -> None:
    spec, path, _ = CASES[name]

    for scheduler in ("", "leasehold", FULL):
        decision = decided(pod({**spec, "schedulerName": scheduler}, **OF_GANG[gang]), INSTALLED)

        assert (decision.allowed, decision.code) == (False, 403)
        assert decision.message.startswith(f"{path}: only kube-scheduler supports it; ")
        assert "the pod belongs to a gang, which starts together" in decision.message
        assert "schedulerName" not in decision.message, "another scheduler does not help"


def test_a_gang_that_names_kube_scheduler_without_a_reason_is_told_to_leave_it_out() -> None:
    decision = decided(pod({"schedulerName": FULL}, **OF_GANG["volcano"]), INSTALLED)

    assert decision.message.startswith(f"spec.schedulerName {FULL}: ")
    assert decision.message.endswith("leave it out")


def test_a_gang_of_one_is_handed_over() -> None:
    spec, _, _ = CASES["spec.resourceClaims[]"]

    assert patched(pod(spec, **ALONE), INSTALLED)["spec"]["schedulerName"] == FULL


def test_gangs_stay_with_the_placer_where_kube_scheduler_gets_all_pods() -> None:
    settings = WebhookSettings(kube_scheduler=True, all_pods_by="kube-scheduler")

    given = patched(pod({}, **OF_GANG["volcano"]), settings.policy.schedulers)

    assert given["spec"]["schedulerName"] == "leasehold"
