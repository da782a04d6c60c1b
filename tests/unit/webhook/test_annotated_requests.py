"""Pods that request GPUs by annotations: admission gives their container our resource."""

from typing import Any

import msgspec
import pytest

from services.webhook.admission import AdmissionDecision
from services.webhook.pod_admission import DeviceMaximum, SchedulerChoice
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiPod
from shared.model.devices.device import required_memory_mib
from shared.model.requests.request import PodRequest
from shared.pods.pod_parser import parse_manifest
from tests.support.build import device
from tests.support.dialects.kai_pods import GUIDE, SCHEDULER, is_kais_own, kai_pod
from tests.support.webhook.reviews import Obj, applied, container, decided, gpu, pod

SERVED = SchedulerChoice(served=frozenset({"leasehold", SCHEDULER}))
HALF = {"gpu-fraction": "0.5"}
SHARE = "leasehold.dev/share"


def reviewed(obj: Obj, **policy: Any) -> AdmissionDecision:
    return decided(obj, schedulers=SERVED, **policy)


def parsed(obj: Obj) -> PodRequest:
    """Return the request that a watcher reads."""
    meta = {"name": "pod", "namespace": "ns", "uid": "u1"} | obj["metadata"]
    whole = msgspec.json.decode(msgspec.json.encode(obj | {"metadata": meta}), type=ApiPod)
    observed = parse_manifest(whole, Rules())
    assert observed.request is not None, observed.request_error
    return observed.request


@pytest.mark.parametrize("example", GUIDE)
def test_each_example_of_the_guide_is_admitted_and_read_as_it_is(example: str) -> None:
    obj, (name, gpus, mib) = GUIDE[example]

    decision = reviewed(obj)
    completed = applied(obj, decision)

    [request] = parsed(completed).containers
    assert decision.requests_gpu
    assert (request.container, request.gpus) == (name, gpus)
    assert required_memory_mib(request, device(memory_mib=15_360)) == mib
    resources = {
        item["name"]: item["resources"].get("limits", {})
        for kind in ("initContainers", "containers")
        for item in completed["spec"].get(kind, [])
    }
    assert {name: limits for name, limits in resources.items() if limits} == {
        name: {SHARE: str(gpus)}
    }
    assert completed["spec"]["schedulerName"] == SCHEDULER
    assert parsed(obj) == parsed(completed)


@pytest.mark.parametrize("example", GUIDE)
def test_words_20_admission_writes_no_key_of_kais_own_components(example: str) -> None:
    obj, _ = GUIDE[example]

    completed = applied(obj, reviewed(obj))["metadata"]

    for field in ("annotations", "labels"):
        written = completed[field].items() - obj["metadata"][field].items()
        assert [key for key, _ in written if is_kais_own(key)] == []


def test_words_12_a_queue_is_warned_of_once_and_changes_nothing() -> None:
    obj = kai_pod(notes=HALF)
    unqueued = {**obj, "metadata": {**obj["metadata"], "labels": {}}}

    [warning] = [text for text in reviewed(obj).warnings if "kai.scheduler/queue" in text]

    assert warning.endswith("has no effect: there are no queues; namespaces share by their budgets")
    assert parsed(obj) == parsed(unqueued)
    assert reviewed(unqueued).warnings == ()


def test_a_container_with_other_limits_keeps_them_and_a_second_review_changes_nothing() -> None:
    obj = kai_pod(container("main", {"cpu": "2", "memory": "4Gi"}), notes=HALF)

    once = applied(obj, reviewed(obj))
    twice = applied(once, reviewed(once))

    resources = once["spec"]["containers"][0]["resources"]
    assert resources["limits"] == {"cpu": "2", "memory": "4Gi", SHARE: "1"}
    assert resources["requests"] == {"cpu": "2", "memory": "4Gi", SHARE: "1"}
    assert twice == once


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        ({"gpu-fraction": "1.0"}, "gpu-fraction must be a decimal number"),
        ({"gpu-memory": "2Gi"}, "gpu-memory must be a whole number of MiB"),
        ({"mps": "true"}, "mps is 'true', and the pod requests no part of a GPU"),
        (HALF | {"nvidia.com/container.main.gpus.devices": "GPU-a"}, "KAI's binder only"),
    ],
)
def test_a_wrong_word_denies_the_pod_with_key_and_value(notes: dict[str, str], text: str) -> None:
    decision = reviewed(kai_pod(notes=notes))

    assert (decision.allowed, decision.code) == (False, 400)
    assert text in decision.message


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_a_whole_gpu_beside_a_fraction_denies_the_pod(kind: str) -> None:
    whole = container("whole", {"nvidia.com/gpu": "1"})
    obj = kai_pod(container("main"), notes=HALF)
    obj["spec"][kind] = [*obj["spec"].get(kind, []), whole]

    decision = reviewed(obj)

    assert not decision.allowed
    assert "container whole requests nvidia.com/gpu" in decision.message


def test_where_kais_scheduler_is_not_served_its_pods_are_left_alone() -> None:
    decision = decided(kai_pod(notes=HALF))

    assert decision.allowed
    assert (decision.patches, decision.warnings, decision.requests_gpu) == ((), (), False)


