"""The logins of all services."""

from collections.abc import Iterator

import pytest

from services.cli.credentials import CredentialFiles
from tests.support.auth.logins import written_logins


@pytest.fixture(scope="module")
def written() -> Iterator[CredentialFiles]:
    with written_logins() as files:
        yield files
