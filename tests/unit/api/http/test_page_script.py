"""The page's modules as one script."""

import re
from importlib import resources

import pytest

from services.api.http.page_script import bundle


def test_all_modules_of_the_page_are_in_its_script_once_and_none_is_imported() -> None:
    folder = resources.files("services.api") / "static"
    modules = {
        path.name: path.read_text() for path in folder.iterdir() if path.name.endswith(".js")
    }

    script = bundle(modules, "page.js")

    scopes = [line for line in script.splitlines() if re.match(r"(const \$\w+ = )?\(\(\) =>", line)]
    assert len(scopes) == len(modules) - 1  # uplot.js is loaded with the first chart
    assert len(scopes) == len(set(scopes))
    assert "\nimport " not in script
    assert "\nexport " not in script


def test_a_module_comes_after_those_that_it_imports() -> None:
    modules = {
        "a.js": 'import { c } from "./c.js";\nimport {\n  b as d,\n} from "./b.js";\nd(c);',
        "b.js": 'import { c } from "./c.js";\nexport async function b() {}\nexport class B {}',
        "c.js": "export const c = 1;",
        "unused.js": "export const u = 1;",
    }

    assert bundle(modules, "a.js").splitlines() == [
        "const $c = (() => {",
        "const c = 1;",
        "return { c };",
        "})();",
        "const $b = (() => {",
        "const { c } = $c;",
        "async function b() {}",
        "class B {}",
        "return { b, B };",
        "})();",
        "(() => {",
        "const { c } = $c;",
        "const {",
        "  b: d,",
        "} = $b;",
        "d(c);",
        "})();",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('import { a } from "./a.js";', "a.js imports b.js imports a.js"),
        ('import a from "./a.js";', 'b.js: import a from "./a.js";'),
        ("export default 1;", "b.js: export default 1;"),
        ("export { b };", "b.js: export { b };"),
    ],
)
def test_what_cannot_be_bundled_is_named(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the reason is checked below
        bundle({"a.js": 'import { b } from "./b.js";', "b.js": text}, "a.js")

    assert reason in str(refused.value)
