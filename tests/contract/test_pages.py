"""The pages are true: links have targets, lists name what there is, and what they advise works."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.webhook.admission import decide
from services.webhook.pod_admission import PodAdmission
from services.webhook.settings import WebhookSettings
from shared.dialects import DIALECTS
from shared.model.budgets.budget import BudgetState
from shared.model.devices.node import AGENT_ANNOTATION
from shared.model.events.node_events import ViolationReason
from shared.model.leases.lease import RESIZE_WAITING
from tests.hardware.__main__ import PARTS
from tests.support.webhook.reviews import reviewed
from tools.docs_site import on_config, without_links_out
from tools.generate.compatibility import NOT_SHOWN
from tools.generate.pages import DOCS, ROOT
from tools.generate.reference import pieces

PATTERNS = ("*.md", "docs/**/*.md", "examples/*.md", "k8s/**/*.md", "tests/*.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


# Links and the site


def links(page: Path) -> list[str]:
    found = re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", CODE.sub("", page.read_text()))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The names that both GitHub and the site give to the page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    names = map(anchor_of, headings)
    return frozenset(name for name in names if "--" not in name)  # the site makes one "-" of two


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_has_a_target(page: Path) -> None:
    lost = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_there = target.exists() and target.is_relative_to(ROOT)
        if not is_there or (anchor and anchor not in anchors(target)):
            lost.append(link)

    assert lost == []


def test_the_first_page_names_every_other_one_and_the_readme_leads_to_it() -> None:
    named = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "index.md")}

    assert set(DOCS.glob("*.md")) - {DOCS / "index.md"} <= named
    assert "docs/index.md" in links(ROOT / "README.md")


def test_every_decision_has_a_number_of_its_own() -> None:
    pages = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    titles = [page.read_text().split(".", 1)[0] for page in pages]

    assert titles == [f"# {int(page.name[:4])}" for page in pages]
    assert titles == [f"# {number}" for number in range(1, len(pages) + 1)]
    assert links(DOCS / "decisions" / "README.md") == [page.name for page in pages]


class Loader(yaml.SafeLoader):
    """Also reads names of Python functions, as mkdocs does."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)


def shown_pages(entry: Any) -> Iterator[str]:
    """Yield the pages of an entry of the site's navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from shown_pages(below)


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)  # noqa: S506
    config = on_config({"docs_dir": str(DOCS), "nav": site["nav"]})

    files = sorted(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md"))
    assert sorted(shown_pages(config["nav"])) == files


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[pods](pods.md#which-gpu)", None),
        ("[the file](../k8s/a.yaml)", "the file (`k8s/a.yaml`)"),
        ("[k8s/a.yaml](../k8s/a.yaml)", "k8s/a.yaml"),
        ("[all](decisions/)", "all"),
        ("[site](https://a.example/b/)", None),
        ("![p](../x.png)", None),
    ],
)
def test_links_to_files_that_the_site_lacks_become_their_paths(text: str, shown: str) -> None:
    assert without_links_out(text, "page.md") == (shown or text)


def test_lists_and_code_in_them_are_indented_as_the_site_requires() -> None:
    # mkdocs requires a blank line before a list, and four spaces in it; other Markdown does not.
    for page in DOCS.rglob("*.md"):
        text = FENCED.sub("", page.read_text())

        assert not re.findall(r"^[A-Za-z`*\[].*\n(?:- |1\. )", text, re.MULTILINE), page
        assert not re.findall(r"^ {1,3}```.*", text, re.MULTILINE), page


# Lists


def words(pattern: str) -> Iterator[str]:
    """Yield the words in CamelCase that stand alone in strings of these files."""
    for path in ROOT.glob(pattern):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch("[A-Z][A-Za-z]*[a-z][A-Z][A-Za-z]*", text):
                yield text


def rows(page: str, title: str) -> set[str]:
    """Return what is written as code at the beginning of the items of a section's lists."""
    section = text_of(page).partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    beginnings = re.findall(r"^- ((?:`[^`]+`(?:, )?)+)", section, re.MULTILINE)
    return {name for beginning in beginnings for name in re.findall(r"`([^`]+)`", beginning)}


def sources(pattern: str) -> str:
    return "".join(map(Path.read_text, sorted(ROOT.glob(pattern))))


def test_every_reason_of_an_event_has_its_row() -> None:
    reasons = set(words("services/binder/**/*.py")) | {"Scheduled", RESIZE_WAITING}
    reasons |= set(map(str, ViolationReason))
    reasons |= {f"Budget{str(state).capitalize()}" for state in BudgetState}

    others = {
        *("DoesNotExist", "NotIn", "PersistentVolumeClaim", "PodScheduled"),
        *("ResourceClaim", "TokenBucket"),
    }
    assert rows("reference.md", "Events of objects") == reasons - others


