"""TLS to NATS and Redis: its files, and explanations of certificate errors.

Files are read anew for each connection, so that certificates are replaced under a running process.
"""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.model.errors import RequestError

EXPIRED, NOT_YET, WRONG_NAMES = 10, 9, (62, 63, 64)
UNTRUSTED = frozenset({2, 18, 19, 20, 21, 24})
"""OpenSSL's codes for a chain that ends at no trusted CA."""
_OURS_REFUSED = ("CERTIFICATE_REQUIRED", "BAD_CERTIFICATE", "UNKNOWN_CA", "CERTIFICATE_EXPIRED",
                 "CERTIFICATE_UNKNOWN", "HANDSHAKE_FAILURE", "DECRYPT_ERROR")  # fmt: skip
"""TLS alerts of a server that rejects our client certificate, or requires one."""
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE", "HTTP_REQUEST")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: trusted CAs, and our client certificate if the server requires one."""

    ca: Path | None = None
    """CAs of the server's certificate; None: those of the system."""
    certificate: Path | None = None
    key: Path | None = None
    """Key of `certificate`; None: in the same file."""

    def __bool__(self) -> bool:
        return bool(self.ca or self.certificate)

    def context(self) -> ssl.SSLContext:
        """Load the files. Raises RequestError with the path of an invalid file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca is None:
            context.load_default_certs()
        else:
            try:
                context.load_verify_locations(self.ca)
            except (OSError, ValueError) as error:
                raise RequestError(
                    f"{self.ca}, by which a server's certificate is judged, {_fault(error)}"
                ) from error
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key)
            except (OSError, ValueError) as error:
                files = f"{self.certificate}{f' with the key {self.key}' if self.key else ''}"
                raise RequestError(f"{files}, which we show to servers, {_fault(error)}") from error
        return context


NO_FILES = TlsFiles()
"""The CAs of the system, and no client certificate."""


def tls_fault(error: BaseException | None, *, flag: str) -> str | None:
    """Explain a certificate error and its remedy; None: it is another error.

    `flag` is how the settings of this server begin: `--nats` or `--redis`.
    """
    return next((text for one in _chain(error) if (text := _one_fault(one, flag))), None)


def _one_fault(error: BaseException, flag: str) -> str | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _of_theirs(error, flag)
    if not isinstance(error, ssl.SSLError):
        return None
    reason = str(error.reason or error)
    if any(word in reason for word in _NO_TLS):
        return f"it speaks no TLS on this port: give its TLS port, or leave out {flag}-ca-file"
    if any(word in reason for word in _OURS_REFUSED):
        return (
            f"it does not take our certificate ({reason.lower()}): {flag}-certificate-file and "
            f"{flag}-key-file must be valid now and of an authority that the server trusts"
        )
    return f"TLS failed: {reason}"


def _of_theirs(error: ssl.SSLCertVerificationError, flag: str) -> str:
    code = error.verify_code
    if code == EXPIRED:
        return "its certificate has expired: renew it there, and compare the clocks"
    if code == NOT_YET:
        return "its certificate is not valid yet: compare the clocks of both machines"
    if code in WRONG_NAMES:
        return (
            f"its certificate is for another name ({error.verify_message}): give the name in "
            f"{flag}-url that it is for, or have it made for this one"
        )
    if code in UNTRUSTED:
        return (
            f"its certificate is of an authority that we do not know ({error.verify_message}): "
            f"{flag}-ca-file must hold that authority; another server may be answering"
        )
    return f"its certificate is refused: {error.verify_message}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _fault(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "no PEM").lower().replace("_", " ")
        return f"does not hold what it should: {reason}"
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"
