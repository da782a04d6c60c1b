"""Authentication at the API server: bearer token and certificate of `ClusterCredentials`."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from shared.kubernetes.exec_plugin import ExecPlugin
from shared.kubernetes.kubeconfig import ClusterCredentials, KubeconfigError

TOKEN_AGE_S = 60.0
EXPIRY_MARGIN_S = 10.0
"""A plugin runs again this long before its credential expires."""


class RequestAuthentication:
    """The Authorization header and client certificate of requests.

    A token file is read again every minute, a plugin runs again when its credential expires, and
    both after a 401.
    """

    def __init__(self, credentials: ClusterCredentials, *, clock: Callable[[], float]) -> None:
        self._file = credentials.token_file
        self._token = credentials.token
        self._plugin = credentials.exec_plugin
        self._clock = clock
        self._read_at = float("-inf")
        self._expires_at = float("-inf")
        self._running = asyncio.Lock()
        self.certificate: tuple[str, str] | None = None
        """The certificate and key of the plugin, PEM; None: it returned none."""

    async def token(self) -> str | None:
        """Return the bearer token, or None. Raises KubeconfigError or ExecPluginError."""
        if self._file is not None and self._clock() - self._read_at >= TOKEN_AGE_S:
            self._read(self._file)
        if self._plugin is not None:
            async with self._running:
                if time.time() >= self._expires_at:
                    await self._run(self._plugin)
        return self._token

    async def headers(self) -> dict[str, str]:
        """Return the header, or none; raises KubeconfigError or ExecPluginError."""
        token = await self.token()
        return {} if token is None else {"Authorization": f"Bearer {token}"}

    async def headers_after_refusal(self) -> dict[str, str]:
        """Return the header with the token that the file has now, or the plugin returns now."""
        self._read_at = self._expires_at = float("-inf")
        return await self.headers()

    async def _run(self, plugin: ExecPlugin) -> None:
        status = await asyncio.to_thread(plugin.run)
        expires = status.expiration_timestamp
        self._expires_at = expires.timestamp() - EXPIRY_MARGIN_S if expires else float("inf")
        self._token = status.token or None
        pair = status.client_certificate_data, status.client_key_data
        self.certificate = pair if all(pair) else None

    def _read(self, file: Path) -> None:
        try:
            self._token = file.read_text().strip()
        except OSError as error:
            if self._token is not None:
                return
            raise KubeconfigError(
                str(file), f"cannot be read ({error.strerror})", "Check the service account's mount"
            ) from error
        self._read_at = self._clock()
