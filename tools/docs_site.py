"""Hooks of mkdocs: decisions in the navigation, and no links to files outside `docs`."""

import re
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.[^)\s#]*|[^:)\s#]+/)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Add the decisions, which are not listed by hand, to the section that ends the navigation."""
    files = sorted(Path(config["docs_dir"]).glob("decisions/[0-9]*.md"))
    names = ["README.md", *(file.name for file in files)]
    config["nav"].append({"Decisions": [f"decisions/{name}" for name in names]})
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page's text with the names of files in place of links that leave `docs`."""
    return without_links_out(markdown, page.file.src_uri)


def without_links_out(markdown: str, source: str) -> str:
    """Return the text of `source`, a path below `docs`, with `text (path)` for each such link.

    Of a link to a folder of the site, which has no page either, the text stays.
    """

    def shown(match: re.Match[str]) -> str:
        path = normpath(join("docs", dirname(source), match[2]))
        if match[2].endswith("/") and path.startswith("docs/"):
            return match[1]
        if path.startswith("docs/"):
            return match[0]
        return match[1] if path in match[1] else f"{match[1]} (`{path}`)"

    return LINK.sub(shown, markdown)
