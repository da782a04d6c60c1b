"""Runs a night: each fault begins, is read, is ended by its remedy, and leaves nothing."""

import asyncio
import contextlib
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from shared.model.errors import LeaseholdError
from tests.night.faults import LIMIT_S, Fault
from tests.night.places import Place, Reader
from tests.night.report import NightResult, lines_of
from tests.night.stack import RUNS, WAITS, Night, night_stack
from tests.support.stack import running

RECOVER_S = 120.0
READ_PAUSE_S = 0.5
CREATE_S = 25.0
RUNNING = "Running"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
ONE_LINE = (Place.DOCTOR, Place.BANNER, Place.ALERT)
"""Places in which a fault has one line."""


class NightRunner:
    """One night on one stack."""

    def __init__(self, night: Night, *, patience: float, prints_words: bool) -> None:
        self.night = night
        night.patience = patience
        self.limit_s = LIMIT_S * patience
        self.recover_s = RECOVER_S * patience
        self.prints_words = prints_words
        self.reader = Reader(night)

    async def run(self, fault: Fault) -> NightResult:
        """Run one fault; one that does not come to its end is a miss, and the night goes on."""
        result = NightResult(fault=fault)
        try:
            await self._run(fault, result)
        except AssertionError as error:
            result.misses.append(f"it was not run to its end: {error}")
        await self.night.up.clear()
        return result

    async def _run(self, fault: Fault, result: NightResult) -> None:
        night = self.night
        night.gpu = fault.gpu
        await night.create_pod(RUNS)
        await night.up.until(RUNS, running, limit_s=self.recover_s)
        before = await self._calm()
        await self.reader.begin()
        began_at = time.monotonic()
        await fault.begin(night)
        creating = asyncio.create_task(self._create(fault.pod_after_s))
        try:
            words = await self._read_all(fault, result, began_at)
            await creating
            new = {
                place: new_lines(words.get(place, ()), before.get(place, ()), fault.made_by)
                for place in Place
            }
            self._judge(fault, words, new, result)
        finally:
            creating.cancel()
            ended_at = time.monotonic()
            result.misses += await self._end(fault)
        await self._recover(new, result, ended_at)

    async def _end(self, fault: Fault) -> list[str]:
        """Apply the remedy, and return why it did not work."""
        try:
            await fault.end(self.night)
        except AssertionError as error:
            return [f"the remedy: {error}"]
        return []

    async def _create(self, after_s: float = 0.0) -> None:
        """Create the pod that has to wait, if the API server takes it."""
        await asyncio.sleep(after_s)
        with contextlib.suppress(TimeoutError, LeaseholdError):
            async with asyncio.timeout(CREATE_S):
                await self.night.create_pod(WAITS)

    async def _calm(self) -> dict[Place, tuple[str, ...]]:
        """Return what the places say before a fault, once they say nothing of the last one."""
        deadline = time.monotonic() + self.limit_s
        while True:
            before = {
                place: await self.reader.read(place) for place in (Place.DOCTOR, Place.BANNER)
            }
            if not any(before.values()) or time.monotonic() > deadline:
                return before
            await asyncio.sleep(READ_PAUSE_S)

    async def _read_all(
        self, fault: Fault, result: NightResult, began_at: float
    ) -> Mapping[Place, tuple[str, ...]]:
        words: dict[Place, tuple[str, ...]] = {}

        async def read(place: Place) -> None:
            wanted = fault.says.get(place)
            while time.monotonic() - began_at < self.limit_s:
                words[place] = await self.reader.read(place)
                passed_s = time.monotonic() - began_at
                if self.prints_words and wanted is None:
                    await asyncio.sleep(READ_PAUSE_S)
                    continue
                if wanted is None:
                    return
                if passed_s <= self.limit_s and wanted in "\n".join(words[place]):
                    result.seconds[place] = passed_s
                    return
                await asyncio.sleep(READ_PAUSE_S)

        await asyncio.gather(*map(read, Place))
        if self.prints_words:
            self._print(fault, words)
        return words

    def _print(self, fault: Fault, words: Mapping[Place, tuple[str, ...]]) -> None:
        for place in Place:
            print(f"--- {fault.name}: {place}")
            print("\n".join(f"    {line}" for line in words.get(place, ())))
        sys.stdout.flush()

    def _judge(
        self,
        fault: Fault,
        words: Mapping[Place, tuple[str, ...]],
        new: Mapping[Place, Sequence[str]],
        result: NightResult,
    ) -> None:
        for place, wanted in fault.says.items():
            if place not in result.seconds:
                shown = " | ".join(words.get(place, ()))
                result.misses.append(f"{place}: no {wanted!r} within {self.limit_s:g} s: {shown}")
        for place in ONE_LINE:
            if len(new[place]) > 1:
                lines = " | ".join(new[place])
                result.misses.append(f"{place}: {len(new[place])} lines: {lines}")

    async def _recover(
        self, new: Mapping[Place, Sequence[str]], result: NightResult, ended_at: float
    ) -> None:
        """Wait until the remedy has worked: a pod runs, and no words of the fault are left."""
        left: list[str] = []
        while time.monotonic() - ended_at < self.recover_s:
            phase = await self.night.phase(WAITS)
            if not phase:
                await self._create()
            left = [f"the pod is {phase}"] if phase != RUNNING else []
            for place in (Place.DOCTOR, Place.BANNER):
                earlier = {without_numbers(line) for line in new[place]}
                lines = await self.reader.read(place) if earlier else ()
                left += [line for line in lines if without_numbers(line) in earlier]
            if not left:
                result.recovered_s = time.monotonic() - ended_at
                return
            await asyncio.sleep(READ_PAUSE_S)
        result.misses.append(f"the remedy left, after {self.recover_s:g} s: {' | '.join(left)}")


def without_numbers(line: str) -> str:
    return NUMBER.sub("0", line)


def new_lines(lines: Sequence[str], before: Sequence[str], made_by: Sequence[str]) -> list[str]:
    """Return the lines that were not there before, with whatever numbers, nor say `made_by`."""
    earlier = {without_numbers(line) for line in before}
    return [
        line
        for line in lines
        if without_numbers(line) not in earlier and not any(words in line for words in made_by)
    ]


async def run_night(
    faults: Sequence[Fault], *, patience: float, prints_words: bool
) -> list[NightResult]:
    """Run faults on one stack, with a line of progress for each."""
    results: list[NightResult] = []
    night_of_faults = asyncio.current_task()
    assert night_of_faults is not None
    for end in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(end, night_of_faults.cancel)
    async with night_stack() as night:
        runner = NightRunner(night, patience=patience, prints_words=prints_words)
        for number, fault in enumerate(faults, start=1):
            print(f"{number}/{len(faults)} {fault.name}: {fault.text}", file=sys.stderr, flush=True)
            results.append(await runner.run(fault))
            print(lines_of(results[-1]), file=sys.stderr, flush=True)
    return results
