"""The commands that pages of the documentation print, so that tests run them as they are."""

import re
from collections.abc import Iterator
from textwrap import dedent

from tools.generate.pages import DOCS, ROOT

SHELL_BLOCK = re.compile(r"^( *)```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"^kubectl .*?<<'EOF'\n.*?^EOF$", re.MULTILINE | re.DOTALL)
NEEDS_A_SERVICE = re.compile(r" exec | port-forward |configmap/auth-ca")
"""Commands that the containers of a simulated cluster, which run no image, cannot answer."""


def commands(page: str, section: str = "", program: str = "kubectl") -> Iterator[str]:
    """Yield a program's commands in a page, or in those of its sections whose title begins so."""
    text = (ROOT / page if "/" in page else DOCS / page).read_text()
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    for part in parts[1:] if section else [text]:
        if part.startswith(section):
            for _, block in SHELL_BLOCK.findall(part):
                whole = dedent(block).replace("\\\n", "")
                heredocs = HEREDOC.findall(whole)
                lines = HEREDOC.sub("", whole).splitlines()
                own = [line for line in lines if line.startswith(f"{program} ")]
                yield from (
                    command for command in [*heredocs, *own] if not NEEDS_A_SERVICE.search(command)
                )
