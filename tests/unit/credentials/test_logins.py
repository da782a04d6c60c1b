"""Who we are at NATS and Redis, read from a file."""

from pathlib import Path

import pytest

from shared.credentials.logins import Login, load_login
from shared.model.errors import RequestError


def test_a_file_says_user_and_secret(tmp_path: Path) -> None:
    file = tmp_path / "placer"
    file.write_text("placer:s:cret\n")

    login = load_login(file)

    assert login == Login(user="placer", secret="s:cret")  # noqa: S106 - made up
    assert "s:cret" not in repr(login)


@pytest.mark.parametrize("text", ["", "placer", "placer:", ":hidden", "placer:hidden\nmore"])
def test_another_file_is_refused_without_showing_what_is_in_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "placer"
    file.write_text(text)

    with pytest.raises(RequestError, match="user:secret") as refused:
        load_login(file)

    assert "hidden" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file"):
        load_login(tmp_path / "none")
