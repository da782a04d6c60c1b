"""The extender's settings."""

from dataclasses import dataclass
from pathlib import Path

from shared.model.errors import RequestError
from shared.runtime.request_settings import RequestSettings
from shared.runtime.settings import ApiServerSettings, LedgerSettings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtenderSettings(RequestSettings, ApiServerSettings, LedgerSettings):
    """Settings about requests must be the watchers'."""

    listen: str = setting(
        "127.0.0.1:0", "HOST:PORT that kube-scheduler calls; port 0: any", address=True
    )
    certificate_file: Path | None = setting(None, "PEM file with the serving certificate")
    key_file: Path | None = setting(None, "PEM file with that certificate's key")
    client_ca_file: Path | None = setting(
        None, "PEM file with the CA of kube-scheduler's client certificate"
    )
    client_name: str = setting(
        "kube-scheduler", "DNS name in the client certificates that are accepted"
    )

    @property
    def tls_files(self) -> tuple[Path, Path, Path]:
        """Return certificate, key and client CA. Raises RequestError if one is not set."""
        files = (self.certificate_file, self.key_file, self.client_ca_file)
        certificate, key, client_ca = files
        if certificate is None or key is None or client_ca is None:
            raise RequestError(
                "--certificate-file, --key-file and --client-ca-file are needed: a caller without "
                "a client certificate could bind any pod"
            )
        return certificate, key, client_ca
