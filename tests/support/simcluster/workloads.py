"""A simulated cluster in this process with controllers and scheduler, for tests of workloads."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from simcluster.apimachinery.objects import Json
from simcluster.apiserver.cel import matches_device
from simcluster.apiserver.registry import open_store
from simcluster.controller_manager.manager import ControllerManager
from simcluster.controller_manager.resource_claims import ResourceClaimController
from simcluster.controller_manager.volumes.controller import VolumeController
from simcluster.kubelet.fleet import KubeletFleet
from simcluster.scheduler.scheduler import Scheduler
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.kubelet import FAST

LABELS = {"app": "web"}
BINDING_POLL_S = 0.1


def template(*, annotations: dict[str, str] | None = None, **spec: object) -> Json:
    """Return a pod template with one container that runs until it is stopped."""
    return {
        "metadata": {"labels": dict(LABELS), "annotations": annotations or {}},
        "spec": {"containers": [{"name": "main", "image": "app:1"}], **spec},
    }


def workload(kind: str, name: str = "web", /, **spec: object) -> Json:
    """Return a workload of `apps/v1`, or a Job, with the template above unless one is given."""
    is_job = kind == "Job"
    selector = {} if is_job else {"selector": {"matchLabels": dict(LABELS)}}
    return {
        "apiVersion": "batch/v1" if is_job else "apps/v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {**selector, "template": template(), **spec},
    }


@asynccontextmanager
async def workload_cluster(*, nodes: int = 3) -> AsyncIterator[ApiUnderTest]:
    """Start API server, kubelets, controllers and scheduler."""
    store = open_store()
    with tempfile.TemporaryDirectory(prefix="lh-w-") as directory:
        fleet = KubeletFleet(store, Path(directory), nodes=nodes, settings=FAST)
        async with api_server(store=store, runtime=lambda _store: fleet) as api, fleet:
            parts = (
                ControllerManager(store, api.server.create),
                ResourceClaimController(store),
                VolumeController(store),
                Scheduler(
                    store,
                    api.server.bind,
                    matches_device,
                    api.server.write_status,
                    binding_poll_s=BINDING_POLL_S,
                ),
            )
            tasks = [asyncio.create_task(part.run()) for part in parts]
            try:
                yield api
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
