"""Settings of services that share a process."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from services.binder.settings import BinderSettings
from services.placer.settings import PlacerSettings
from services.planner.settings import PlannerSettings
from services.watcher.settings import WatcherSettings
from shared.model.errors import RequestError
from shared.runtime.settings import LedgerSettings, ServiceSettings, setting

SERVICES = ("watcher", "placer", "planner", "binder")

S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(LedgerSettings):
    services: tuple[str, ...] = setting(
        SERVICES, "the services to run, each with its own flags, too", one_of=SERVICES
    )

    def checked(self) -> tuple[str, ...]:
        """Raises RequestError if there are none."""
        if not self.services:
            raise RequestError(f"--services: none is named; choose from {','.join(SERVICES)}")
        return tuple(dict.fromkeys(self.services))


KINDS = (SchedulerSettings, WatcherSettings, PlacerSettings, PlannerSettings, BinderSettings)


def settings_of(service: str, settings: S) -> S:
    """Of a directory of credentials, take the file with the service's name."""
    credentials: dict[str, Any] = {
        name: path / service
        for name in ("nats_credentials", "redis_credentials")
        if isinstance(path := getattr(settings, name, None), Path) and path.is_dir()
    }
    return dataclasses.replace(settings, **credentials)
