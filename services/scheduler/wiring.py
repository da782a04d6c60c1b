"""Runs services in one process."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from services.binder.settings import BinderSettings
from services.binder.wiring import serve_binder
from services.claims.wiring import claims_beside
from services.placer.settings import PlacerSettings
from services.placer.wiring import serve_placer
from services.planner.settings import PlannerSettings
from services.planner.wiring import serve_planner
from services.scheduler.settings import settings_of
from services.watcher.settings import WatcherSettings
from services.watcher.wiring import serve_watcher
from shared.runtime.settings import ServiceSettings
from shared.runtime.shared_process import SharedProcess, open_process


async def serve_scheduler(
    services: Sequence[str],
    common: ServiceSettings,
    *,
    watcher: WatcherSettings,
    placer: PlacerSettings,
    planner: PlannerSettings,
    binder: BinderSettings,
) -> None:
    def served(service: str, process: SharedProcess) -> Coroutine[Any, Any, None]:
        match service:
            case "watcher":
                return serve_watcher(settings_of(service, watcher), process)
            case "placer":
                return serve_placer(settings_of(service, placer), process)
            case "planner":
                return serve_planner(settings_of(service, planner), process)
            case _:
                return serve_binder(settings_of(service, binder), process, beside=claims_beside)

    async with open_process(services, common) as process, asyncio.TaskGroup() as tasks:
        for service in services:
            tasks.create_task(served(service, process))
