"""The client of admission webhooks: TLS with their CA bundle, within their timeout."""

import base64
import os
import ssl

import aiohttp
import msgspec

from simcluster.apimachinery.objects import Json, JsonValue, decode, encode
from simcluster.apiserver.admission.review import WebhookCallError
from simcluster.apiserver.admission.service_address import WebhookAddress, resolve_address
from simcluster.apiserver.storage.store import ObjectStore
from simcluster.credentials import CertificateFiles


class WebhookClient:
    """Holds the connections to webhooks; `close` it with the server."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._session: aiohttp.ClientSession | None = None
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._files: CertificateFiles | None = None

    def present(self, files: CertificateFiles) -> None:
        """Use this client certificate, as an API server's AdmissionConfiguration has it."""
        self._files = files
        self._contexts.clear()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def post(self, config: Json, body: Json, *, timeout_s: int) -> JsonValue:
        """Send a review and return the decoded response; `WebhookCallError` if that fails.

        The texts are those of the Kubernetes API server; they contain the method and the URL.
        """
        target = self._target(config)
        call_text = f'Post "{target.url}?timeout={timeout_s}s"'
        if self._session is None:
            self._session = aiohttp.ClientSession()
        try:
            async with self._session.post(
                f"{target.dial_url}?timeout={timeout_s}s",
                data=encode(body),
                headers={"Content-Type": "application/json", "Accept": "application/json",
                         "Host": target.host},
                ssl=self._context(config.get("caBundle") or ""),
                server_hostname=target.server_name,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:  # fmt: skip
                return _decode_response(response.status, await response.read())
        except TimeoutError as error:
            raise _failed(f"{call_text}: context deadline exceeded") from error
        except aiohttp.ClientConnectorCertificateError as error:
            detail = (
                getattr(error.certificate_error, "verify_message", "") or error.certificate_error
            )
            text = f"{call_text}: tls: failed to verify certificate: x509: {detail}"
            raise _failed(text) from error
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno
            detail = os.strerror(number).lower() if number else str(error.os_error)
            raise _failed(
                f"{call_text}: dial tcp {error.host}:{error.port}: connect: {detail}"
            ) from error
        except aiohttp.ClientError as error:
            raise _failed(f"{call_text}: {error}") from error

    def _target(self, config: Json) -> WebhookAddress:
        try:
            return resolve_address(config, self._store)
        except LookupError as error:
            raise _failed(str(error.args[0])) from error

    def _context(self, bundle: str) -> ssl.SSLContext:
        """Trust the CA bundle, or this machine's CAs if there is no bundle."""
        if bundle not in self._contexts:
            pem = base64.b64decode(bundle).decode() if bundle else None
            context = ssl.create_default_context(cadata=pem)
            # Like Go, accept certificates without the extensions that strict mode requires.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if self._files is not None:
                context.load_cert_chain(self._files.certificate, self._files.key)
            self._contexts[bundle] = context
        return self._contexts[bundle]


def _failed(detail: str) -> WebhookCallError:
    return WebhookCallError(f"failed to call webhook: {detail}")


def _decode_response(status: int, raw: bytes) -> JsonValue:
    if status == 404:
        raise _failed("the server could not find the requested resource")
    if not 200 <= status < 300:
        text = raw[:2048].decode(errors="replace").strip() or "unknown"
        raise _failed(
            f'an error on the server ("{text}") has prevented the request from succeeding'
        )
    try:
        return decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _failed(f"couldn't get version/kind; json parse error: {error}") from error
