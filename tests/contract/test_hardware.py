"""The page of what was seen on which hardware names what no test shows, and its steps run."""

import re
from pathlib import Path

from tests.benchmarks.hardware import raise_limits, seed
from tools.generate.compatibility import NOT_SHOWN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "hardware.md").read_text()


def test_the_page_lists_exactly_the_statements_without_a_test() -> None:
    table = PAGE.partition("<!-- not shown -->")[2].partition("<!-- end -->")[0]

    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]

    assert rows == sorted(NOT_SHOWN["hami_core"])


def test_the_steps_without_a_gpu_run(tmp_path: Path) -> None:
    place = tmp_path / "r.cache"

    seed(place)
    raise_limits(place)

    assert (tmp_path / "r.cache").stat().st_size == 2008953
