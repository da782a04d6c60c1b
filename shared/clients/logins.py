"""A user's name and secret at NATS or Redis, read from a file that says `user:secret`."""

from dataclasses import dataclass, field
from pathlib import Path

from shared.model.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Who we are there; the secret is shown nowhere."""

    user: str
    secret: str = field(repr=False)


def load_login(path: Path) -> Login:
    """Read the file. Raises RequestError, naming it and never what is in it."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{path}, which is to hold user:secret, cannot be read: "
            f"{getattr(error, 'strerror', None) or 'it is no text'}"
        ) from error
    user, _, secret = text.partition(":")
    if not user or not secret or "\n" in text:
        raise RequestError(
            f"{path} must hold one line, user:secret; `leasehold doors --out DIR` writes such files"
        )
    return Login(user=user, secret=secret)
