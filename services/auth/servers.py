"""NATS and Redis as the auth service looks after them, and its own files, by which they know it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.auth.secrets import AUTH
from services.auth.settings import AuthSettings
from shared.credentials.logins import ClientCredentials
from shared.ledger.redis_server import reload_certificate, set_users
from shared.model.errors import RequestError, UnavailableError
from shared.nats.system_account import reload_servers


class OurServers:
    """Both servers."""

    def __init__(self, settings: AuthSettings) -> None:
        self.settings = settings
        self._directory = settings.state_dir

    @property
    def nats_keys(self) -> ClientCredentials:
        """What we show to NATS, as the one who answers it."""
        return replace(
            self.settings.nats_client_credentials(AUTH),
            credentials=self._directory / "nats",
            token=None,
        )

    @property
    def redis_keys(self) -> ClientCredentials:
        """What we show to Redis, as its administrator."""
        return replace(
            self.settings.redis_client_credentials, credentials=self._directory / "redis"
        )

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write our own files, for us only. Raises RequestError if they cannot be written."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, content in files.items():
                path = self._directory / name
                if path.exists() and path.read_bytes() == content:
                    continue
                draft = path.with_name(f".{name}.new")
                draft.unlink(missing_ok=True)
                draft.touch(mode=0o600)
                draft.write_bytes(content)
                draft.replace(path)
        except OSError as error:
            raise RequestError(f"--state-dir {self._directory}: {error.strerror}") from error

    async def set_users(self, users: Sequence[Sequence[str]]) -> None:
        """Tell Redis who may what. Raises UnavailableError if it does not take it."""
        await set_users(self.settings.redis_url, self.redis_keys, users)

    async def reload(self) -> None:
        """Have both read their certificate anew. Raises UnavailableError if none does."""
        system = replace(self.nats_keys, credentials=self._directory / "nats-system")
        if not await reload_servers(self.settings.nats_url, system):
            raise UnavailableError("no server of NATS says that it is there")
        if files := self.settings.redis_files:
            shown = (f"{files}/server.crt", f"{files}/server.key")
            await reload_certificate(
                self.settings.redis_url, self.redis_keys, *map(os.fspath, shown)
            )
