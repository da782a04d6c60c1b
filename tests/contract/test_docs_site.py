"""The site of the documentation has every page, and no link that leaves it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.docs_site import on_config, without_links_out

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """Also reads names of Python functions, as mkdocs does."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)  # noqa: S506


def pages(entry: Any) -> Iterator[str]:
    """Yield the pages of an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from pages(below)


def test_the_navigation_has_every_page_once() -> None:
    config = on_config({"docs_dir": str(DOCS), "nav": list(CONFIG["nav"])})

    shown = list(pages(config["nav"]))

    assert sorted(shown) == sorted(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[pods](pods.md#which-gpu)", "[pods](pods.md#which-gpu)"),
        ("[why](decisions/0001-x.md)", "[why](decisions/0001-x.md)"),
        ("[the file](../k8s/a.yaml)", "the file (`k8s/a.yaml`)"),
        ("[k8s/a.yaml](../k8s/a.yaml)", "k8s/a.yaml"),
        ("[read](../README.md#read-the-code)", "read (`README.md`)"),
        ("[all](decisions/)", "all"),
        ("[site](https://a.example/b/)", "[site](https://a.example/b/)"),
        ("![p](../x.png)", "![p](../x.png)"),
    ],
)
def test_links_to_files_that_the_site_lacks_become_their_paths(text: str, shown: str) -> None:
    assert without_links_out(text, "page.md") == shown


def test_links_between_folders_of_the_site_stay() -> None:
    link = "[a page](../pods.md)"

    assert without_links_out(link, "decisions/0001-x.md") == link


def test_lists_and_code_in_them_are_indented_as_the_site_requires() -> None:
    # mkdocs requires a blank line before a list, and four spaces in it; other Markdown does not.
    wrong = []
    for page in DOCS.rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        wrong += [
            (page.name, line)
            for line in re.findall(r"^[A-Za-z`*\[].*\n(?:- |1\. )", text, re.MULTILINE)
        ]
        wrong += [(page.name, line) for line in re.findall(r"^ {1,3}```.*", text, re.MULTILINE)]

    assert wrong == []
