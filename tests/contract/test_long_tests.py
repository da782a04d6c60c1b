"""The tests that `make test` leaves to CI."""

from pathlib import Path

import pytest

from tests.conftest import LONG

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("beginning", LONG)
def test_a_long_test_exists(beginning: str) -> None:
    path, _, name = beginning.partition("::")

    assert (ROOT / path).exists()
    assert not name or f"def {name}" in (ROOT / path).read_text()
