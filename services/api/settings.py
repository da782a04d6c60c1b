"""Settings of the API."""

from dataclasses import dataclass
from pathlib import Path

from shared.credentials.authorization import AUTH_MODES, is_loopback
from shared.credentials.serving_files import ServingFiles
from shared.model.errors import RequestError
from shared.model.leases.lease import IDLE_AFTER_S
from shared.runtime.request_settings import RequestSettings
from shared.runtime.settings import LedgerSettings, setting

ABOUT = """Serves a live page of devices, leases and waiting pods, /api/v1, and /metrics with the
names of other schedulers. Any number of replicas may run."""

EXAMPLES = (
    "python -m services.api                  # on this machine only, without a token",
    "python -m services.api --auth tokens --tokens tokens.txt --listen 0.0.0.0:8088",
    "python -m services.api --auth kube --listen 0.0.0.0:8088  # in a cluster",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings(RequestSettings, LedgerSettings):
    """Those about requests must be the watchers'."""

    kubeconfig: Path | None = setting(
        None,
        "kubeconfig for --auth kube, default: $KUBECONFIG, in-cluster, ~/.kube/config; with --auth "
        "none: reviews the tokens of requests that resize a pod or grant GPU time",
    )
    listen: str = setting(
        "127.0.0.1:0", "HOST:PORT of the page and of /api/v1; port 0: any", address=True
    )
    certificate_file: Path | None = setting(
        None, "PEM file with a certificate: --listen uses TLS; default: HTTP"
    )
    key_file: Path | None = setting(None, "PEM file with that certificate's key")
    aggregated: str = setting(
        "",
        "HOST:PORT of visibility.leasehold.dev, for the API server only: kubectl get gpudevices",
        address=True,
    )
    aggregated_secret: str = setting(
        "",
        "NAMESPACE/NAME of the Secret with its certificate, for all replicas; default: of its own, "
        "in --state-dir",
    )
    auth: str = setting(
        "none",
        "authentication: none (loopback only), tokens (of a file), kube (tokens of the API server; "
        "without the right to get pods of a namespace, its leases are shown as `in use`)",
        one_of=AUTH_MODES,
    )
    tokens: Path | None = setting(
        None, "with --auth tokens: file of lines `TOKEN NAMESPACE`, * for all namespaces"
    )
    state_dir: Path = setting(
        Path("/var/lib/api"),
        "directory of what this replica makes itself: with --auth tokens and without --tokens, a "
        "token for all namespaces in `tokens`; without --aggregated-secret, a certificate",
    )
    trace_url: str = setting(
        "",
        "URL of a trace, with {trace} for its id: http://HOST:16686/trace/{trace}",
        schemes=("http", "https"),
    )
    scheduler_metrics: str = setting(
        "",
        "HOST:PORT of /metrics with the names of Volcano's and HAMi's schedulers, without login",
        address=True,
    )

    prices: Path | None = setting(
        None,
        "YAML file with `currency` and `models`: the prices of a GPU for an hour",
    )
    prometheus_url: str = setting(
        "",
        "URL of a Prometheus that scrapes Leasehold's services and agents: charts show up to 7 "
        "days from it, instead of the hour that each replica has in memory",
        schemes=("http", "https"),
    )
    idle_after_minutes: float = setting(
        IDLE_AFTER_S / 60, "minutes without use after which a share is marked as idle"
    )

    def check(self) -> None:
        RequestSettings.check(self)
        if (self.certificate_file is None) != (self.key_file is None):
            raise RequestError("--certificate-file and --key-file are needed together")
        if self.aggregated and self.auth != "kube" and self.kubeconfig is None:
            raise RequestError("--aggregated needs an API server: set --auth kube or --kubeconfig")
        if self.tokens and self.auth != "tokens":
            raise RequestError(f"--tokens has no effect with --auth {self.auth}: add --auth tokens")
        if self.auth == "none" and not is_loopback(self.listen):
            raise RequestError(
                f"--listen {self.listen} is reachable from other hosts, and --auth none shows "
                "everything to any client: listen on 127.0.0.1, or set --auth tokens or --auth kube"
            )

    @property
    def serving_files(self) -> ServingFiles | None:
        """Return None for HTTP. Raises RequestError."""
        if self.certificate_file is None or self.key_file is None:
            return None
        return ServingFiles(self.certificate_file, self.key_file)

    @property
    def token_file(self) -> Path:
        return self.tokens or self.state_dir / "tokens"
