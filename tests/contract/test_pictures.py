"""The diagrams of docs/architecture.md are those of the code."""

from tools.generate import pages


def test_the_diagrams_show_the_code() -> None:
    assert pages.architecture() == pages.ARCHITECTURE.read_text(), "python -m tools.generate"
