"""Lists of objects as kubectl shows them: in columns of one's own, sorted by any field.

https://kubernetes.io/docs/reference/kubectl/#custom-columns
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from services.cli import terminal
from services.cli.terminal import CUSTOM_COLUMNS
from shared.model.errors import RequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from services.cli.formats import FittedTable

NONE = "<none>"
"""As kubectl shows a field that an object does not have."""

T = TypeVar("T", bound=msgspec.Struct)
Find = Callable[[Any], list[Any]]


def present_list(
    flags: Any,
    objects: Sequence[str],
    read: Callable[[], T],
    text: Callable[[T], "RenderableType"],
    names: Callable[[T], Iterable[str]] = lambda _: (),
) -> int:
    """`objects` is as for `objects_of`."""

    def read_sorted() -> T:
        view = read()
        return sorted_by(view, objects, flags.sort_by) if flags.sort_by else view

    def columns(view: T) -> "RenderableType":
        return custom_columns(objects_of(view, objects), flags.output, headers=not flags.no_headers)

    is_custom = flags.output.startswith(CUSTOM_COLUMNS)
    return terminal.present(flags, read_sorted, columns if is_custom else text, names)


def path_of(text: str) -> Find:
    """Parse a JSONPath as kubectl reads it: braces, the leading dot and `$` may be left out.

    >>> path_of("{.shares[*].device}")({"shares": [{"device": "a"}, {"device": "b"}]})
    ['a', 'b']

    Raises RequestError for text that is no path.
    """
    import jsonpath

    bare = text.strip().removeprefix("{").removesuffix("}").removeprefix("$")
    dot = "" if bare.startswith((".", "[")) else "."
    try:
        return jsonpath.compile(f"${dot}{bare}").findall
    except jsonpath.JSONPathError as error:
        reason = str(error).partition("\n")[0]
        raise RequestError(
            f"{text!r} is no JSONPath ({reason}); write .name or {{.name}}"
        ) from error


def objects_of(view: msgspec.Struct, fields: Iterable[str]) -> Iterator[dict[str, Any]]:
    """`nodes.devices` are the devices of all nodes, each with the other fields of its node."""
    plain = msgspec.to_builtins(view)
    for field in fields:
        outer, _, inner = field.partition(".")
        for item in plain[outer]:
            if not inner:
                yield item
                continue
            own = {key: value for key, value in item.items() if key != inner}
            yield from ({**own, **nested} for nested in item[inner])


def sorted_by(view: T, fields: Iterable[str], path: str) -> T:
    """Objects without the value come first. Raises RequestError if no object has it."""
    find = path_of(path)
    changed: dict[str, Any] = {}
    values: list[Any] = []
    for field in fields:
        outer, _, inner = field.partition(".")
        items = getattr(view, outer)
        if inner:
            changed[outer] = tuple(
                msgspec.structs.replace(
                    item, **{inner: _sorted(getattr(item, inner), find, values)}
                )
                for item in items
            )
        else:
            changed[outer] = _sorted(items, find, values)
    if values and all(not value for value in values):
        raise RequestError(
            f"--sort-by {path}: no object has this field; -o json shows the fields of each"
        )
    return msgspec.structs.replace(view, **changed)


def _sorted(items: Sequence[Any], find: Find, values: list[Any]) -> tuple[Any, ...]:
    keyed = [(find(msgspec.to_builtins(item)), item) for item in items]
    values += [value for value, _ in keyed]
    return tuple(item for _, item in sorted(keyed, key=lambda entry: _order(entry[0])))


def _order(values: list[Any]) -> tuple[int, float, str]:
    value = values[0] if values else None
    if value is None:
        return (0, 0.0, "")
    if isinstance(value, int | float):
        return (1, float(value), "")
    return (2, 0.0, str(value))


def custom_columns(objects: Iterable[Any], spec: str, *, headers: bool = True) -> "FittedTable":
    """For example, `POD:.name,NODE:.node`. Raises RequestError."""
    from services.cli.formats import FittedTable

    titles: list[str] = []
    paths: list[Find] = []
    for column in spec.removeprefix(CUSTOM_COLUMNS).split(","):
        title, colon, path = column.partition(":")
        if not (title and colon and path):
            raise RequestError(
                f"{column!r} is no column: write custom-columns=POD:.name,NODE:.node"
            )
        titles.append(title)
        paths.append(path_of(path))
    table = FittedTable(*titles, headers=headers)
    for item in objects:
        found = ([value for value in find(item) if value is not None] for find in paths)
        table.add_row(*(",".join(map(_cell, values)) or NONE for values in found))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
