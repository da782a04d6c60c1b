"""The binder's settings."""

from dataclasses import dataclass

from shared.runtime.settings import ApiServerSettings, LedgerSettings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class BinderSettings(ApiServerSettings, LedgerSettings):
    api_concurrency: int = setting(32, "Bindings in flight at once", at_least=1)
    api_timeout_s: float = setting(
        5.0, "timeout of a request to the API server, in seconds", at_least=0.01
    )
    volume_bind_timeout_s: float = setting(
        600.0, "seconds until a pod whose claims are not bound gives its share back", at_least=1.0
    )
    events_per_s: float = setting(
        500.0,
        "Events written per second, on average; a tenth of that while Bindings wait",
        at_least=0.01,
    )
