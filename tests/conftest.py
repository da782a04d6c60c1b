"""Settings of all tests."""

import os
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler.loadfile import LoadFileScheduling

# No test may reach a cluster of whoever runs it.
os.environ.pop("KUBECONFIG", None)

settings.register_profile("any machine", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=2_000, derandomize=False)
settings.load_profile("any machine")

SERVERS = {"e2e", "hardware", "integration"}
"""Folders of tests that run real servers and processes."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need real servers. In CI only those run again after a failure."""
    root = Path(__file__).parents[1]
    for item in items:
        of_servers = SERVERS.intersection(item.path.relative_to(root).parts)
        if of_servers and item.get_closest_marker("servers") is None:
            item.add_marker(pytest.mark.servers)
            if os.environ.get("CI"):
                item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=1))


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Gives a worker all tests of a file, or of a folder of end-to-end tests: it has one stack."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePosixPath(super()._split_scope(nodeid))
        return str(file.parent if file.parent.parent.name == "e2e" else file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)
