"""The webhook's configuration: bounded conditions, and the URL at which it registers itself."""

import re

import pytest

from services.webhook.registration import admission_policies, configuration, registered_url
from shared.model.errors import RequestError
from simcluster.apiserver.cel import conditions_hold


@pytest.mark.parametrize(
    ("url", "registered"),
    [
        ("https://webhook", "https://webhook:8443"),
        ("https://webhook/", "https://webhook:8443"),
        ("https://webhook:443", "https://webhook:443"),
        ("https://10.0.0.7:9443/gpus/", "https://10.0.0.7:9443/gpus"),
        ("https://[::1]", "https://[::1]:8443"),
        ("https://[::1]:1", "https://[::1]:1"),
    ],
)
def test_the_url_has_one_port(url: str, registered: str) -> None:
    assert registered_url(url, 8443) == registered


@pytest.mark.parametrize("url", ["webhook:443", "http://webhook", "https://", "https://w:port"])
def test_a_url_without_host_or_tls_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="--url"):
        registered_url(url, 8443)


def test_every_list_is_measured_before_a_condition_looks_at_its_items() -> None:
    hooks = configuration()["webhooks"]
    looks = [
        (found[1], text[: found.start()])
        for hook in hooks
        for text in [each["expression"] for each in hook["matchConditions"]]
        for found in re.finditer(r"([\w.]+)\.(?:exists|all|filter|map)\(", text)
        if "claims" not in hook["name"] or "pods" in hook["name"]
    ]

    assert looks
    for items, before in looks:
        measured = rf"{re.escape(items)}\.size\(\) (> \d+ \|\||<= \d+ &&) $"
        assert re.search(measured, before), f"{items} may be as long as the author likes"


@pytest.mark.parametrize(
    ("annotation", "is_reviewed"),
    [
        ("gpu-fraction", True),
        ("run.ai/gpu-fraction", True),
        ("runai/gpu-memory", True),
        ("kai.scheduler/gpu-fraction", True),
        ("run.ai/project", False),
    ],
)
def test_a_pod_that_requests_gpus_by_annotations_is_reviewed(
    annotation: str, is_reviewed: bool
) -> None:
    conditions = [
        condition
        for hook in configuration()["webhooks"]
        for condition in hook["matchConditions"]
        if "'gpu-fraction'" in condition["expression"]
    ]
    pod = {
        "metadata": {"name": "p", "annotations": {annotation: "0.5"}},
        "spec": {
            "schedulerName": "default-scheduler",
            "containers": [{"name": "main", "image": "app"}],
        },
    }
    variables = {"object": pod, "oldObject": None, "request": {"operation": "CREATE"}}

    assert conditions
    assert all(conditions_hold([it], variables) is is_reviewed for it in conditions)


def test_no_policy_searches_a_list_that_authors_of_pods_make_long() -> None:
    """The API server ends an expensive evaluation, which denies each later write of such a pod."""
    searched: list[tuple[str, str]] = []
    for policy in admission_policies():
        spec = policy["spec"]
        variables = {each["name"]: each["expression"] for each in spec.get("variables", ())}
        filtered = [name for name, text in variables.items() if ".filter(" in text]
        evaluated = [
            *variables.values(),
            *(each["expression"] for each in spec.get("validations", ())),
        ]
        searched += [
            (policy["metadata"]["name"], name)
            for name in filtered
            for text in evaluated
            if re.search(rf" in variables\.{name}\b", text)
        ]

    assert searched == []
    assert any(".filter(" in str(policy["spec"]) for policy in admission_policies())
