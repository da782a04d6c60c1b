"""`docs/compatibility.md` and the checklists match the dialects and the tests."""

import re

import pytest

from tools.generate.compatibility import (
    CHECKLISTS,
    LISTS,
    NOT_SHOWN,
    all_tests,
    numbers_of,
    sentence,
    shown_by,
)
from tools.generate.pages import DOCS, section


@pytest.mark.parametrize("checklist", LISTS)
def test_every_statement_of_a_checklist_has_a_test_or_a_reason(checklist: str) -> None:
    shown = shown_by()
    without = NOT_SHOWN[checklist].keys()
    for number in LISTS[checklist]:
        state = (checklist, number) in shown, number in without
        assert state != (False, False), (
            f"{checklist} {number} needs a test or a reason in NOT_SHOWN"
        )
        assert state != (True, True), f"{checklist} {number} has a test: take its reason away"
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", section(CHECKLISTS, checklist), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(LISTS[checklist])
    assert {int(number) for number, text in rows if text.startswith("not shown: ")} == set(without)


def test_every_link_to_a_test_leads_to_its_file() -> None:
    files = all_tests()
    known = {(sentence(name), file) for name, file in files.items()}
    checklists = "".join(section(CHECKLISTS, checklist) for checklist in LISTS)
    links = re.findall(r"\[([^\]]+)\]\(((?!\.\./)[^)]+)\)", checklists)

    assert len(links) > 100
    assert [link for link in links if link not in known] == []


def test_no_test_has_the_number_of_an_unknown_statement() -> None:
    for name in all_tests():
        for checklist, number in numbers_of(name):
            assert number in LISTS[checklist], name


def test_tests_that_the_page_mentions_exist() -> None:
    page = (DOCS / "compatibility.md").read_text()

    assert set(re.findall(r"`(test_\w+)`", page)) <= all_tests().keys()
