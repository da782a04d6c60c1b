"""What the simulated API server fills into pods, and what it refuses in them."""

import pytest

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, deep_copy
from simcluster.apiserver.kinds.namespaces import create_system_objects
from simcluster.apiserver.registry import open_store
from simcluster.apiserver.storage.store import ObjectStore


def a_cluster() -> ObjectStore:
    store = open_store()
    create_system_objects(store)
    return store


def a_pod(resources: Json | None = None, **spec: object) -> Json:
    container = {"name": "main", "image": "example/image", "resources": resources or {}}
    return {
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"containers": [container], **spec},
    }


def causes_of(pod: Json) -> dict[str, str]:
    with pytest.raises(ApiError) as refused:
        a_cluster().create("pods", pod)
    assert refused.value.code == 422
    causes = (refused.value.details or {})["causes"]
    return {cause["field"]: cause["reason"] for cause in causes}


def test_defaults_are_those_of_kubernetes() -> None:
    pod = a_cluster().create("pods", a_pod())

    spec = pod["spec"]
    container = pod["spec"]["containers"][0]
    assert spec["restartPolicy"] == "Always"
    assert spec["terminationGracePeriodSeconds"] == 30
    assert spec["schedulerName"] == "default-scheduler"
    assert spec["dnsPolicy"] == "ClusterFirst"
    assert spec["enableServiceLinks"] is True
    assert spec["priority"] == 0
    assert spec["serviceAccountName"] == "default"
    assert [toleration["tolerationSeconds"] for toleration in spec["tolerations"]] == [300, 300]
    assert container["imagePullPolicy"] == "Always"
    assert container["terminationMessagePath"] == "/dev/termination-log"
    assert pod["status"] == {"phase": "Pending", "qosClass": "BestEffort"}


def test_requests_follow_limits_and_numbers_become_text() -> None:
    pod = a_cluster().create("pods", a_pod({"limits": {"volcano.sh/gpu-memory": 1024}}))

    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"] == {"volcano.sh/gpu-memory": "1024"}


@pytest.mark.parametrize(
    ("resources", "qos_class"),
    [
        ({}, "BestEffort"),
        ({"limits": {"example.com/gpu": 1}}, "BestEffort"),
        ({"requests": {"cpu": "1"}}, "Burstable"),
        ({"limits": {"cpu": "1"}}, "Burstable"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}}, "Guaranteed"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}, "Burstable"),
    ],
)
def test_quality_of_service_comes_from_cpu_and_memory(resources: Json, qos_class: str) -> None:
    assert a_cluster().create("pods", a_pod(resources))["status"]["qosClass"] == qos_class


def test_priority_comes_from_its_class() -> None:
    store = a_cluster()

    critical = store.create("pods", a_pod(priorityClassName="system-node-critical"))

    assert critical["spec"]["priority"] == 2_000_001_000
    with pytest.raises(ApiError, match="no PriorityClass with name absent was found") as refused:
        store.create("pods", a_pod(priorityClassName="absent"))
    assert refused.value.code == 403


def test_default_tolerations_do_not_replace_those_of_the_pod() -> None:
    own = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 5}

    pod = a_cluster().create("pods", a_pod(tolerations=[own]))

    assert [toleration["tolerationSeconds"] for toleration in pod["spec"]["tolerations"]] == [
        5,
        300,
    ]


@pytest.mark.parametrize(
    ("pod", "field", "reason"),
    [
        (a_pod(containers=[]), "spec.containers", "FieldValueRequired"),
        (a_pod(containers=[{"image": "x"}]), "spec.containers[0].name", "FieldValueRequired"),
        (a_pod(containers=[{"name": "a"}]), "spec.containers[0].image", "FieldValueRequired"),
        (
            a_pod(containers=[{"name": "a", "image": "x"}, {"name": "a", "image": "x"}]),
            "spec.containers[1].name",
            "FieldValueDuplicate",
        ),
        (a_pod(restartPolicy="Sometimes"), "spec.restartPolicy", "FieldValueNotSupported"),
        (
            a_pod({"limits": {"cpu": "much"}}),
            "spec.containers[0].resources.limits[cpu]",
            "FieldValueInvalid",
        ),
        (
            a_pod({"limits": {"volcano.sh/gpu-memory": "0.5"}}),
            "spec.containers[0].resources.limits[volcano.sh/gpu-memory]",
            "FieldValueInvalid",
        ),
        (
            a_pod({"requests": {"volcano.sh/gpu-memory": 1}}),
            "spec.containers[0].resources.limits",
            "FieldValueRequired",
        ),
        (
            a_pod({"limits": {"example.com/a": 2}, "requests": {"example.com/a": 1}}),
            "spec.containers[0].resources.requests",
            "FieldValueInvalid",
        ),
        (
            a_pod({"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}),
            "spec.containers[0].resources.requests",
            "FieldValueInvalid",
        ),
        (
            a_pod({"limits": {"gpus": 1}}),
            "spec.containers[0].resources.limits[gpus]",
            "FieldValueInvalid",
        ),
    ],
)
def test_invalid_fields_are_named(pod: Json, field: str, reason: str) -> None:
    assert causes_of(pod)[field] == reason


def test_all_invalid_fields_are_named_at_once() -> None:
    pod = a_pod(containers=[{}])
    pod["metadata"] |= {"name": "Web_1", "labels": {"a": "b c"}}

    assert set(causes_of(pod)) == {
        "metadata.name",
        "metadata.labels",
        "spec.containers[0].name",
        "spec.containers[0].image",
    }


def test_most_of_the_spec_is_immutable() -> None:
    store = a_cluster()
    pod = deep_copy(store.create("pods", a_pod()))

    image = deep_copy(pod)
    image["spec"]["containers"][0]["image"] = "example/image:2"
    node = deep_copy(pod)
    node["spec"]["nodeName"] = "node-0"

    with pytest.raises(ApiError) as refused:
        store.update("pods", node)
    assert refused.value.code == 422
    assert store.update("pods", image)["spec"]["containers"][0]["image"] == "example/image:2"
