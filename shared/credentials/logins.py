"""Our credentials at NATS or Redis and the server's CA: files that are read at each connection."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from shared.credentials.tls import NO_FILES, TlsFiles
from shared.model.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    user: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCredentials:
    login_file: Path | None = None
    """One line, USER:SECRET."""
    token_file: Path | None = None
    user: str = ""
    tls: TlsFiles = NO_FILES

    def login(self) -> Login | None:
        """Raises RequestError, never with the content of a file."""
        if self.login_file is not None:
            return load_login(self.login_file)
        if self.token_file is not None:
            return Login(user=self.user, secret=_load_token(self.token_file))
        return None

    @property
    def secret_file(self) -> Path | None:
        return self.login_file or self.token_file


NO_CREDENTIALS = ClientCredentials()


def load_login(path: Path) -> Login:
    """Raises RequestError with the path of the file, never its content."""
    text = _text(path, "user:secret")
    user, _, secret = text.partition(":")
    if not user or not secret or "\n" in text:
        raise RequestError(
            f"{path} must contain one line, user:secret; `leasehold credentials --out DIR` "
            "writes such files"
        )
    return Login(user=user, secret=secret)


def write_private(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file whatever the umask is; a reader sees old or new content. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
    draft.replace(path)


def _load_token(path: Path) -> str:
    text = _text(path, "a token")
    if not text or len(text.split()) != 1:
        raise RequestError(f"{path} must contain one token; is it a projected volume's file?")
    return text


def _text(path: Path, wanted: str) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"cannot read {wanted} from {path}: "
            f"{getattr(error, 'strerror', None) or 'it is not text'}"
        ) from error
