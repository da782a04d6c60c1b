"""Who we are at NATS or Redis, and by what we know the server: files, read at each connection."""

from dataclasses import dataclass, field
from pathlib import Path

from shared.credentials.tls import NO_FILES, TlsFiles
from shared.model.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Who we are there; the secret is shown nowhere."""

    user: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCredentials:
    """What we show at a server's door, and by what we know that it is that server."""

    credentials: Path | None = None
    """A file of one line, user:secret."""
    token: Path | None = None
    """A file with a bearer token, in place of a secret."""
    user: str = ""
    """Whose token it is."""
    tls: TlsFiles = NO_FILES

    def login(self) -> Login | None:
        """Read who we are; None: nobody. Raises RequestError, never showing what is in a file."""
        if self.credentials is not None:
            return load_login(self.credentials)
        if self.token is not None:
            return Login(user=self.user, secret=_load_token(self.token))
        return None

    @property
    def shown(self) -> Path | None:
        """The file that says who we are."""
        return self.credentials or self.token


NO_CREDENTIALS = ClientCredentials()
"""Nobody, on a connection that anybody may read."""


def load_login(path: Path) -> Login:
    """Read the file. Raises RequestError, naming it and never what is in it."""
    text = _text(path, "user:secret")
    user, _, secret = text.partition(":")
    if not user or not secret or "\n" in text:
        raise RequestError(
            f"{path} must hold one line, user:secret; `leasehold doors --out DIR` writes such files"
        )
    return Login(user=user, secret=secret)


def _load_token(path: Path) -> str:
    text = _text(path, "a token")
    if not text or len(text.split()) != 1:
        raise RequestError(f"{path} must hold one word, a token; is it a projected volume's file?")
    return text


def _text(path: Path, wanted: str) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{path}, which is to hold {wanted}, cannot be read: "
            f"{getattr(error, 'strerror', None) or 'it is no text'}"
        ) from error
