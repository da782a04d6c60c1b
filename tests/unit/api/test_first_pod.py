"""The pod to try requests what a node serves, and is admitted."""

import pytest
import yaml

from services.api.first_pod import EXAMPLES, first_pod
from services.webhook.admission import AdmissionPolicy, decide
from tests.support.webhook.reviews import reviewed


@pytest.mark.parametrize("resource", EXAMPLES)
def test_the_pod_to_try_is_admitted_and_requests_a_gpu(resource: str) -> None:
    manifest = first_pod(["other", resource])
    assert manifest is not None
    pod = reviewed(yaml.safe_load(manifest), "default")

    decision = decide(pod, AdmissionPolicy())

    assert decision.allowed, decision.message
    assert decision.requests_gpu
    assert resource in manifest


def test_there_is_none_if_no_node_serves_a_resource() -> None:
    assert first_pod([]) is None
