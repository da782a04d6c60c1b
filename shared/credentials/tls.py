"""TLS to NATS and Redis: its files, and explanations of certificate errors.

Files are read anew for each connection.
"""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.model.errors import RequestError

NO_PASSPHRASE = ""
"""Without one, OpenSSL asks for that of an encrypted key on the terminal."""
EXPIRED = 10
NOT_YET = 9
WRONG_NAMES = (62, 63, 64)
UNTRUSTED = frozenset({2, 18, 19, 20, 21, 24})
"""OpenSSL's codes for a chain that ends at no trusted CA."""
_CLIENT_REJECTED = ("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "UNKNOWN_CA", "CERTIFICATE_EXPIRED",
                 "CERTIFICATE_UNKNOWN", "HANDSHAKE_FAILURE", "DECRYPT_ERROR")  # fmt: skip
"""Of a server that rejects our client certificate, or requires one."""
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE", "HTTP_REQUEST")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    """Of `certificate`, unless it is in the same file."""

    def __bool__(self) -> bool:
        return bool(self.ca or self.certificate)

    def context(self) -> ssl.SSLContext:
        """Raises RequestError with the path of an invalid file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca is None:
            context.load_default_certs()
        else:
            try:
                context.load_verify_locations(self.ca)
            except (OSError, ValueError) as error:
                raise RequestError(f"the CA file {self.ca} {_fault(error)}") from error
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=NO_PASSPHRASE)
            except (OSError, ValueError) as error:
                files = f"{self.certificate}{f' with the key {self.key}' if self.key else ''}"
                raise RequestError(f"the client certificate {files} {_fault(error)}") from error
        return context


NO_FILES = TlsFiles()


def tls_fault(error: BaseException | None, *, flag: str) -> str | None:
    """Return None for an error of another kind.

    `flag` is the prefix of this server's settings: `--nats` or `--redis`.
    """
    return next((text for cause in _chain(error) if (text := _one_fault(cause, flag))), None)


def _one_fault(error: BaseException, flag: str) -> str | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _server_certificate_fault(error, flag)
    if not isinstance(error, ssl.SSLError):
        return None
    reason = str(error.reason or error)
    if any(word in reason for word in _NO_TLS):
        return f"the port does not use TLS: set the server's TLS port, or remove {flag}-ca-file"
    if any(word in reason for word in _CLIENT_REJECTED):
        return (
            f"the server rejects the client certificate ({reason.lower()}): "
            f"{flag}-certificate-file and {flag}-key-file must be valid now and issued by a "
            "CA that the server trusts"
        )
    return f"TLS failed: {reason}"


def _server_certificate_fault(error: ssl.SSLCertVerificationError, flag: str) -> str:
    code = error.verify_code
    if code == EXPIRED:
        return "the server's certificate has expired: renew it, and compare the clocks"
    if code == NOT_YET:
        return "the server's certificate is not valid yet: compare the clocks of both machines"
    if code in WRONG_NAMES:
        return (
            f"the server's certificate is for another name ({error.verify_message}): use that name "
            f"in {flag}-url, or issue a certificate for this one"
        )
    if code in UNTRUSTED:
        return (
            f"the server's certificate is not issued by a trusted CA ({error.verify_message}): set "
            f"{flag}-ca-file to its CA, or check that {flag}-url is the right server"
        )
    return f"the server's certificate is invalid: {error.verify_message}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _fault(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "no PEM, or a key with a passphrase").lower().replace("_", " ")
        return f"is invalid: {reason}"
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"
