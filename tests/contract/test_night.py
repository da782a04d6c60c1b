"""The table of faults names checks, alerts and sections that exist, and is in the docs."""

import re

import pytest

from services.cli.doctor.doctor import CLUSTER_CHECKS, NODE_CHECKS
from tests.contract.test_pages import anchor_of, anchors
from tests.night.alerts import Scrape, alerts, firing, is_evaluated
from tests.night.faults import FAULTS, Fault, page_table
from tests.night.places import Place
from tools.generate.pages import TROUBLESHOOTING, section

ALERTS = alerts()


def text_of_section(anchor: str) -> str:
    """Return a section of docs/troubleshooting.md by the anchor of its heading."""
    headings = re.split(r"^(#+ .+)$", TROUBLESHOOTING.read_text(), flags=re.MULTILINE)[1:]
    texts = zip(headings[::2], headings[1::2], strict=True)
    return next(text for heading, text in texts if anchor_of(heading.lstrip("# ")) == anchor)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.name))
def test_each_fault_has_words_in_every_place_or_a_reason_for_none(fault: Fault) -> None:
    assert {*fault.says, *fault.silent} == set(Place)
    assert all(fault.silent.values())
    assert all(fault.says.values())
    assert fault.check in {"", *NODE_CHECKS, *CLUSTER_CHECKS}
    assert fault.runbook in anchors(TROUBLESHOOTING)
    assert fault.entry in text_of_section(fault.runbook)
    if alert := fault.says.get(Place.ALERT):
        assert is_evaluated(ALERTS[alert]["expr"])


def test_the_page_has_the_table_of_the_command() -> None:
    assert section(TROUBLESHOOTING, "faults") == f"{page_table()}\n", (
        "python -m tests.night --write-page"
    )


def test_alerts_fire_by_the_value_of_their_metric() -> None:
    def scrape(at: float, resent: float, missing: float) -> Scrape:
        work = (("service", "binder"), ("subject", "a"))
        samples = {
            ("leasehold_resent_messages_total", work): resent,
            ("leasehold_missing_components", (("service", "binder"),)): missing,
            ("leasehold_device_health", (("state", "cordoned"),)): missing,
            ("leasehold_device_health", (("state", "healthy"),)): 1.0,
        }
        return Scrape(at=at, samples=samples)

    expressions = {name: rule["expr"] for name, rule in ALERTS.items()}
    begin = scrape(0.0, 5.0, 0.0)

    assert firing(expressions, begin, begin) == []
    assert firing(expressions, begin, scrape(10.0, 25.0, 0.0)) == ["LeaseholdWorkNotReceived"]
    assert firing(expressions, begin, scrape(10.0, 25.0, 1.0)) == [
        "LeaseholdDeviceUnhealthy",
        "LeaseholdComponentMissing",
    ]
