"""Containers of a real kubelet, containerd and runc have the driver's limit before they run.

Each container's first process shows the limits of the simulated driver. The node agent is killed
again and again meanwhile. The machine has cgroups of version 1, which are shown as those of version
2; what only version 2 has is not seen here.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from shared.model.clock import in_background
from shared.model.leases.lease import MIB
from shared.model.names import ISOLATION
from simcluster.node_agent.driver import STATE
from tests.real.container_node import (
    IMAGE,
    MEMORY_MIB,
    NUMBER,
    ContainerNode,
    leased_node,
    missing_here,
)
from tests.real.control_plane import Json, missing
from tests.support.waiting import until

PODS = 110
RAN = 100
"""So many run at least: a kubelet fails pods that it admits while their plugin is gone."""
ENDED = ("Succeeded", "Failed")
PER_MINUTE = 90.0
KILLS = 3
"""So many at least, also on a machine that does much else."""
RUN_S = 3
AGENT_S = 6.0
"""How long an agent lives once it is ready."""
PATH = "/api/v1/namespaces/default/pods"

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "complete"),
    pytest.mark.skipif(bool(missing_here()), reason=missing_here() or "complete"),
]


def limited_pod(name: str, memory_mib: int) -> Json:
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": [str(RUN_S)],
        "env": [
            {"name": "GPU_DRIVER_STATE", "value": f"/gpus/{STATE}"},
            {"name": "NEEDS_LIMIT", "value": "1"},
        ],
        "resources": {"limits": {NUMBER: "1", MEMORY_MIB: str(memory_mib)}},
    }
    spec = {
        "schedulerName": "leasehold",
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    metadata = {"name": name, "annotations": {ISOLATION: "driver"}}
    return {"metadata": metadata, "spec": spec}


@dataclass
class Trial:
    node: ContainerNode
    memory_mib: dict[str, int] = field(default_factory=dict)
    """Of each pod by UID."""
    kills: int = 0

    async def create(self, number: int) -> None:
        memory_mib = 300 + number
        manifest = limited_pod(f"pod-{number}", memory_mib)
        stored = await self.node.plane.create(PATH, manifest)
        self.memory_mib[stored["metadata"]["uid"]] = memory_mib

    async def kill_agents(self) -> None:
        while True:
            await until(self.node.agent_is_ready, limit_s=120)
            await asyncio.sleep(AGENT_S)
            self.node.end("agent")
            self.kills += 1
            try:
                await asyncio.sleep(0.3)
            finally:  # all pods may have been created meanwhile
                self.node.start_agent()

    async def left(self) -> dict[str, str]:
        """Return the pods that have not ended, with their phase."""
        pods = await self.node.plane.objects(PATH)
        phases = {pod["metadata"]["name"]: str(pod["status"].get("phase")) for pod in pods}
        return {name: phase for name, phase in phases.items() if phase not in ENDED}

    def judge(self, pod: Json) -> tuple[str, str]:
        """Return what the first process of a pod's last run saw: its own limit, and the pod's."""
        uid = pod["metadata"]["uid"]
        [status] = pod["status"]["containerStatuses"]
        container_id = status["containerID"].rpartition("/")[2]
        *_, words = self.node.first_words(uid) or [""]
        rows = [row.split() for row in words.splitlines() if row.startswith("limit ")]
        wanted = str(self.memory_mib[uid] * MIB)
        own = {row[2]: row[row.index("hard") + 1] for row in rows if uid in row[2]}
        by_name = {Path(path).name: hard for path, hard in own.items()}
        return (
            "limited" if by_name.get(container_id) == wanted else f"container: {own}",
            "limited" if by_name.get(f"pod{uid}") == wanted else f"pod: {own}",
        )


@pytest_asyncio.fixture(loop_scope="session")
async def trial() -> AsyncIterator[Trial]:
    async with leased_node() as node:
        yield Trial(node)


@pytest.mark.asyncio(loop_scope="session")
async def test_each_container_has_its_limit_before_its_first_process_whatever_kills_the_agent(
    trial: Trial,
) -> None:
    began = time.monotonic()
    async with in_background(trial.kill_agents()):
        for number in range(PODS):
            await asyncio.sleep(max(0.0, began + number * 60 / PER_MINUTE - time.monotonic()))
            await trial.create(number)
    await until(trial.left, lambda left: not left, limit_s=900)

    pods = await trial.node.plane.objects(PATH)
    ran = [pod for pod in pods if pod["status"]["phase"] == "Succeeded"]
    seen = {pod["metadata"]["name"]: trial.judge(pod) for pod in ran}
    starts = sum(pod["status"]["containerStatuses"][0]["restartCount"] + 1 for pod in ran)
    facts = {"ran": len(ran), "attempts to start them": starts, "kills": trial.kills}
    refused = [pod["status"].get("reason") for pod in pods if pod not in ran]
    print(json.dumps(facts | {"refused, as no agent was there": len(refused)}))
    assert {name: words for name, words in seen.items() if set(words) != {"limited"}} == {}
    # The second, once the node's status shows that no agent serves the resource.
    assert set(refused) <= {"UnexpectedAdmissionError", f"OutOf{NUMBER}"}
    assert len(ran) >= RAN
    assert trial.kills >= KILLS