def test_every_probe_has_its_row() -> None:
    declared = re.findall(
        r"(?:probes ?= ?|def probes\(.*?return )\{(.*?)\}", sources("services/*/*.py"), re.DOTALL
    )
    probes = {name for block in declared for name in re.findall(r'"(\w+)": ', block)}

    assert len(probes) >= 6
    assert {"nats", *probes} <= rows("troubleshooting.md", "A service is not ready")


def test_every_invariant_of_the_audit_has_its_row() -> None:
    pattern = r'(?:Difference|device_difference)\(\s*"(\w+)"'
    checked = set(re.findall(pattern, sources("services/cli/audit/*.py")))

    assert rows("troubleshooting.md", "`leasehold audit` finds a difference") == checked


def test_every_paragraph_that_promises_security_names_a_test() -> None:
    not_prose = re.compile(r"^\|.*\n\|[-|]+\|$|^#.*?$", re.MULTILINE)
    prose = not_prose.sub("", FENCED.sub("", text_of("security.md")))
    promise = r"\b(cannot|may not|must not|never|nothing|No|deny|denie[sd]|refuse[sd]?)\b"
    promises = [each for each in re.split(r"\n\n+|\n(?=- |\| )", prose) if re.search(promise, each)]

    assert len(promises) > 10
    assert [each for each in promises if "(../tests/" not in each and "test_" not in each] == []


def test_uninstalling_removes_every_annotation_and_label_that_agents_write_to_nodes() -> None:
    written = {AGENT_ANNOTATION}.union(
        *(each.node_annotations | each.node_labels for each in DIALECTS.values())
    )

    assert [key for key in sorted(written) if f" {key}-" not in text_of("uninstall.md")] == []


def test_the_page_of_hardware_has_all_parts_and_the_statements_without_a_test() -> None:
    page = text_of("hardware.md")
    table = page.partition("<!-- not shown -->")[2].partition("<!-- end -->")[0]

    parts = page.partition("## All figures")[0]
    assert re.findall(r"^\| ([a-z]+) \| (?!shows)", parts, re.MULTILINE) == list(PARTS)
    assert list(map(int, re.findall(r"^\| (\d+) \|", table, re.MULTILINE))) == sorted(
        NOT_SHOWN["hami_core"]
    )


def test_the_reference_does_not_depend_on_the_environment() -> None:
    variables = {
        "LEASEHOLD_STATE": "/elsewhere",
        "LEASEHOLD_NATS_URL": "nats://o:1",
        "COLUMNS": "9",
    }
    code = "import json; from tools.generate.reference import pieces; print(json.dumps(pieces()))"
    command = [sys.executable, "-c", code]
    given = {**os.environ, **variables}

    assert json.loads(subprocess.check_output(command, cwd=ROOT, env=given)) == pieces()


# Pods


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the pod templates inside an object, whatever its kind."""
    if isinstance(value, list):
        for each in value:
            yield from templates(each)
    elif isinstance(value, dict):
        if isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
            yield value
        else:
            for each in value.values():
                yield from templates(each)


EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
ADVISED = re.findall(
    r"^\| (.+?) \| (`.+?`) \| .+ \|$",
    text_of("pods.md").partition("<!-- limits -->")[2].partition("<!-- end -->")[0],
    re.MULTILINE,
)


def advised(cell: str) -> dict[str, Any]:
    """Return a pod with the limits in a cell of the table."""
    limits = dict(re.findall(r"`([^`]+): ([^`]+)`", cell))
    container = {"name": "main", "image": "x", "resources": {"limits": limits}}
    return {"metadata": {"name": "pod"}, "spec": {"containers": [container]}}


@pytest.mark.parametrize(
    "pods",
    [
        *(pytest.param([advised(cell)], id=wanted) for wanted, cell in ADVISED),
        *(
            pytest.param(pods, id=path.name)
            for path in EXAMPLES
            if (pods := list(templates(list(yaml.safe_load_all(path.read_text())))))
        ),
    ],
)
def test_pods_of_pages_and_examples_are_admitted_and_request_gpus(pods: list[Any]) -> None:
    policy = WebhookSettings(kube_scheduler=True).policy
    decisions = [decide(PodAdmission(pod=reviewed(pod, "default"), policy=policy)) for pod in pods]

    assert [each.message for each in decisions if not each.allowed] == []
    assert any(
        decision.requests_gpu or pod["spec"].get("resourceClaims")
        for decision, pod in zip(decisions, pods, strict=True)
    )


def test_tables_have_a_row_for_every_dialect_and_every_example() -> None:
    limits = {name for _, cell in ADVISED for name in re.findall(r"`([^`:]+):", cell)}
    table = (ROOT / "examples" / "README.md").read_text()

    page = text_of("pods.md")

    assert [
        name for name, it in DIALECTS.items() if it.resources and not it.resources & limits
    ] == []
    for dialect in DIALECTS.values():
        words = () if dialect.resources else dialect.request_annotations
        assert not words or any(f"{word}: " in page for word in words)
    assert [file.name for file in EXAMPLES if f"]({file.name})" not in table] == []
