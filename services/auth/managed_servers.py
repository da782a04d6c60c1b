"""NATS and Redis as the auth service manages them, and the files with its own credentials."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.auth.root_secret import AUTH
from services.auth.settings import AuthSettings
from shared.credentials.logins import ClientCredentials
from shared.ledger.redis_server import reload_certificate, set_users
from shared.model.errors import RequestError, UnavailableError
from shared.nats.servers import reload_servers


class ManagedServers:
    """The NATS servers and the Redis server."""

    def __init__(self, settings: AuthSettings) -> None:
        self.settings = settings
        self._directory = settings.state_dir

    @property
    def nats_credentials(self) -> ClientCredentials:
        """The credentials of the auth callout's user at NATS."""
        return replace(
            self.settings.nats_client_credentials(AUTH),
            login_file=self._directory / "nats",
            token_file=None,
        )

    @property
    def redis_credentials(self) -> ClientCredentials:
        """The credentials of Redis' administrator."""
        return replace(self.settings.redis_client_credentials, login_file=self._directory / "redis")

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write the service's own credentials, mode 0600. Raises RequestError on an I/O error."""
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
        """Set the users of Redis and their permissions. Raises UnavailableError if it refuses."""
        await set_users(self.settings.redis_url, self.redis_credentials, users)

    async def reload(self) -> None:
        """Make both reload their certificates. Raises UnavailableError if NATS does not reply."""
        system = replace(self.nats_credentials, login_file=self._directory / "nats-system")
        if not await reload_servers(self.settings.nats_url, system):
            raise UnavailableError("no NATS server replied to the reload request")
        if directory := self.settings.redis_files:
            files = (f"{directory}/server.crt", f"{directory}/server.key")
            await reload_certificate(
                self.settings.redis_url, self.redis_credentials, *map(os.fspath, files)
            )
