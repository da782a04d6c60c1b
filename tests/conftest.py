"""Settings of all tests."""

import gc
import os
from collections.abc import Generator
from pathlib import PurePosixPath

import pytest
import yaml
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler.loadfile import LoadFileScheduling

from services import GC_THRESHOLD

# It extends the parser in Python: before the name stands for the one in C.
from shared.kubernetes import strict_yaml  # noqa: F401
from tests.support.effort import IN_CI, tries

# PyYAML's parser in C reads the same, and takes a tenth of the time for the many manifests.
yaml.SafeLoader = yaml.CSafeLoader  # type: ignore[misc,assignment]
# No test may reach a cluster of whoever runs it.
os.environ.pop("KUBECONFIG", None)

settings.register_profile("any machine", deadline=None, derandomize=True, max_examples=tries(100))
settings.register_profile("fuzz", deadline=None, max_examples=2_000, derandomize=False)
settings.load_profile("any machine")

SERVERS = {"e2e", "hardware", "integration", "real"}
"""Folders of tests that run real servers and processes."""
LONG = (
    "tests/e2e/faults/",
    "tests/e2e/test_api_outage.py",
    "tests/e2e/test_campaign.py",
    "tests/e2e/test_compose.py",
    "tests/e2e/test_guides_settings.py",
    "tests/e2e/test_kubelet_restarts.py",
    "tests/e2e/test_ledger_damage.py",
    "tests/e2e/admission/test_doctor.py::test_doctor_is_right_after_each_operation",
    "tests/e2e/admission/test_doctor.py::test_doctor_names_each_fault_and_its_remedy",
    "tests/e2e/three_nodes/test_agent_hangs.py",
    "tests/e2e/three_nodes/test_stolen_credentials.py::test_no_",
    "tests/integration/api/test_pictures.py::test_axe_finds_nothing",
    "tests/integration/auth/test_auth.py::test_a_ca_is_replaced",
    "tests/integration/manifests/test_pages_on_a_cluster.py",
    "tests/integration/release/",
    "tests/integration/webhook/test_floods.py",
)
"""Tests of rare faults, installations and releases, about half a minute or longer each:
`make test` runs them if `CI` is set."""
FIRST = (
    "tests/e2e/three_nodes/",
    "tests/e2e/one_node/",
    "tests/e2e/admission/",
    "tests/integration/ledger/test_protocol.py",
    *LONG,
)
"""They begin first, or others would wait for them at the end."""
GARBAGE = 5_000
"""Objects that are made before the youngest are looked through."""
MOST_REPEATED = 3
"""A run with more repetitions fails: so a race that is met often does not pass unnoticed."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that take long and that need real servers, and put the longest first.

    In CI, end-to-end tests run again after a failure.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    for item in items:
        folders = item.nodeid.partition("::")[0].split("/")
        if SERVERS.intersection(folders) and item.get_closest_marker("servers") is None:
            item.add_marker(pytest.mark.servers)
        if item.nodeid.startswith(LONG):
            item.add_marker(pytest.mark.long)
        if IN_CI and folders[:2] == ["tests", "e2e"]:
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=1))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage in what tests make, and not in half a million objects of collected tests.

    Tests of random input leave much, which is freed sooner than services do it: while it still is
    in the processor's cache.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(GARBAGE, *GC_THRESHOLD[1:])
        gc.enable()


def repeated(config: pytest.Config) -> int:
    """Return how often tests were run again; workers of xdist report to this process."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return len(reporter.stats.get("rerun", ())) if reporter else 0


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run whose tests were repeated too often."""
    if session.exitstatus == pytest.ExitCode.OK and repeated(session.config) > MOST_REPEATED:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why a run fails whose tests were repeated too often."""
    number = repeated(terminalreporter.config)
    if number > MOST_REPEATED:
        terminalreporter.write_line(
            f"tests were repeated {number} times, more than {MOST_REPEATED}: the run fails; "
            "-r R lists them"
        )


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Gives a worker all tests of a file, or of a folder of end-to-end tests: it has one stack."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePosixPath(super()._split_scope(nodeid))
        return str(file.parent if file.parent.parent.name == "e2e" else file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)
