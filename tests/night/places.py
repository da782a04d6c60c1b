"""What an operator reads in each place at this moment."""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import StrEnum

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from shared.model.findings import Outcome
from tests.night.alerts import Labels, Scrape, alerts, firing
from tests.night.stack import RUNS, WAITS, Night

SCRAPE_S = 1.0
PAGE_S = 3.0
BAD = frozenset({Outcome.FAIL, Outcome.WARN})


class Place(StrEnum):
    WAITING = "explain, waiting"
    RUNNING = "explain, running"
    DOCTOR = "doctor"
    BANNER = "banner"
    ALERT = "alert"


class Reader:
    """Reads the places of one night; alerts compare with the scrape before the fault."""

    def __init__(self, night: Night) -> None:
        self.night = night
        self.before = Scrape(at=time.time(), samples={})
        self.expressions = {name: rule["expr"] for name, rule in alerts().items()}

    async def begin(self) -> None:
        self.before = await self._scrape()

    async def read(self, place: Place) -> tuple[str, ...]:
        """Return the lines of a place: each with a cause of its own, but for explanations."""
        reads: Mapping[Place, Callable[[], Awaitable[Iterable[str]]]] = {
            Place.WAITING: lambda: self._explanation(WAITS),
            Place.RUNNING: lambda: self._explanation(RUNS),
            Place.DOCTOR: self._findings,
            Place.BANNER: self._problems,
            Place.ALERT: self._alerts,
        }
        return tuple(await reads[place]())

    async def _explanation(self, pod: str) -> Iterable[str]:
        done = await self.night.leasehold("explain", pod, "-n", "default")
        return [line for line in (done.out + done.err).splitlines() if line.strip()]

    async def _findings(self) -> Iterable[str]:
        done = await self.night.leasehold("doctor", "--json")
        try:
            findings = json.loads(done.out)["findings"]
        except ValueError:
            return [f"no findings: {done.err}"]
        return finding_lines(finding for finding in findings if finding["outcome"] in BAD)

    async def _problems(self) -> Iterable[str]:
        limit = aiohttp.ClientTimeout(total=PAGE_S * self.night.patience)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.get(f"{self.night.page}/api/v1/state") as response,
            ):
                state = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            return [f"the page does not respond: {error!r}"]
        return [
            f"{problem['severity']}: {problem['text']} -> {problem['hint']}"
            for problem in state["problems"]
        ]

    async def _alerts(self) -> Iterable[str]:
        return firing(self.expressions, self.before, await self._scrape())

    async def _scrape(self) -> Scrape:
        limit = aiohttp.ClientTimeout(total=SCRAPE_S * self.night.patience)
        async with aiohttp.ClientSession(timeout=limit) as session:
            parts = self.night.addresses()
            texts = await asyncio.gather(
                *(_metrics(session, address) for address in parts.values())
            )
        samples: dict[tuple[str, Labels], float] = {}
        for part, text in zip(parts, texts, strict=True):
            job = _job(part)
            own = {"job": job, "instance": part}
            if not part.startswith("usage-"):
                samples["up", _labels(own)] = float(text is not None)
            for family in text_string_to_metric_families(text or ""):
                for sample in family.samples:
                    samples[sample.name, _labels({**own, **sample.labels})] = sample.value
        return Scrape(at=time.time(), samples=samples)


def finding_lines(findings: Iterable[Mapping[str, str]]) -> list[str]:
    """Return findings of the doctor, with all nodes of which it has the same one in a line.

    >>> lost = {"check": "agent", "text": "none", "fix": "start it"}
    >>> finding_lines([lost | {"subject": "node-0"}, lost | {"subject": "node-1"}])
    ['agent node-0, node-1: none -> start it']
    """
    nodes: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        key = finding["check"], f"{finding['text']} -> {finding['fix']}"
        nodes.setdefault(key, []).append(finding["subject"])
    return [
        f"{' '.join(filter(None, (check, ', '.join(names))))}: {text}"
        for (check, text), names in nodes.items()
    ]


def _labels(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


def _job(part: str) -> str:
    if part.startswith("agent-"):
        return "node-agent"
    return part.partition("-")[0]


async def _metrics(session: aiohttp.ClientSession, address: str) -> str | None:
    """Return the text of /metrics, or None if the process does not reply in time."""
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with session.get(f"http://{address}/metrics") as response:
            return await response.text()
    return None
