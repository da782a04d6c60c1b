"""Examples and objects on pages are valid in the oldest and the newest version of Kubernetes."""

import re
from textwrap import dedent
from typing import Any

import pytest
import yaml

from tests.support.kubernetes.schemas import faults, versions
from tests.support.packaging import objects
from tools.generate.pages import DOCS, ROOT

BLOCK = re.compile(r"(?:```yaml|<<'EOF')\n(.*?)^ *(?:```|EOF)$", re.MULTILINE | re.DOTALL)
FILES = {"AdmissionConfiguration", "Config"}
"""Kinds of files of API servers and their clients, which are no objects."""
POD = (
    "{apiVersion: v1, kind: Pod, metadata: {name: it}, spec: {containers: [{name: one, image: a}]}}"
)
BUDGET = (
    "{apiVersion: leasehold.dev/v1beta1, kind: GPUBudget, metadata: {name: it}, spec: {policy: {}}}"
)


def test_examples_and_objects_on_pages_are_valid() -> None:
    examples = [path.read_text() for path in (ROOT / "examples").glob("*.yaml")]
    blocks = [it for page in DOCS.glob("*.md") for it in BLOCK.findall(page.read_text())]
    found = [it for text in [*examples, *map(dedent, blocks)] for it in objects(text)]
    whole = [it for it in found if it.get("kind") not in {None, *FILES}]

    assert {"GPUBudget", "GPUQuota", "Job", "ResourceClaim"} <= {it["kind"] for it in whole}
    assert faults(whole) == []


def test_the_page_of_versions_names_the_newest_schemas() -> None:
    page = (DOCS / "versions.md").read_text()

    assert f"by the schemas of 1.30 and 1.{max(versions())}" in page


@pytest.mark.parametrize(
    ("text", "field", "value", "versions", "fault"),
    [
        (POD, "spec.containers", None, 2, "None is not of type 'array'"),
        (POD, "spec.container", [], 2, "'container' was unexpected"),
        (POD, "spec.containers.0.env", [{"name": "A", "value": 1}], 2, "1 is not of type 'string'"),
        (POD, "spec.resources", {}, 1, "'resources' was unexpected"),  # since 1.32
        (POD, "apiVersion", "v2", 2, "no kind Pod in v2"),
        (BUDGET, "spec.policy.windows", "day", 2, "'windows' was unexpected"),
        (BUDGET, "spec.limitGPUMinutes", "10", 2, "'10' is not of type 'integer'"),
        (BUDGET, "metadata.label", {}, 2, "'label' was unexpected"),
        (BUDGET, "apiVersion", "leasehold.dev/v1", 2, "no kind GPUBudget in leasehold.dev/v1"),
    ],
)
def test_a_field_that_is_unknown_or_of_the_wrong_type_is_a_fault(
    text: str, field: str, value: Any, versions: int, fault: str
) -> None:
    it = yaml.safe_load(text)
    assert faults([it]) == []

    *parents, last = field.split(".")
    inside = it
    for name in parents:
        inside = inside[int(name) if name.isdigit() else name]
    inside[last] = value

    found = faults([it])
    assert len(found) == versions
    assert all(fault in each for each in found)
