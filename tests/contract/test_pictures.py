"""The diagrams of docs/architecture.md are those of the code."""

from tools.generate import architecture


def test_the_diagrams_show_the_code() -> None:
    assert architecture.generated() == architecture.PAGE.read_text(), "python -m tools.generate"
