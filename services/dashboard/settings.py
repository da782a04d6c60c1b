"""What the dashboard is told."""

from dataclasses import dataclass
from pathlib import Path

from shared.credentials.authorization import AUTH_MODES, is_loopback
from shared.model.errors import RequestError
from shared.runtime.settings import LedgerSettings, setting

ABOUT = """Shows devices, leases and waiting pods on a page, live, and answers /api/v1 and the old
schedulers' /metrics. Any number of replicas may run."""

EXAMPLES = (
    "python -m services.dashboard                                    # here, without a token",
    "python -m services.dashboard --auth tokens --tokens tokens.txt --listen 0.0.0.0:8088",
    "python -m services.dashboard --auth kube --listen 0.0.0.0:8088  # in a cluster",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSettings(LedgerSettings):
    """Flags of `python -m services.dashboard`."""

    kubeconfig: Path | None = setting(
        None, "kubeconfig for --auth kube; default: $KUBECONFIG, in-cluster, ~/.kube/config"
    )
    listen: str = setting("127.0.0.1:0", "HOST:PORT of the page and of /api/v1; port 0: any")
    auth: str = setting(
        "none",
        "who may look: none (loopback only), tokens (of a file), kube (the API server decides: "
        "who may not get pods of a namespace sees its leases as `in use`)",
    )
    tokens: Path | None = setting(
        None, "with --auth tokens: file of lines `TOKEN NAMESPACE`, * for all namespaces"
    )
    state_dir: Path = setting(
        Path("/var/lib/dashboard"),
        "with --auth tokens and no --tokens: a token for everything is made here, in `tokens`",
    )
    trace_url: str = setting(
        "", "where a trace is shown, {trace} for its id: http://HOST:16686/trace/{trace}"
    )
    scheduler_metrics: str = setting(
        "", "HOST:PORT of a second /metrics with Volcano's and HAMi's schedulers' names; no login"
    )

    def check(self) -> None:
        """Raise RequestError for settings that contradict each other or would let anybody in."""
        if self.auth not in AUTH_MODES:
            raise RequestError(f"--auth {self.auth!r} is none of {', '.join(AUTH_MODES)}")
        if self.tokens and self.auth != "tokens":
            raise RequestError(f"--tokens says nothing with --auth {self.auth}: add --auth tokens")
        if self.auth == "none" and not is_loopback(self.listen):
            raise RequestError(
                f"--listen {self.listen} can be reached from elsewhere, and --auth none would show "
                "everything to anybody: listen on 127.0.0.1, or give --auth tokens or --auth kube"
            )
        if self.trace_url and not self.trace_url.startswith(("http://", "https://")):
            raise RequestError(f"--trace-url {self.trace_url!r} is no http:// or https:// address")

    @property
    def token_file(self) -> Path:
        """The file of tokens."""
        return self.tokens or self.state_dir / "tokens"
