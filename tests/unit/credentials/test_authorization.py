"""Tokens that callers send, whatever bytes they have."""

from pathlib import Path

import pytest

from shared.credentials.authorization import (
    Authenticator,
    KubernetesAuthenticator,
    ScopedViewer,
    load_tokens,
)
from tests.support.clock import FakeClock


def as_header(token: bytes) -> str:
    """Return a token as the HTTP server decodes it."""
    return token.decode(errors="surrogateescape")


def authenticators(folder: Path) -> dict[str, Authenticator]:
    file = folder / "tokens"
    file.write_text("schlüssel team-a\n")
    unused: None = None
    return {
        "tokens": load_tokens(file),
        "kube": KubernetesAuthenticator(unused, FakeClock()),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("mode", ["tokens", "kube"])
async def test_bytes_that_are_no_text_are_an_unknown_token(tmp_path: Path, mode: str) -> None:
    authenticator = authenticators(tmp_path)[mode]

    assert await authenticator.authenticate(as_header(b"\xff\xfe")) is None


async def test_a_token_of_a_file_may_have_other_letters(tmp_path: Path) -> None:
    viewer = await authenticators(tmp_path)["tokens"].authenticate(as_header("schlüssel".encode()))

    assert viewer == ScopedViewer(frozenset({"team-a"}))
