"""The certificate of a server and the authority of its clients, read from files."""

import contextlib
import os
import pty
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

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


@pytest.mark.parametrize(
    "load",
    [
        "from shared.credentials.serving_files import ServingFiles\nServingFiles(*paths)",
        "from shared.credentials.tls import TlsFiles\n"
        "TlsFiles(certificate=paths[0], key=paths[1]).context()",
    ],
    ids=["of a server", "of a client"],
)
def test_the_passphrase_of_an_encrypted_key_is_not_asked_for_on_the_terminal(
    tmp_path: Path, load: str
) -> None:
    now = datetime.now(UTC)
    issued = issue(authority("test", now, days=1), ["localhost"], now, days=1)
    encrypted = serialization.load_pem_private_key(issued.key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_bytes(issued.certificate)
    key.write_bytes(encrypted)
    paths = f"paths = Path({str(certificate)!r}), Path({str(key)!r})"
    code = f"from pathlib import Path\n{paths}\n{load}"

    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])  # noqa: S606
    printed = b""
    with contextlib.suppress(OSError):  # it has ended
        while b"pass phrase" not in printed:
            printed += os.read(terminal, 4096)
    os.close(terminal)
    os.waitpid(process, 0)

    assert b"RequestError" in printed
    assert b"pass phrase" not in printed
