"""Bearer tokens of a file, each for one namespace or for all."""

import hmac
from dataclasses import dataclass
from pathlib import Path

from shared.model.errors import RequestError

EVERYTHING = "*"
VIEWER_COOKIE = "leasehold_token"
"""The cookie with a viewer's token, for where no Authorization header arrives."""


class AccessDeniedError(RequestError):
    """The client may not do this; `known`: it is authenticated."""

    def __init__(self, reason: str, *, known: bool) -> None:
        super().__init__(reason)
        self.known = known


@dataclass(frozen=True, slots=True)
class AccessTokens:
    """Tokens and their scopes."""

    tokens: tuple[tuple[bytes, str], ...] = ()

    def scopes(self, header: str) -> frozenset[str]:
        """Return the namespaces of the token in a header, `*` for all, none for an unknown one."""
        kind, _, given = header.partition(" ")
        return frozenset(
            scope
            for token, scope in self.tokens
            if kind.lower() == "bearer" and hmac.compare_digest(token, given.strip().encode())
        )


def load_access_tokens(path: Path) -> AccessTokens:
    """Load a file of tokens. Raises RequestError for an invalid line, without its content."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--tokens {path} cannot be read: {error}") from error
    tokens = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise RequestError(f"--tokens {path}, line {number}: must be TOKEN NAMESPACE")
        tokens.append((words[0].encode(), words[1]))
    return AccessTokens(tokens=tuple(tokens))
