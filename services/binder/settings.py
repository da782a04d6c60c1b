"""The binder's settings."""

from dataclasses import dataclass
from pathlib import Path

from shared.runtime.settings import ServiceSettings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class BinderSettings(ServiceSettings):
    """What the binder is told."""

    redis_url: str = setting("redis://127.0.0.1:6379", "the ledger: Redis or Valkey")
    kubeconfig: Path | None = setting(
        None, "kubeconfig; default: $KUBECONFIG, in-cluster, ~/.kube/config"
    )
    api_concurrency: int = setting(32, "Bindings under way at once")
    api_timeout_s: float = setting(
        5.0, "seconds after which a request to the API server is given up"
    )
    events_per_s: float = setting(50.0, "core/v1 Events written per second in the long run")
