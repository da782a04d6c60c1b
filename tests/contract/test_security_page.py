"""The table of rights in docs/security.md is drawn from the manifests.

Draw it anew with `python -m tests.contract.test_security_page`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"


def manifests() -> Iterator[dict[str, Any]]:
    for path in sorted((ROOT / "k8s" / "base").glob("*.yaml")):
        yield from filter(None, yaml.safe_load_all(path.read_text()))


def rights() -> dict[str, list[str]]:
    """What each service account may do, in words."""
    objects = list(manifests())
    roles = {
        (found["kind"], found["metadata"]["name"]): found["rules"]
        for found in objects
        if found["kind"] in {"ClusterRole", "Role"}
    }
    may: dict[str, list[str]] = {
        found["metadata"]["name"]: [] for found in objects if found["kind"] == "ServiceAccount"
    }
    for binding in objects:
        if binding["kind"] in {"ClusterRoleBinding", "RoleBinding"}:
            role = binding["roleRef"]["kind"], binding["roleRef"]["name"]
            where = " in its namespace" if role[0] == "Role" else ""
            for subject in binding["subjects"]:
                may[subject["name"]] += [_words(rule) + where for rule in roles[role]]
    return may


def _words(rule: dict[str, Any]) -> str:
    groups = [group for group in rule["apiGroups"] if group]
    resources = ", ".join(f"`{resource}`" for resource in rule["resources"])
    of = f" of {', '.join(groups)}" if groups else ""
    named = f" named {', '.join(rule['resourceNames'])}" if "resourceNames" in rule else ""
    return f"{', '.join(rule['verbs'])} {resources}{of}{named}"


def drawn() -> str:
    rows = [
        f"| {name} | {'; '.join(may) or 'nothing: it has no token'} |"
        for name, may in sorted(rights().items())
    ]
    table = "\n".join(["| service | may |", "|---|---|", *rows])
    return re.sub(
        r"(<!-- generated: rights -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{table}\n{found[2]}",
        PAGE.read_text(),
        flags=re.DOTALL,
    )


def test_the_table_of_rights_is_that_of_the_manifests() -> None:
    assert drawn() == PAGE.read_text(), "python -m tests.contract.test_security_page"


if __name__ == "__main__":
    PAGE.write_text(drawn())
