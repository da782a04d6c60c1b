"""Pods that demand a server of MPS that others use: refused by the webhook, and by the watcher."""

from typing import Any

import jsonpatch
import msgspec
import pytest

from shared.dialects.dialect import Rules
from shared.dialects.reserved import EXEMPT
from shared.kubernetes.types import ApiPod
from shared.model.change import Change, Place
from shared.model.names import ISOLATION
from shared.pods.manifest_patches import json_patch
from shared.pods.pod_parser import PodParser
from tests.support.webhook.reviews import Obj, container, decided, pod

PART = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}
WHOLE = {"nvidia.com/gpu": "1"}
SHARED = {ISOLATION: "mps-shared"}
PARSER = PodParser(frozenset({"leasehold"}), Rules())
NO_SETUID = {"allowPrivilegeEscalation": False}
SAFE = {"runAsUser": 1000, **NO_SETUID}
USER_ZERO = "main could run programs of user 0, which can lift the limits of all"
SET_USER = "set securityContext.runAsNonRoot: true"
SET_SETUID = "securityContext.allowPrivilegeEscalation: false"
SET_NAMESPACE = "set hostUsers: false of the pod"


def secured(context: Obj | None = None, of_pod: Obj | None = None, **spec: Any) -> Obj:
    """Return a pod that demands a shared server, with what its container and itself run as."""
    fields = {} if context is None else {"securityContext": context}
    spec |= {} if of_pod is None else {"securityContext": of_pod}
    return pod(container("main", PART, **fields), notes=SHARED, schedulerName="leasehold", **spec)


def error_at_watch(obj: Obj, **notes: str) -> str:
    """Return why the watcher rejects a pod; empty if it is read."""
    stored: Obj = {"namespace": "team-a", "uid": "u", "resourceVersion": "1"}
    meta = {**obj["metadata"], **stored}
    meta["annotations"] = {**meta.get("annotations", {}), **notes}
    return PARSER.parse(msgspec.convert({**obj, "metadata": meta}, ApiPod)).request_error


ADMITTED = {
    "user": secured(SAFE),
    "any user but 0": secured({"runAsNonRoot": True, **NO_SETUID}),
    "the pod's user": secured(NO_SETUID, {"runAsUser": 1000}),
    "the pod's any user but 0": secured(NO_SETUID, {"runAsNonRoot": True}),
    "own user instead of the pod's 0": secured(SAFE, {"runAsUser": 0}),
    "user namespace": secured(hostUsers=False),
    "user 0 of a user namespace": secured({"runAsUser": 0}, hostUsers=False),
}
REFUSED = {
    "nothing": (secured(), SET_USER),
    "no setuid alone": (secured(NO_SETUID), SET_USER),
    "user alone": (secured({"runAsUser": 1000}), SET_SETUID),
    "any user but 0 alone": (secured({"runAsNonRoot": True}), SET_SETUID),
    "setuid": (secured({**SAFE, "allowPrivilegeEscalation": True}), SET_SETUID),
    "user 0": (secured({"runAsUser": 0, **NO_SETUID}), SET_NAMESPACE),
    "own user 0 instead of the pod's": (
        secured({"runAsUser": 0, **NO_SETUID}, {"runAsUser": 1000}),
        SET_NAMESPACE,
    ),
    "the pod's user 0": (secured(NO_SETUID, {"runAsUser": 0, "runAsNonRoot": True}), SET_NAMESPACE),
    "own root instead of the pod's any user but 0": (
        secured({"runAsNonRoot": False, **NO_SETUID}, {"runAsNonRoot": True}),
        SET_USER,
    ),
    "no user namespace": (secured(hostUsers=True), SET_USER),
}


@pytest.mark.parametrize("obj", ADMITTED.values(), ids=ADMITTED)
def test_containers_that_are_not_user_0_may_have_shares_by_a_shared_server(obj: Obj) -> None:
    decision = decided(obj)

    assert decision.allowed, decision.message
    assert error_at_watch(obj) == ""


