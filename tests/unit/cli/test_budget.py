"""The actor that `leasehold budget grant` records."""

import getpass
import os

import pytest

from services.cli.admin import budget


def test_a_user_without_a_name_is_recorded_by_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 65532")

    monkeypatch.setattr(getpass, "getuser", no_name)

    assert budget._user_name() == f"uid {os.getuid()}"
