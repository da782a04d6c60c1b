"""A fake node for the tests of the usage monitor."""

from pathlib import Path

import pytest

from tests.support.node_agent.monitor_world import MonitorWorld, monitored


@pytest.fixture
def world(tmp_path: Path) -> MonitorWorld:
    return monitored(tmp_path)
