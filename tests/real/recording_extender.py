"""An extender of kube-scheduler that notes the nodes left for each pod, and refuses them all.

So kube-scheduler's answer is read exactly, and nothing that it would do with the pod changes the
answers for others.
"""

import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from shared.runtime import health
from shared.runtime.bodies import BODY
from tests.real.control_plane import ControlPlane, Json

NOTED = "noted"
HEAD = re.compile(r"0/\d+ nodes are available: ")
REASON = re.compile(r"(\d+) (.*?)(?=, \d+ |$)")


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a pod fits, and why it does not fit elsewhere."""

    fits: frozenset[str] = frozenset()
    reasons: Mapping[str, int] | None = None
    """Of the other nodes, each with the number of these."""
    waits: str = ""
    """Why no node can be chosen yet."""

    def __str__(self) -> str:
        reasons = "; ".join(f"{n} {text}" for text, n in sorted((self.reasons or {}).items()))
        return f"{' '.join(sorted(self.fits)) or 'none'} ({self.waits or reasons})"


@dataclass(slots=True)
class Recorder:
    address: str = ""
    feasible: dict[str, frozenset[str]] = field(default_factory=dict)
    """Nodes that kube-scheduler's own filters have left, by the pod's UID."""

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            "urlPrefix": f"http://{self.address}",
            "filterVerb": "filter",
            "nodeCacheCapable": True,
            "enableHTTPS": False,
            "httpTimeout": "30s",
        }

    async def filter(self, request: web.Request) -> web.Response:
        question = json.loads(request[BODY])
        names = question["NodeNames"]
        self.feasible[question["Pod"]["metadata"]["uid"]] = frozenset(names)
        return web.json_response({"NodeNames": [], "FailedNodes": dict.fromkeys(names, NOTED)})


@contextlib.asynccontextmanager
async def recorder() -> AsyncIterator[Recorder]:
    recording = Recorder()
    app = web.Application()
    app.router.add_post("/filter", recording.filter)
    async with health.served(app, "127.0.0.1:0") as address:
        recording.address = address
        yield recording


async def scheduler_answer(plane: ControlPlane, notes: Recorder, path: str) -> Answer | None:
    """Return kube-scheduler's answer for the pod at a path, or None before it."""
    pod: Json = json.loads(await plane.kube.read(path))
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] != "PodScheduled" or condition["reason"] == "SchedulingGated":
            continue
        text = HEAD.sub("", condition["message"])
        text = text.partition(". ")[0].removesuffix(".")  # not what preemption finds
        reasons = {reason: int(number) for number, reason in REASON.findall(text)}
        noted = reasons.pop(NOTED, 0)
        fits = notes.feasible[pod["metadata"]["uid"]] if noted else frozenset()
        assert len(fits) == noted
        return Answer(fits, reasons) if noted or reasons else Answer(waits=text)
    return None
