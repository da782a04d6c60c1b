"""kubectl's templates: what each takes from a document."""

import pytest

from services.cli.json_path import expand
from shared.model.errors import RequestError

DOCUMENT = {
    "leases": [
        {"name": "a", "node": "n1", "mib": 3, "labels": {"b.c/d": True}},
        {"name": "b", "node": "n2", "mib": None},
    ]
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{.leases[*].name}", "a b"),
        (".leases[0].name", "a"),
        ("{.leases[-1].mib}", "null"),
        ("{.leases[9].name}{.none}", ""),
        ("{.leases[0].labels['b.c/d']}", "true"),
        ("{.leases[0].labels}", '{"b.c/d": true}'),
        ("first: {.leases[0].mib} MiB", "first: 3 MiB"),
        ("{.leases[?(@.node=='n2')].name}", "b"),
        ('{.leases[?(@.node!="n2")].name}', "a"),
        ('{range .leases[*]}{.name}{"\\t"}{.node}{"\\n"}{end}', "a\tn1\nb\tn2\n"),
        ("{range .leases[*]}{$.leases[0].name}{@.name} {end}", "aa ab "),
    ],
)
def test_a_template_takes_values_from_a_document_as_kubectl_does(template: str, text: str) -> None:
    assert expand(template, DOCUMENT) == text


@pytest.mark.parametrize(
    "template", ["{..name}", "{range .leases[*]}x", "{.leases[1:2:}", "{.leases", "{{}"]
)
def test_other_syntax_is_refused_with_words(template: str) -> None:
    with pytest.raises(RequestError, match="-o jsonpath: "):
        expand(template, DOCUMENT)
