"""What `leasehold budget` says of who types it."""

import getpass
import os

import pytest

from services.cli.admin import budget


def test_who_has_no_name_is_known_by_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 65532")

    monkeypatch.setattr(getpass, "getuser", nobody)

    assert budget._who() == f"uid {os.getuid()}"
