"""The timekeeper's settings."""

from dataclasses import dataclass
from pathlib import Path

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
    tokens: Path | None = setting(
        None, "file of lines `TOKEN NAMESPACE`, * for all: who may read what, and * may grant"
    )
    old_reports: str = setting(
        "answer", "calls of /budget/NS/report are answered (`answer`) or 410 Gone (`gone`)"
    )
