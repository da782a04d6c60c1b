"""No pod with a lease fails while a real kubelet's API server is away, whatever restarts meanwhile.

The node's GPUs are full, pods wait for them, and each minute 60 more are created. The API server is
killed, or stopped so that its clients wait, ten times for 2 to 60 s; agent and kubelet are
restarted during that, the agent also after that. `pytest -s` prints each outage as it was, and how
many pods were created, ran and failed.
"""

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from shared.model.clock import in_background
from shared.model.errors import LeaseholdError
from tests.real.container_node import (
    IMAGE,
    MEMORY_MIB,
    NUMBER,
    ContainerNode,
    leased_node,
    missing_here,
)
from tests.real.control_plane import START_S, Json, missing
from tests.support.waiting import until

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "complete"),
    pytest.mark.skipif(bool(missing_here()), reason=missing_here() or "complete"),
]

API = "kube-apiserver"
PATH = "/api/v1/namespaces/default/pods"
PER_MINUTE = 60.0
POD_MIB = 7000
"""Two pods fill a GPU."""
RUN_S = 6
FULL = 10
"""So many pods wait before the first outage, and more later: the GPUs hold four at a time."""
RAN = 40
"""So many pods have their turn at least, also on a machine that does much else."""
GAP_S = 20.0
"""Between two outages, in which pods start and end."""
SETTLE_S = 12.0
"""After an outage, until the agent is restarted: pods are on their way to the kubelet then."""
CREATE_S = 5.0
ENDED = ("Succeeded", "Failed")
END_S = 240.0
AGENT_KILLED = "agent killed"
AGENT_STOPPED = "agent stopped"
KUBELET_STOPPED = "kubelet stopped"
STOPPED_LATER = "agent stopped afterwards"


@dataclass(frozen=True, slots=True)
class Outage:
    seconds: float
    """Until the API server is started again, which takes it some seconds."""
    restarts: tuple[str, ...] = ()
    hangs: bool = False
    """Whether it keeps its connections, and does not respond."""


OUTAGES = (
    Outage(2),
    Outage(6, (AGENT_KILLED,)),
    Outage(20, (KUBELET_STOPPED,)),
    Outage(4, (STOPPED_LATER,)),
    Outage(30, (AGENT_STOPPED,)),
    Outage(12, hangs=True),
    Outage(60, (AGENT_KILLED, KUBELET_STOPPED)),
    Outage(3, (AGENT_STOPPED, KUBELET_STOPPED)),
    Outage(45, (AGENT_KILLED, STOPPED_LATER)),
    Outage(8, (KUBELET_STOPPED,), hangs=True),
)


def waiting_pod(name: str) -> Json:
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": [str(RUN_S)],
        "resources": {"limits": {NUMBER: "1", MEMORY_MIB: str(POD_MIB)}},
    }
    spec = {
        "schedulerName": "leasehold",
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    return {"metadata": {"name": name}, "spec": spec}


@dataclass
class Trial:
    node: ContainerNode
    began: float = field(default_factory=time.monotonic)
    created: int = 0

    def show(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    async def create_pods(self) -> None:
        number = 0
        while True:
            began = time.monotonic()
            with contextlib.suppress(LeaseholdError, TimeoutError):
                async with asyncio.timeout(CREATE_S):
                    await self.node.plane.create(PATH, waiting_pod(f"pod-{number}"))
                self.created += 1
            number += 1
            await asyncio.sleep(max(0.0, 60 / PER_MINUTE - (time.monotonic() - began)))

    async def pods(self) -> list[Json]:
        return await self.node.plane.objects(PATH)

    async def count(self) -> Counter[str]:
        """Return how many pods wait, are on the node, and have ended."""
        return Counter(
            str(pod["status"].get("phase"))
            if pod["status"].get("phase") in ENDED
            else "on the node"
            if pod["spec"].get("nodeName")
            else "waiting"
            for pod in await self.pods()
        )

    async def go_through(self, outage: Outage) -> None:
        plane = self.node.plane
        before = await self.count()
        assert before["waiting"] > 0, f"the GPUs are not full: {before}"
        began = time.monotonic()
        if outage.hangs:
            plane.processes[API].send_signal(signal.SIGSTOP)
        else:
            plane.kill(API)
        await asyncio.sleep(outage.seconds / 2)
        async with asyncio.TaskGroup() as tasks:
            for what in outage.restarts:
                if what != STOPPED_LATER:
                    tasks.create_task(self.restart(what))
            tasks.create_task(self._end(outage, began))
        if STOPPED_LATER in outage.restarts:
            await asyncio.sleep(SETTLE_S)
            await self.restart(AGENT_STOPPED)
        await asyncio.sleep(GAP_S)
        self.show(f"  pods: {dict(await self.count())}")

    async def _end(self, outage: Outage, began: float) -> None:
        await asyncio.sleep(max(0.0, began + outage.seconds - time.monotonic()))
        plane = self.node.plane
        if outage.hangs:
            plane.processes[API].send_signal(signal.SIGCONT)
        else:
            plane.start_again(API)
        await until(plane.is_ready, limit_s=START_S)
        how = "hung" if outage.hangs else "was killed"
        restarted = ", ".join(outage.restarts) or "nothing restarted"
        away_s = time.monotonic() - began
        self.show(f"API server {how} for {outage.seconds:g} s, away {away_s:.1f} s; {restarted}")

    async def restart(self, what: str) -> None:
        if what == AGENT_KILLED:
            self.node.end("agent")
        elif what == AGENT_STOPPED:
            await self.node.stop("agent")
        else:
            await self.node.stop("kubelet")
            self.node.start_kubelet()
            return
        self.node.start_agent()


@pytest_asyncio.fixture(loop_scope="session")
async def trial() -> AsyncIterator[Trial]:
    async with leased_node(driver_limits=False) as node:
        yield Trial(node)


@pytest.mark.asyncio(loop_scope="session")
async def test_no_pod_with_a_lease_fails_by_an_outage_of_the_api_server(trial: Trial) -> None:
    async with in_background(trial.create_pods()):
        await until(trial.count, lambda pods: pods["waiting"] >= FULL, limit_s=START_S)
        for outage in OUTAGES:
            await trial.go_through(outage)
    for pod in await trial.pods():
        if not pod["spec"].get("nodeName"):
            await trial.node.plane.kube.delete(f"{PATH}/{pod['metadata']['name']}")
    await until(trial.count, lambda pods: set(pods) <= set(ENDED), limit_s=END_S)

    pods = await trial.pods()
    failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
    facts = {"outages": len(OUTAGES), "pods created": trial.created, "pods with a lease": len(pods)}
    print(json.dumps(facts | {"pods with a lease that failed": len(failed)}))
    assert [describe(pod) for pod in failed] == []
    assert len(pods) >= RAN


def describe(pod: Json) -> str:
    status = pod["status"]
    bound = [
        condition["lastTransitionTime"]
        for condition in status.get("conditions", ())
        if condition["type"] == "PodScheduled"
    ]
    return (
        f"{pod['metadata']['name']}, bound {bound}: {status.get('reason')}: {status.get('message')}"
    )
