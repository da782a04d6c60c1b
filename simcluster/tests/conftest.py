"""Settings of the tests of the simulated cluster: those of all tests."""

from tests.conftest import pytest_collection_modifyitems
from tests.support.driver_fixtures import driver, driver_folder, nvml

__all__ = ["driver", "driver_folder", "nvml", "pytest_collection_modifyitems"]
