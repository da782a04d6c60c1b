"""The watcher's settings."""

from dataclasses import dataclass
from pathlib import Path

from shared.runtime.request_settings import RequestSettings
from shared.runtime.settings import ApiServerSettings, ServiceSettings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherSettings(RequestSettings, ApiServerSettings, ServiceSettings):
    quotas: Path | None = setting(
        None, "YAML file of GPUQuota objects; the one named * is for all other namespaces"
    )
