"""The timekeeper's settings."""

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from shared.credentials.authorization import AUTH_MODES, is_loopback
from shared.model.errors import RequestError
from shared.runtime.settings import ApiServerSettings, LedgerSettings, setting

_FACTOR = re.compile(r"\d{1,6}(\.\d{1,3})?")


def parse_factors(listed: tuple[str, ...]) -> dict[str, Fraction]:
    """Parse `MODEL=FACTOR,...`. Raises RequestError."""
    factors: dict[str, Fraction] = {}
    for text in listed:
        model, _, number = text.partition("=")
        if not model.strip() or not _FACTOR.fullmatch(number):
            raise RequestError(
                f"--model-factors {text!r} is not MODEL=FACTOR such as A100=2.5, with a factor "
                "below 1,000,000 and at most three decimals"
            )
        factors[model.strip()] = Fraction(number)
    return factors


@dataclass(frozen=True, slots=True, kw_only=True)
class TimekeeperSettings(ApiServerSettings, LedgerSettings):
    objects: bool = setting(True, "use GPUBudgets, and write the status of them and of GPUQuotas")
    budgets: Path | None = setting(
        None, "YAML file of GPUBudget objects; the one named * is for all other namespaces"
    )
    prices: Path | None = setting(
        None, "YAML file of prices of a GPU for an hour, for budgets in money"
    )
    model_factors: tuple[str, ...] = setting(
        (), "MODEL=FACTOR,..: weight of devices by model, else 1"
    )
    tick_s: float = setting(5.0, "seconds between two counts", at_least=0.01)
    charge_every_s: float = setting(
        900.0,
        "seconds after which the time of a running lease gets a ledger entry",
        at_least=0.01,
    )
    keep_days: int = setting(400, "days after which ledger entries are deleted", at_least=1)
    cost_days: int = setting(100, "days of costs that are kept", at_least=1)
    api: str = setting("127.0.0.1:0", "HOST:PORT of /budget; port 0: any", address=True)
    auth: str = setting(
        "",
        "authorization: none (loopback only; no grants), tokens (of a file), kube (the API server "
        "decides: get on a namespace's pods reads its budget, create on gpubudgets/grants grants); "
        "empty: tokens if --tokens, else none",
        one_of=("", *AUTH_MODES),
    )
    tokens: Path | None = setting(
        None,
        "file of lines `TOKEN NAMESPACE`: the token may read it; * may read all, and grant",
    )
    secret: str = setting(
        "", "NAMESPACE/NAME of the Secret with the replicas' certificate: --api uses TLS"
    )
    authority: str = setting(
        "", "with --secret: name of the ConfigMap in its namespace with the authorities to trust"
    )
    tls_dir: Path | None = setting(None, "directory for the certificate, instead of a Secret")
    names: tuple[str, ...] = setting(
        ("127.0.0.1", "localhost"), "names and addresses in the certificate"
    )
    reports: str = setting(
        "", "HOST:PORT without TLS for GPUSharing's sidecars: /budget/NS/report only", address=True
    )
    old_reports: str = setting(
        "answer",
        "the response to /budget/NS/report: `answer`, or `gone` for 410 Gone",
        one_of=("answer", "gone"),
    )

    @property
    def auth_mode(self) -> str:
        return self.auth or ("tokens" if self.tokens else "none")

    def check(self) -> None:
        """Raises RequestError for contradictions, or for settings that expose budgets."""
        parse_factors(self.model_factors)
        if (self.auth_mode == "tokens") != (self.tokens is not None):
            raise RequestError("--auth tokens and --tokens FILE must be set together")
        if self.auth_mode == "none" and not is_loopback(self.api):
            raise RequestError(
                f"--api {self.api} is reachable from other hosts, and --auth none shows every "
                "budget to every caller: listen on 127.0.0.1, or set --auth tokens or --auth kube"
            )
        if self.secret and (self.tls_dir or not all(self.secret.partition("/"))):
            raise RequestError("--secret must be NAMESPACE/NAME, without --tls-dir")
        if self.authority and not self.secret:
            raise RequestError("--authority needs --secret")
