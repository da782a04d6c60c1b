"""Manifests of any shape: what is no pod or claim is refused in words."""

import pytest

from shared.kubernetes.manifest_claims import claims_in
from shared.kubernetes.manifests import pods_in
from shared.model.errors import RequestError


@pytest.mark.parametrize("spec", ["5", "tasks", "[tasks]", "{tasks: 5}", "{tasks: [5]}"])
def test_a_job_without_a_template_or_tasks_is_refused(spec: str) -> None:
    with pytest.raises(RequestError, match="Job train has no pod spec"):
        pods_in(f"{{kind: Job, metadata: {{name: train}}, spec: {spec}}}", "job.yaml")


def test_a_list_that_contains_itself_is_refused_by_the_readers_of_claims_too() -> None:
    with pytest.raises(
        RequestError, match=r"list\.yaml is too large once its aliases are filled in"
    ):
        claims_in("&all {kind: List, items: [*all]}", "list.yaml")


@pytest.mark.parametrize("document", ["{kind: [ResourceClaim]}", "{kind: 5}", "text"])
def test_what_has_no_kind_is_no_claim(document: str) -> None:
    assert claims_in(document, "file.yaml") == []