@pytest.mark.parametrize("key", ["gpu-fraction", "nvidia.com/container.main.gpu-memory.request"])
def test_the_words_in_a_pod_of_another_scheduler_are_warned_of_and_have_no_effect(key: str) -> None:
    notes = {key: "1Gi"}
    for obj in (pod(container("main"), notes=notes), pod(gpu(), notes=notes)):
        decision = reviewed(obj)

        assert decision.allowed
        assert not any(SHARE in patch.path for patch in decision.patches)
        [warning] = [text for text in decision.warnings if key in text]
        assert "has no effect: it is read in pods with schedulerName kai-scheduler only" in warning


@pytest.mark.parametrize(
    ("notes", "text"),
    [
        ({"gpu-sm-percentage": "30"}, "gpu-sm-percentage has no effect: a part of the compute is"),
        ({"gpu-sm-cores": "30"}, "gpu-sm-cores has no effect"),
        ({"gpu-memory.limit": "30"}, "gpu-memory.limit has no effect: the container gets what it"),
        ({"gpu-fraction.limit": "0.9"}, "gpu-fraction.limit has no effect"),
        ({"gpu-fraction-container": "main"}, "gpu-fraction-container has no effect: it is unknown"),
        ({"pod-group-name": "pg"}, "pod-group-name has no effect: KAI's pod grouper writes it"),
        (
            {"kai.scheduler/container.main.gpu-memory.portion.limit": "0.75"},
            "portion.limit has no effect: the container gets what it requests",
        ),
        (
            {"mps": "true"},
            "the pod demands MPS, which nodes offer only where --mps of their agents is private",
        ),
        ({}, "kai.scheduler/queue has no effect: there are no queues"),
    ],
)
def test_words_13_a_word_of_kai_without_effect_is_warned_of(
    notes: dict[str, str], text: str
) -> None:
    decision = reviewed(kai_pod(notes=HALF | notes))

    assert decision.allowed, decision.message
    assert any(text in warning for warning in decision.warnings), decision.warnings


def test_a_limit_above_the_request_is_warned_of_and_an_equal_one_is_not() -> None:
    own = "nvidia.com/container.main.gpu-memory."
    for limit, warned in (("2Gi", True), ("1Gi", False)):
        notes = {f"{own}request": "1Gi", f"{own}limit": limit}

        warnings = reviewed(kai_pod(notes=notes)).warnings

        assert any(f"{own}limit has no effect" in text for text in warnings) == warned


def test_more_memory_than_any_gpu_has_is_denied() -> None:
    obj = kai_pod(notes={"gpu-memory": "20000"})
    largest = DeviceMaximum(memory_mib=15_360, memory_units=15_360)

    decision = decided(obj, schedulers=SERVED, largest=largest)

    assert not decision.allowed
    assert "requests 20000 MiB of one GPU" in decision.message
    assert "set ," not in decision.message


@pytest.mark.parametrize("path", ["/tmp/nvidia-mps", "/run/nvidia/mps/pipe"])
def test_a_volume_with_a_pipe_of_mps_is_denied_with_the_hint_that_none_is_needed(path: str) -> None:
    volumes = [{"name": "mps", "hostPath": {"path": path}}]

    decision = reviewed(kai_pod(notes=HALF, volumes=volumes))

    assert not decision.allowed
    assert f"hostPath {path} leads to a server of MPS, which no pod mounts here" in decision.message


def test_what_the_container_must_not_set_is_denied_as_for_any_pod_with_gpus() -> None:
    variable = {"name": "CUDA_DEVICE_MEMORY_LIMIT_0", "value": "0"}

    decision = reviewed(kai_pod(container("main", env=[variable]), notes=HALF))

    assert not decision.allowed
    assert "CUDA_DEVICE_MEMORY_LIMIT_0" in decision.message


def test_another_container_of_the_pod_sees_no_device() -> None:
    obj = kai_pod(container("main"), container("side", image="nvidia/cuda"), notes=HALF)

    completed = applied(obj, reviewed(obj))

    main, side = completed["spec"]["containers"]
    assert "env" not in main
    assert side["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]


def test_a_pod_that_only_kube_scheduler_can_place_is_read_after_it_is_handed_over() -> None:
    choice = SchedulerChoice(served=SERVED.served | {"leasehold-full"}, handover="leasehold-full")
    volumes = [{"name": "disk", "iscsi": {"targetPortal": "x", "iqn": "y", "lun": 0}}]
    obj = kai_pod(notes=HALF, volumes=volumes)

    completed = applied(obj, decided(obj, schedulers=choice))

    assert completed["spec"]["schedulerName"] == "leasehold-full"
    assert parsed(completed).containers == parsed(kai_pod(notes=HALF)).containers


def test_a_selector_of_replicas_is_warned_of_in_a_pod_with_amounts() -> None:
    obj = pod(gpu(), nodeSelector={"nvidia.com/gpu.sharing-strategy": "time-slicing"})

    decision = reviewed(obj)

    assert decision.allowed
    assert any("as it requests amounts" in text for text in decision.warnings)