@pytest.mark.parametrize(("obj", "advice"), REFUSED.values(), ids=REFUSED)
def test_user_0_is_kept_from_a_shared_server_by_webhook_and_watcher(obj: Obj, advice: str) -> None:
    decision = decided(obj)

    assert (decision.allowed, decision.code) == (False, 403)
    assert USER_ZERO in decision.message
    assert advice in decision.message
    assert error_at_watch(obj) == decision.message


@pytest.mark.parametrize(("obj", "advice"), REFUSED.values(), ids=REFUSED)
def test_what_the_denial_says_to_set_is_enough(obj: Obj, advice: str) -> None:
    operations = json_patch(obj, decided(obj).changes)

    mended = jsonpatch.apply_patch(obj, msgspec.to_builtins(operations))

    assert advice
    assert decided(mended).allowed
    assert error_at_watch(mended) == ""


def test_which_user_a_pod_in_the_nodes_network_has_only_a_person_can_choose() -> None:
    decision = decided(secured({"runAsUser": 0}, hostNetwork=True))

    assert not decision.allowed
    assert decision.changes == ()


@pytest.mark.parametrize("restart", [None, "Always"], ids=["init container", "sidecar"])
def test_every_container_with_a_share_is_checked_and_no_other(restart: str | None) -> None:
    obj = secured(SAFE)
    obj["spec"]["containers"].append(container("side"))
    first = container("first", PART) | ({"restartPolicy": restart} if restart else {})
    with_first = {**obj, "spec": {**obj["spec"], "initContainers": [first]}}

    assert decided(obj).allowed
    assert "container first could run programs of user 0" in decided(with_first).message
    assert "container first could run programs of user 0" in error_at_watch(with_first)


@pytest.mark.parametrize(
    ("limits", "demand"),
    [(PART, "mps"), (PART, "memory=driver,compute=mps"), (PART, "driver"), (WHOLE, "mps-shared")],
)
def test_user_0_may_have_what_no_other_pods_use(limits: dict[str, str], demand: str) -> None:
    obj = pod(container("main", limits), notes={ISOLATION: demand}, schedulerName="leasehold")

    assert decided(obj).allowed
    assert error_at_watch(obj) == ""


def test_the_demand_of_a_namespace_is_a_pods_own() -> None:
    obj = pod(container("main", PART))

    assert USER_ZERO in decided(obj, isolation="memory=driver,compute=mps-shared").message
    assert decided(obj, isolation="mps").allowed


def test_no_exemption_lets_user_0_reach_a_server_of_other_pods() -> None:
    assert USER_ZERO in decided(secured(), exempt=True).message
    assert USER_ZERO in error_at_watch(secured(), **{EXEMPT: "true"})
    assert decided(secured(SAFE), exempt=True).allowed


@pytest.mark.parametrize(
    ("demand", "instead"),
    [
        ("mps-shared", "memory=mps,compute=mps"),
        ("memory=driver,compute=mps-shared", "memory=driver,compute=mps"),
    ],
)
def test_a_container_has_shares_of_one_gpu_by_a_shared_server(demand: str, instead: str) -> None:
    two = PART | {"nvidia.com/gpu": "2"}
    main = container("main", two, securityContext=SAFE)
    obj = pod(main, notes={ISOLATION: demand}, schedulerName="leasehold")
    apart = pod(
        *(container(name, PART, securityContext=SAFE) for name in ("main", "side")),
        notes={ISOLATION: demand},
    )

    decision = decided(obj)

    assert (decision.allowed, decision.code) == (False, 400)
    assert "container main requests shares of 2 GPUs" in decision.message
    assert f"write {instead}" in decision.message
    assert decision.changes == (Change(Place.ANNOTATION, ISOLATION, instead),)
    assert error_at_watch(obj) == decision.message
    assert decided(apart).allowed
    whole = container("main", {"nvidia.com/gpu": "2"})
    assert decided(pod(whole, notes={ISOLATION: demand})).allowed
