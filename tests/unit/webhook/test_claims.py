"""Pods with ResourceClaims must not set what pods with GPUs must not: claims may be for GPUs."""

from typing import Any

import pytest

from services.webhook.admission import AdmissionDecision, AdmissionPolicy, decide_update
from tests.support.webhook import reviews
from tests.support.webhook.reviews import Obj, applied, container, env, pod, reviewed
from tests.unit.webhook.test_pod_policy import CUDA, host_path, mounted, visible

CLAIM = {"resources": {"claims": [{"name": "gpu"}]}}
WHOLE = {"resources": {"limits": {"leasehold.dev/whole-gpu": "1"}}}
BY_CLASS = {"resources": {"limits": {"deviceclass.resource.kubernetes.io/any": "1"}}}
CLAIMS = [{"name": "gpu", "resourceClaimName": "gpu"}]
ROOTED: Obj = {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}


def decided(obj: Obj, *, exempt: bool = False, claims: bool = True) -> AdmissionDecision:
    return reviews.decided(obj, exempt=exempt, claims=claims)


def claiming(*others: Obj, own: Obj | None = None, **spec: Any) -> Obj:
    return pod(container("main") | CLAIM | (own or {}), *others, resourceClaims=CLAIMS, **spec)


DENIED = (
    (claiming(own=mounted("/etc/ld.so.preload")), "could replace /etc/ld.so.preload"),
    (claiming(own=env("LD_PRELOAD", "")), "variable LD_PRELOAD is set by the lease only"),
    (claiming(own=env("CUDA_DEVICE_MEMORY_LIMIT_0", "9g")), "is set by the lease only"),
    (claiming(own={"envFrom": [{"configMapRef": {"name": "a"}}]}), "envFrom without a prefix"),
    (claiming(container() | ROOTED), "capability SYS_ADMIN"),
    (claiming(container(securityContext={"privileged": True})), "is privileged"),
    (claiming(volumes=host_path("/dev")), "hostPath /dev gives access"),
    (claiming(hostPID=True), "hostPID"),
    (claiming(shareProcessNamespace=True), "shareProcessNamespace"),
    (claiming(nodeName="n0"), "nodeName"),
    (pod(container("main") | WHOLE | ROOTED), "capability SYS_ADMIN"),
    (pod(container("main") | BY_CLASS | ROOTED), "capability SYS_ADMIN"),
)


@pytest.mark.parametrize("scheduler", ["", "default-scheduler", "leasehold-full", "theirs"])
@pytest.mark.parametrize(("obj", "message"), DENIED)
def test_what_would_lift_limits_is_denied_under_any_scheduler(
    obj: Obj, message: str, scheduler: str
) -> None:
    decision = decided(obj | {"spec": obj["spec"] | {"schedulerName": scheduler}})

    assert not decision.allowed
    assert message in decision.message


def test_a_pod_with_claims_is_admitted_without_a_request_of_its_own() -> None:
    decision = decided(claiming())

    assert decision.allowed
    assert not decision.requests_gpu


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
@pytest.mark.parametrize("fields", [{}, env("NVIDIA_VISIBLE_DEVICES", "all"), {"image": CUDA}])
def test_only_the_claim_gives_its_pod_a_device(kind: str, fields: Obj) -> None:
    obj = claiming()
    obj["spec"][kind] = [*obj["spec"].get(kind, ()), container() | fields]

    shown = applied(obj, decided(obj))["spec"]

    assert visible(shown[kind][-1]) == "void"
    assert visible(shown["containers"][0]) == "void"


@pytest.mark.parametrize("own", [{}, {"image": CUDA}, CLAIM | {"image": CUDA}])
def test_what_a_webhook_has_completed_is_admitted_by_the_next(own: Obj) -> None:
    """API servers call the one that hides devices first, and some again after other webhooks."""
    obj = claiming(own=own)

    again = applied(obj, decided(obj))

    assert decided(again).allowed
    assert visible(again["spec"]["containers"][0]) == "void"


def test_an_exempt_namespace_and_a_cluster_without_claims_have_no_such_rules() -> None:
    obj = claiming(container() | ROOTED)

    assert decided(obj, exempt=True).allowed
    assert decided(obj, claims=False).allowed
    assert not decided(obj).allowed


def test_an_ephemeral_container_of_a_pod_with_claims_is_reviewed() -> None:
    old = claiming()
    debug = container("debug", targetContainerName="main") | ROOTED
    new = old | {"spec": old["spec"] | {"ephemeralContainers": [debug]}}

    decision = decide_update(reviewed(new), reviewed(old), AdmissionPolicy(claims=True))

    assert not decision.allowed
    assert "capability SYS_ADMIN" in decision.message
    assert "targetContainerName main has GPUs" in decision.message
