"""Running all parts: each started as soon as it can, all kept alive, stopped in reverse."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from services.cli.state_dir import PartState, StateDir
from services.cli.up.parts import Part, stages_of
from services.cli.up.process_keeper import Keeper, StartError
from services.cli.up.restart_policy import RestartPolicy

READY_S = 60.0


class Supervisor:
    """All keepers of one state directory."""

    def __init__(
        self,
        parts: Sequence[Part],
        directory: StateDir,
        *,
        say: Callable[[str], None],
        save: Callable[[tuple[PartState, ...], bool], None],
        policy: RestartPolicy | None = None,
        ready_s: float = READY_S,
    ) -> None:
        self.save = save
        self.ready_s = ready_s
        self.all_ready = False
        self.stages = [
            [
                Keeper(
                    part,
                    directory,
                    policy=policy or RestartPolicy(),
                    say=say,
                    changed=self._changed,
                )
                for part in stage
            ]
            for stage in stages_of(parts)
        ]
        self.keepers = {keeper.part.name: keeper for stage in self.stages for keeper in stage}

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Start everything, call `on_ready`, keep it alive; stop it once `stop` is set.

        Raises StartError if a part does not get ready; nothing is left running then either.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                started = await _unless(stop, self._start(tasks))
                if started:
                    self.all_ready = True
                    self._changed()
                    on_ready()
                    await stop.wait()
                await self._stop()
        except* StartError as errors:
            raise errors.exceptions[0] from None

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        try:
            async with asyncio.timeout(self.ready_s), asyncio.TaskGroup() as starting:
                for keeper in self.keepers.values():
                    starting.create_task(self._start_one(keeper, tasks))
        except TimeoutError as error:
            late = [keeper for keeper in self.keepers.values() if not keeper.ready.is_set()]
            raise StartError(
                f"not ready within {self.ready_s:g} s: "
                f"{', '.join(keeper.part.name for keeper in late)}; the end of {late[0].log}:\n"
                f"{late[0].tail()}"
            ) from error

    async def _start_one(self, keeper: Keeper, tasks: asyncio.TaskGroup) -> None:
        for name in keeper.part.after:
            if name in self.keepers:
                await self.keepers[name].ready.wait()
        keeper.begin(tasks)
        await keeper.ready.wait()

    async def _stop(self) -> None:
        for stage in reversed(self.stages):
            await asyncio.gather(*(keeper.stop() for keeper in stage))

    def _changed(self) -> None:
        self.save(tuple(keeper.state() for keeper in self.keepers.values()), self.all_ready)


async def _unless(stop: asyncio.Event, starting: Coroutine[None, None, None]) -> bool:
    """Run the start to its end and return True, or give it up when `stop` is set."""
    start = asyncio.create_task(starting)
    told = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({start, told}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            return True
        return False
    finally:
        for task in (start, told):
            task.cancel()
        await asyncio.gather(start, told, return_exceptions=True)
