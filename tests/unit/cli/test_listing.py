"""Lists as kubectl shows them: sorted, in custom columns, without titles, as typed objects."""

import json
from typing import Any

import msgspec
import pytest

from services.cli import terminal
from services.cli.listing import custom_columns, objects_of, present_list, sorted_by
from services.cli.parser import parse
from shared.model.errors import RequestError


class Share(msgspec.Struct, frozen=True):
    index: int


class Lease(msgspec.Struct, frozen=True):
    name: str
    mib: int | None = None
    shares: tuple[Share, ...] = ()


class Node(msgspec.Struct, frozen=True):
    node: str
    devices: tuple[Share, ...] = ()


class ExampleView(msgspec.Struct, frozen=True):
    leases: tuple[Lease, ...] = ()
    nodes: tuple[Node, ...] = ()


TWO_GPUS = Lease("b", 900, (Share(0), Share(1)))
VIEW = ExampleView(leases=(Lease("a", 10_000), TWO_GPUS, Lease("c")))
NODES = ExampleView(nodes=(Node("n1", (Share(3), Share(2))), Node("n0", (Share(1), Share(0)))))


def table(view: ExampleView, spec: str, *, headers: bool = True) -> list[list[str]]:
    """Return the cells of the printed lines."""
    made = custom_columns(objects_of(view, ("leases",)), f"custom-columns={spec}", headers=headers)
    titles = [list(made.titles)] if made.headers else []
    return [*titles, *([str(cell) for cell in cells] for cells, _ in made.rows)]


@pytest.mark.parametrize("path", [".mib", "mib", "{.mib}", "$.mib", "{$.mib}"])
def test_objects_are_sorted_by_any_field_numbers_as_numbers(path: str) -> None:
    leases = sorted_by(VIEW, ("leases",), path).leases

    assert [lease.name for lease in leases] == ["c", "b", "a"]


def test_nested_objects_are_sorted_below_the_one_that_has_them() -> None:
    view = sorted_by(NODES, ("nodes.devices",), ".index")

    assert [(node.node, [gpu.index for gpu in node.devices]) for node in view.nodes] == [
        ("n1", [2, 3]),
        ("n0", [0, 1]),
    ]


def test_a_field_that_no_object_has_is_refused() -> None:
    with pytest.raises(RequestError, match=r"--sort-by \.size: no object has this field"):
        sorted_by(VIEW, ("leases",), ".size")


def test_an_empty_list_is_sorted_by_any_field() -> None:
    assert sorted_by(ExampleView(), ("leases",), ".size") == ExampleView()


def test_columns_show_fields_lists_and_what_is_absent() -> None:
    assert table(VIEW, "POD:.name,GPUS:.shares[*].index,MIB:.mib") == [
        ["POD", "GPUS", "MIB"],
        ["a", "<none>", "10000"],
        ["b", "0,1", "900"],
        ["c", "<none>", "<none>"],
    ]


def test_without_headers_only_objects_are_shown() -> None:
    assert table(VIEW, "POD:.name", headers=False) == [["a"], ["b"], ["c"]]


def test_a_nested_object_has_the_fields_of_its_node() -> None:
    assert next(iter(objects_of(NODES, ("nodes.devices",)))) == {"node": "n1", "index": 3}


@pytest.mark.parametrize("spec", ["", "POD", "POD:", ":.name", "POD:.name,", "POD:.a["])
def test_what_is_no_column_is_refused_with_an_example(spec: str) -> None:
    with pytest.raises(RequestError, match=r"write "):
        table(VIEW, spec)


@pytest.mark.parametrize("command", ["gpus", "ps", "top", "budget", "preemptions"])
def test_commands_that_list_objects_have_kubectls_flags(command: str) -> None:
    words = ["--sort-by", ".name", "--no-headers", "-o", "custom-columns=POD:.name"]

    flags = parse([command, *words], "leasehold")[1]

    assert (flags.sort_by, flags.no_headers) == (".name", True)
    assert flags.output == "custom-columns=POD:.name"


def test_other_forms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["ps", "-o", "custom"], "leasehold")

    assert "'custom' is not one of json, yaml, wide, name" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_documents_have_an_api_version_and_a_kind(
    output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    documents: list[tuple[Any, str, str]] = [(VIEW, "", "Example"), ({"a": 1}, "Status", "Status")]
    for document, kind, expected in documents:
        terminal.show(output, document, str, kind=kind)

        text = capsys.readouterr().out
        lines = text.replace('"', "").replace(",", "").replace("{", "").split("\n")
        head = [line.strip() for line in lines if line.strip()][:2]
        assert head == ["apiVersion: cli.leasehold.dev/v1", f"kind: {expected}"]


def test_a_sorted_list_and_its_columns_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ps", "--sort-by", ".mib", "--no-headers", "-o", "custom-columns=POD:.name"]
    flags = parse(words, "leasehold")[1]

    assert present_list(flags, ("leases",), lambda: VIEW, str) == 0

    assert capsys.readouterr().out.split() == ["c", "b", "a"]


def test_a_sorted_list_is_sorted_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    flags = parse(["ps", "--sort-by", ".mib", "--json"], "leasehold")[1]

    present_list(flags, ("leases",), lambda: VIEW, str)

    assert [lease["name"] for lease in json.loads(capsys.readouterr().out)["leases"]] == [
        *("c", "b", "a")
    ]
