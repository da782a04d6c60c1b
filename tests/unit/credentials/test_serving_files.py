"""The certificate of a server and the authority of its clients, read from files."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from shared.credentials.certificates import authority, issue
from shared.credentials.serving_files import ServingFiles
from shared.model.errors import RequestError


def test_an_authority_of_clients_that_is_not_text_is_refused(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    issued = issue(authority("test", now, days=1), ["localhost"], now, days=1)
    certificate, key, client_ca = (tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt"))
    certificate.write_bytes(issued.certificate)
    key.write_bytes(issued.key)
    client_ca.write_bytes(b"\xff\xfe")

    with pytest.raises(RequestError, match=r"ca\.crt cannot be loaded"):
        ServingFiles(certificate, key, client_ca)
