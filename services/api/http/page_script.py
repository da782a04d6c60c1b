"""The page's modules as one script, which a browser loads faster than thirty; pure."""

import re
from collections.abc import Iterator, Mapping

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:class|function|const) (\w+))", re.MULTILINE)
_OTHER = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


def bundle(modules: Mapping[str, str], first: str) -> str:
    """Return one module that runs `first` and all that it imports, each in a scope of its own.

    Raises ValueError for modules that import one another in a circle, and for an import or an
    export of another form.

    >>> modules = {"a.js": 'import { b as c } from "./b.js";', "b.js": "export const b = 1;"}
    >>> print(bundle(modules, "a.js"))
    const $b = (() => {
    const b = 1;
    return { b };
    })();
    (() => {
    const { b: c } = $b;
    })();
    """
    scopes = [_scope(name, modules[name]) for name in _ordered(modules, first)]
    return "\n".join(scopes)


def _ordered(modules: Mapping[str, str], first: str) -> list[str]:
    ordered: dict[str, None] = {}

    def add(name: str, importers: tuple[str, ...]) -> None:
        if name in importers:
            raise ValueError(f"{' imports '.join((*importers, name))}")
        if name not in ordered:
            for imported in _imported(modules[name]):
                add(imported, (*importers, name))
            ordered[name] = None

    add(first, ())
    return list(ordered)


def _imported(text: str) -> Iterator[str]:
    return (statement[2] for statement in _IMPORT.finditer(text))


def _scope(name: str, text: str) -> str:
    exported = _EXPORT.findall(text)
    body = _EXPORT.sub("", _IMPORT.sub(_constants, text))
    if (other := _OTHER.search(body)) is not None:
        raise ValueError(f"{name}: {other[0]}")
    if not exported:
        return f"(() => {{\n{body}\n}})();"
    return f"const {_object(name)} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _constants(statement: re.Match[str]) -> str:
    names = re.sub(r"(\w+) as (\w+)", r"\1: \2", statement[1])
    return f"const {{{names}}} = {_object(statement[2])};"


def _object(name: str) -> str:
    return f"${name.removesuffix('.js')}"
