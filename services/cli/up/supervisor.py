"""Runs all components: starts each after its dependencies, restarts it, stops in reverse order."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from services.cli.state_dir import ComponentState, StateDir
from services.cli.up.component_process import (
    ComponentProcess,
    RestartPolicy,
    StartError,
    SupervisionTiming,
)
from services.cli.up.components import Component, stages_of


class Supervisor:
    """The component processes of one state directory."""

    def __init__(
        self,
        components: Sequence[Component],
        directory: StateDir,
        *,
        report: Callable[[str], None],
        save: Callable[[tuple[ComponentState, ...], bool], None],
        policy: RestartPolicy | None = None,
        timing: SupervisionTiming | None = None,
    ) -> None:
        self.save = save
        self.timing = timing or SupervisionTiming()
        self.all_ready = False
        self.stages = [
            [
                ComponentProcess(
                    component,
                    directory,
                    policy=policy or RestartPolicy(),
                    timing=self.timing,
                    report=report,
                    on_change=self._save_state,
                )
                for component in stage
            ]
            for stage in stages_of(components)
        ]
        self.processes = {
            process.component.name: process for stage in self.stages for process in stage
        }

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Start everything, call `on_ready`, and stop everything once `stop` is set.

        Raises StartError if a component does not get ready; nothing is left running then either.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                started = await _run_unless(stop, self._start(tasks))
                if started:
                    self.all_ready = True
                    self._save_state()
                    on_ready()
                    await stop.wait()
                await self._stop()
        except* StartError as errors:
            raise errors.exceptions[0] from None

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        ready_s = self.timing.ready_s
        try:
            async with asyncio.timeout(ready_s), asyncio.TaskGroup() as starting:
                for process in self.processes.values():
                    starting.create_task(self._start_one(process, tasks))
        except TimeoutError as error:
            late = [process for process in self.processes.values() if not process.ready.is_set()]
            raise StartError(
                f"not ready within {ready_s:g} s: "
                f"{', '.join(process.component.name for process in late)}; the end of "
                f"{late[0].log}:\n{late[0].log_tail()}"
            ) from error

    async def _start_one(self, process: ComponentProcess, tasks: asyncio.TaskGroup) -> None:
        for name in process.component.after:
            if name in self.processes:
                await self.processes[name].ready.wait()
        process.start(tasks)
        await process.ready.wait()

    async def _stop(self) -> None:
        for stage in reversed(self.stages):
            await asyncio.gather(*(process.stop() for process in stage))

    def _save_state(self) -> None:
        self.save(tuple(process.state() for process in self.processes.values()), self.all_ready)


async def _run_unless(stop: asyncio.Event, starting: Coroutine[None, None, None]) -> bool:
    """Run the start to its end and return True, or cancel it and return False on `stop`."""
    start = asyncio.create_task(starting)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            return True
        return False
    finally:
        for task in (start, stopped):
            task.cancel()
        await asyncio.gather(start, stopped, return_exceptions=True)
