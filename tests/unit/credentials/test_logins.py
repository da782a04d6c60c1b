"""The user and secret for NATS and Redis, read from a file."""

from pathlib import Path

import pytest

from shared.credentials.logins import Login, load_login
from shared.model.errors import RequestError


def test_a_file_contains_user_and_secret(tmp_path: Path) -> None:
    file = tmp_path / "placer"
    file.write_text("placer:s:cret\n")

    login = load_login(file)

    assert login == Login(user="placer", secret="s:cret")  # noqa: S106 - made up
    assert "s:cret" not in repr(login)


@pytest.mark.parametrize("text", ["", "placer", "placer:", ":hidden", "placer:hidden\nmore"])
def test_an_invalid_file_is_refused_without_showing_its_content(tmp_path: Path, text: str) -> None:
    file = tmp_path / "placer"
    file.write_text(text)

    with pytest.raises(RequestError, match="user:secret") as refused:
        load_login(file)

    assert "hidden" not in str(refused.value)


def test_a_missing_credentials_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file"):
        load_login(tmp_path / "none")
