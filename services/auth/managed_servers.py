"""NATS and Redis as the auth service manages them, and the files with its own credentials."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.auth.root_secret import AUTH, ISSUING_CA
from services.auth.settings import AuthSettings
from shared.credentials import certificates
from shared.credentials.logins import ClientCredentials, write_private
from shared.credentials.tls import TlsFiles
from shared.ledger.redis_server import ping, reload_certificate, set_users
from shared.model.errors import RequestError, UnavailableError
from shared.nats.servers import certificate_expirations, reload_servers


class ManagedServers:
    def __init__(self, settings: AuthSettings) -> None:
        self.settings = settings
        self._directory = settings.state_dir

    @property
    def nats_credentials(self) -> ClientCredentials:
        return replace(
            self.settings.nats_client_credentials(AUTH),
            login_file=self._directory / "nats",
            token_file=None,
        )

    @property
    def redis_credentials(self) -> ClientCredentials:
        return replace(self.settings.redis_client_credentials, login_file=self._directory / "redis")

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Raises RequestError on an I/O error."""
        try:
            for name, content in files.items():
                path = self._directory / name
                if not path.exists() or path.read_bytes() != content:
                    write_private(path, content)
        except OSError as error:
            raise RequestError(f"--state-dir {self._directory}: {error.strerror}") from error

    async def set_users(self, users: Sequence[Sequence[str]]) -> None:
        """Raises UnavailableError."""
        await set_users(self.settings.redis_url, self.redis_credentials, users)

    async def reload(self) -> None:
        """Raises UnavailableError if NATS does not reply."""
        if not await reload_servers(self.settings.nats_url, self._nats_system):
            raise UnavailableError("no NATS server replied to the reload request")
        if directory := self.settings.redis_files:
            await reload_certificate(self.settings.redis_url, self.redis_credentials, directory)

    async def verify(self, certificate: bytes) -> None:
        """Raises UnavailableError unless the servers serve this certificate, of the issuing CA."""
        alone = TlsFiles(ca=self._directory / ISSUING_CA)
        expected = certificates.load(certificate).not_valid_after_utc
        system = replace(self._nats_system, tls=alone)
        served = await certificate_expirations(self.settings.nats_url, system)
        if served != {expected}:
            versions = ", ".join(sorted(map(str, served))) or "none"
            raise UnavailableError(
                f"NATS servers serve certificates that expire at {versions}, not {expected}"
            )
        if self.settings.redis_files:
            redis = replace(self.redis_credentials, tls=alone)
            await ping(self.settings.redis_url, redis)

    @property
    def _nats_system(self) -> ClientCredentials:
        return replace(self.nats_credentials, login_file=self._directory / "nats-system")
