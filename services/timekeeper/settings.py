"""The timekeeper's settings."""

from dataclasses import dataclass
from pathlib import Path

from shared.credentials.authorization import AUTH_MODES, is_loopback
from shared.model.errors import RequestError
from shared.runtime.settings import LedgerSettings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TimekeeperSettings(LedgerSettings):
    """What the timekeeper is told."""

    kubeconfig: Path | None = setting(
        None, "kubeconfig; default: $KUBECONFIG, in-cluster, ~/.kube/config"
    )
    objects: bool = setting(True, "obey the cluster's GPUBudget objects, and write their status")
    budgets: Path | None = setting(
        None, "YAML file of GPUBudget objects; the one named * is for all other namespaces"
    )
    model_factors: tuple[str, ...] = setting((), "MODEL=FACTOR,..: what devices count, else 1")
    tick_s: float = setting(5.0, "seconds between two counts")
    charge_every_s: float = setting(
        900.0, "seconds after which time that is held gets a ledger entry"
    )
    keep_days: int = setting(400, "days after which entries are cut off the ledger")
    api: str = setting("127.0.0.1:0", "HOST:PORT of /budget and /v1; port 0: any")
    auth: str = setting(
        "",
        "who may ask: none (loopback only; nobody may grant), tokens (of a file), kube (the API "
        "server decides: read whose pods one may get, grant with create on gpubudgets/grants); "
        "empty: tokens if --tokens, else none",
    )
    tokens: Path | None = setting(
        None, "file of lines `TOKEN NAMESPACE`, * for all: who may read what, and * may grant"
    )
    secret: str = setting(
        "", "NAMESPACE/NAME of the Secret that replicas share a certificate in: --api speaks TLS"
    )
    authority: str = setting(
        "", "with --secret: name of the ConfigMap in its namespace for what clients are to trust"
    )
    tls_dir: Path | None = setting(None, "directory for the certificate, instead of a Secret")
    names: tuple[str, ...] = setting(
        ("127.0.0.1", "localhost"), "names and addresses in the certificate"
    )
    reports: str = setting(
        "", "HOST:PORT without TLS for GPUSharing's sidecars: /budget/NS/report and nothing else"
    )
    old_reports: str = setting(
        "answer", "calls of /budget/NS/report are answered (`answer`) or 410 Gone (`gone`)"
    )

    @property
    def manner(self) -> str:
        """How callers are known: none, tokens or kube."""
        return self.auth or ("tokens" if self.tokens else "none")

    def check(self) -> None:
        """Raise RequestError for settings that contradict each other or would let anybody in."""
        if self.manner not in AUTH_MODES:
            raise RequestError(f"--auth {self.auth!r} is none of {', '.join(AUTH_MODES)}")
        if (self.manner == "tokens") != (self.tokens is not None):
            raise RequestError("--auth tokens and --tokens FILE need each other")
        if self.manner == "none" and not is_loopback(self.api):
            raise RequestError(
                f"--api {self.api} can be reached from elsewhere, and --auth none would show every "
                "budget to anybody: listen on 127.0.0.1, or give --auth tokens or --auth kube"
            )
        if self.secret and (self.tls_dir or not all(self.secret.partition("/"))):
            raise RequestError("--secret is NAMESPACE/NAME, and takes the place of --tls-dir")
        if self.authority and not self.secret:
            raise RequestError("--authority says nothing without --secret")
