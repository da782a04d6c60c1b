"""Tables of measured figures are written from the files in docs/measured."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import measured


@pytest.mark.parametrize("page", measured.PAGES, ids=lambda page: str(page.name))
def test_the_tables_of_a_page_are_those_of_its_files(page: Path) -> None:
    assert page.read_text() == measured.pages()[page], "python -m tests.benchmarks.measured"


def test_each_file_has_a_page_and_says_how_it_was_measured() -> None:
    files = {path.stem for path in measured.MEASURED.glob("*.json")}

    assert files == {name for names in measured.PAGES.values() for name in names}
    assert all(measured.load(name)["method"] for name in files)


def test_figures_of_a_run_replace_those_of_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "MEASURED", tmp_path)
    before = {"ours": {"p50": "3 ms"}, "theirs": {"p50": "9 ms"}}
    kept = {"method": "by hand", "rows": "", "results": before}
    (tmp_path / "scenarios.json").write_text(json.dumps(kept))
    (tmp_path / "run.json").write_text(json.dumps({"ours": {"p50": "2 ms"}}))

    measured.take_over("scenarios", tmp_path / "run.json")

    assert (
        measured.table("scenarios") == "| | ours | theirs |\n|---|---|---|\n| p50 | 2 ms | 9 ms |"
    )
