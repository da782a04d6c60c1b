"""Every pod of the examples is admitted, and requests a share where its text says so."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.webhook.admission import AdmissionPolicy, decide
from tests.support.webhook.reviews import reviewed

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the pod templates inside an object, whatever its kind."""
    if isinstance(value, list):
        for each in value:
            yield from templates(each)
    elif isinstance(value, dict):
        if isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
            yield value
        else:
            for each in value.values():
                yield from templates(each)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_pods_of_an_example_are_admitted_and_request_gpus(file: Path) -> None:
    objects = list(yaml.safe_load_all(file.read_text()))
    pods = list(templates(objects))
    decisions = [decide(reviewed(pod, "default"), AdmissionPolicy()) for pod in pods]

    assert [each.message for each in decisions if not each.allowed] == []
    assert any(each.requests_gpu for each in decisions)


def test_the_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()

    assert [file.name for file in FILES if f"]({file.name})" not in table] == []
