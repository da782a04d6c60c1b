"""Authentication at the API server: TLS and bearer token of `ClusterCredentials`."""

import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path

from shared.kubernetes.kubeconfig import ClusterCredentials, KubeconfigError

TOKEN_AGE_S = 60.0


class BearerToken:
    """The Authorization header; a token file is read again every minute and after a 401."""

    def __init__(self, credentials: ClusterCredentials, *, clock: Callable[[], float]) -> None:
        self._file = credentials.token_file
        self._token = credentials.token
        self._clock = clock
        self._read_at = float("-inf")

    def headers(self) -> dict[str, str]:
        """Return the header, or none; raises KubeconfigError if the file is unreadable."""
        if self._file is not None and self._clock() - self._read_at >= TOKEN_AGE_S:
            self._read(self._file)
        return {} if self._token is None else {"Authorization": f"Bearer {self._token}"}

    def headers_after_refusal(self) -> dict[str, str]:
        """Return the header with the token that the file has now."""
        self._read_at = float("-inf")
        return self.headers()

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


def tls_context(credentials: ClusterCredentials) -> ssl.SSLContext:
    """Build the TLS context; raises KubeconfigError if a certificate or key is invalid."""
    try:
        context = ssl.create_default_context(cadata=credentials.ca_pem)
        if credentials.insecure_skip_tls_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        # Kubernetes' own CAs often lack the key identifiers that the strict mode requires.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if credentials.client_cert_pem and credentials.client_key_pem:
            _load_client_certificate(
                context, credentials.client_cert_pem, credentials.client_key_pem
            )
    except ssl.SSLError as error:
        raise KubeconfigError(
            credentials.server,
            f"its certificate authority or client certificate is unusable ({error})",
            "Write the kubeconfig anew",
        ) from error
    return context


def _load_client_certificate(context: ssl.SSLContext, cert_pem: str, key_pem: str) -> None:
    """Load the client certificate through a private file, since Python's ssl needs one."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(f"{cert_pem}\n{key_pem}")
        file.flush()
        context.load_cert_chain(file.name)
