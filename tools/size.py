"""How much there is to read, by room: `python -m tools.size`. Nothing fails because of it."""

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("services", "shared", "simcluster", "tests", "tools")
NO_TOKENS = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@dataclass(frozen=True, slots=True)
class Size:
    """What a reader has before them."""

    files: int = 0
    statements: int = 0
    """Docstrings left out."""
    tokens: int = 0
    """Comments and docstrings left out."""
    docstring_words: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def size_of(source: str) -> Size:
    """Return the size of a file of Python."""
    nodes = list(ast.walk(ast.parse(source)))
    texts = [
        node
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    lines = io.StringIO(source).readline
    tokens = sum(token.type not in NO_TOKENS for token in tokenize.generate_tokens(lines))
    return Size(
        files=1,
        statements=sum(isinstance(node, ast.stmt) for node in nodes) - len(texts),
        tokens=tokens - len(texts),
        docstring_words=sum(len(ast.literal_eval(node.value).split()) for node in texts),
    )


def room_of(path: Path) -> str:
    """Return the room of a file: the folder below one of `FOLDERS`, or that itself."""
    parts = path.parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def sizes(paths: Iterable[Path]) -> Mapping[str, Size]:
    """Return the size of each room, sorted by name."""
    sizes: dict[str, Size] = {}
    for path in paths:
        room = room_of(path)
        sizes[room] = sizes.get(room, Size()) + size_of((ROOT / path).read_text())
    return dict(sorted(sizes.items()))


def files() -> list[Path]:
    """Return the files of Python, generated ones left out."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT) for path in paths if "_pb2" not in path.name)


def table(of: Mapping[str, Size]) -> str:
    """Return the sizes as a table of Markdown, with the sums of all folders."""
    rows = dict(of)
    for folder in FOLDERS:
        inside = [size for room, size in of.items() if room.partition("/")[0] == folder]
        rows[f"**{folder}**"] = sum(inside, Size())
    lines = [
        "| room | files | statements | tokens | words of docstrings |",
        "|---|---|---|---|---|",
    ]
    for room, size in rows.items():
        lines.append(f"| {room} | {' | '.join(map(str, astuple(size)))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table."""
    print(table(sizes(files())), end="")


if __name__ == "__main__":
    main()
