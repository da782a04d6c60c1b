"""Every relative link of the documentation leads to a file, and to a heading that is in it."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "k8s/**/*.md", "tests/*.md")
    for page in ROOT.glob(pattern)
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    found = LINK.findall(CODE.sub("", page.read_text()))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The names that GitHub gives to the page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    )


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


def test_the_first_page_names_every_other_one() -> None:
    first = ROOT / "docs" / "index.md"
    named = {(first.parent / link.partition("#")[0]).resolve() for link in links(first)}

    assert set((ROOT / "docs").glob("*.md")) - {first} <= named


def test_the_readme_leads_to_the_first_page() -> None:
    assert "docs/index.md" in links(ROOT / "README.md")


def test_every_decision_has_a_number_of_its_own() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    numbers = [int(page.name[:4]) for page in pages]
    titles = [page.read_text().split(".", 1)[0] for page in pages]

    assert numbers == list(range(1, len(pages) + 1))
    assert titles == [f"# {number}" for number in numbers]
    assert links(ROOT / "docs" / "decisions" / "README.md") == [page.name for page in pages]
