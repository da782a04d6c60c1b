"""docs/security.md: what it promises names a test."""

import re

import yaml

from tools.generate import security
from tools.generate.manifests import WEBHOOK
from tools.generate.pages import DOCS, ROOT

NOT_PROSE = re.compile(r"^```.*?^```|^#.*?$", re.DOTALL | re.MULTILINE)
PARAGRAPH = re.compile(r"\n\n+|\n(?=- |\| )")
PROMISE = re.compile(r"\b(cannot|may not|must not|never|nothing|No|deny|denie[sd]|refuse[sd]?)\b")
HEADER = re.compile(r"^\|.*\n\|[-|]+\|$", re.MULTILINE)


def test_no_container_is_privileged_and_capabilities_are_few() -> None:
    able = {name: security.capabilities(container) for name, container, _ in security.containers()}

    assert {name: found for name, found in able.items() if found != "none"} == {
        "node-agent": "DAC_OVERRIDE",
        "partitioner": "SYS_ADMIN",
    }


def test_every_paragraph_and_row_that_promises_something_names_a_test() -> None:
    prose = HEADER.sub("", NOT_PROSE.sub("", (DOCS / "security.md").read_text()))
    promises = [each for each in PARAGRAPH.split(prose) if PROMISE.search(each)]

    assert len(promises) > 10
    assert [each for each in promises if "(../tests/" not in each and "test_" not in each] == []


def test_what_an_admission_policy_cannot_evaluate_is_denied() -> None:
    found = [
        it
        for folder in (ROOT / "k8s", WEBHOOK)
        for path in sorted(folder.rglob("*.yaml"))
        if "chart" not in path.parts
        for it in yaml.safe_load_all(path.read_text())
        if it and it.get("kind", "").startswith("ValidatingAdmissionPolicy")
    ]
    policies = {
        it["metadata"]["name"]: it["spec"].get("failurePolicy", "Fail")
        for it in found
        if it["kind"] == "ValidatingAdmissionPolicy"
    }
    bindings = {
        it["spec"]["policyName"]: it["spec"]["validationActions"]
        for it in found
        if it["kind"] == "ValidatingAdmissionPolicyBinding"
    }

    assert len(policies) > 5
    assert policies == dict.fromkeys(policies, "Fail")
    assert bindings == {name: ["Deny"] for name in policies}
