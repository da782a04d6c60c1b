"""Watcher, placer, planner and binder in one process: `python -m services.scheduler`."""

import asyncio
import base64
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.cli import credentials
from tests.support.auth.world import auth_world
from tests.support.servers.nats import NatsServer
from tests.support.servers.service_process import ServiceProcess, service_process
from tests.support.servers.valkey import ValkeyServer
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.waiting import until

LIMIT_S = 60.0
"""Of a slow machine; a second is usual."""
NODE: dict[str, Any] = {
    "metadata": {
        "name": "n1",
        "annotations": {
            "volcano.sh/node-vgpu-register": "GPU-1,10,16384,NVIDIA-Tesla T4,true,hami-core:"
        },
    },
    "status": {
        "allocatable": {
            "cpu": "8",
            "memory": "32Gi",
            "pods": "110",
            "volcano.sh/vgpu-number": "10",
        }
    },
}
LIMITS = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "2000"}


def pod(name: str) -> dict[str, Any]:
    container = {"name": "c", "image": "x", "resources": {"limits": LIMITS, "requests": LIMITS}}
    return {
        "metadata": {"name": name},
        "spec": {"schedulerName": "leasehold", "containers": [container]},
    }


@contextmanager
def processes(
    tmp_path: Path, api: ApiUnderTest, *services: tuple[str, ...]
) -> Iterator[tuple[NatsServer, ValkeyServer, list[ServiceProcess]]]:
    """Run these processes with one user of NATS per service; the servers are not started."""
    written = credentials.write(tmp_path / "credentials", [], redis=False)
    nats = NatsServer(more=written.nats_configuration.read_text())
    redis = ValkeyServer()
    with ExitStack() as stack:
        stack.callback(redis.forget)
        stack.callback(nats.close)
        flags = (
            *("--nats-url", nats.url, "--nats-credentials", str(tmp_path / "credentials/nats")),
            *("--kubeconfig", str(api.kubeconfig), "--redis-url", redis.url),
        )
        started = [
            stack.enter_context(service_process("scheduler", *flags, *more)) for more in services
        ]
        yield nats, redis, started


async def node_of(api: ApiUnderTest, name: str) -> str | None:
    async with api.client() as client, client.get(f"/api/v1/namespaces/default/pods/{name}") as got:
        node: str | None = (await got.json())["spec"].get("nodeName")
        return node


async def test_pods_are_bound_by_one_process_which_names_what_each_service_waits_for(
    tmp_path: Path,
) -> None:
    async with api_server() as api, api.client() as client:
        await client.post("/api/v1/nodes", json=NODE)
        with processes(tmp_path, api, ()) as (nats, redis, (scheduler,)):
            async with asyncio.timeout(LIMIT_S):
                await scheduler.until_unready("watcher nats: ", "placer redis: ", "binder nats: ")
                assert await scheduler.page("/healthz") == (200, "ok\n")
                await nats.start()
                redis.start()
                await scheduler.until_ready()
                for name in ("p1", "p2"):
                    await client.post("/api/v1/namespaces/default/pods", json=pod(name))
                for name in ("p1", "p2"):
                    await until(partial(node_of, api, name), lambda node: node == "n1")
                _, metrics = await scheduler.page("/metrics")
                code = await scheduler.terminated()

    assert code == 0
    assert "Traceback" not in scheduler.log()
    assert "leasehold_planner_preemptions_total" in metrics
    for service in ("watcher", "placer", "binder"):
        assert f'leasehold_events_published_total{{service="{service}"' in metrics


async def test_a_placer_with_a_binder_beside_a_watcher_with_a_planner(tmp_path: Path) -> None:
    async with api_server() as api, api.client() as client:
        await client.post("/api/v1/nodes", json=NODE)
        apart = (("--services", "placer,binder"), ("--services", "watcher,planner"))
        with processes(tmp_path, api, *apart) as (nats, redis, running):
            await nats.start()
            redis.start()
            async with asyncio.timeout(LIMIT_S):
                for each in running:
                    await each.until_ready()
                await client.post("/api/v1/namespaces/default/pods", json=pod("p1"))
                await until(lambda: node_of(api, "p1"), lambda node: node == "n1")
                codes = [await each.terminated() for each in running]

    assert codes == [0, 0]


async def test_in_a_cluster_all_of_them_use_the_token_of_the_binder_once_the_auth_service_allows_it(
    tmp_path: Path,
) -> None:
    redis = ValkeyServer()
    async with api_server() as api, api.client() as client, auth_world(tmp_path) as world:
        (tmp_path / "token").write_text(world.cluster.issue_token("binder"))
        logins = tmp_path / "redis"
        logins.mkdir()
        for name in ("binder", "placer", "planner"):
            login = world.cluster.objects["secrets", f"redis-{name}"]["login"]
            (logins / name).write_bytes(base64.b64decode(login))
        world.mount("auth-redis", tmp_path / "etc-redis")
        flags = (
            *("--nats-url", world.url, "--nats-ca-file", str(world.trusting.ca)),
            *("--nats-token-file", str(tmp_path / "token"), "--kubeconfig", str(api.kubeconfig)),
            *("--redis-url", redis.url, "--redis-credentials", str(logins)),
        )
        await client.post("/api/v1/nodes", json=NODE)
        try:
            redis.start("--aclfile", str(tmp_path / "etc-redis" / "users.acl"))
            with service_process("scheduler", *flags) as scheduler:
                async with asyncio.timeout(LIMIT_S):
                    await scheduler.until_unready("watcher nats: ", "placer nats: ")
                    world.combine_scheduler()
                    await scheduler.until_ready()
                    await client.post("/api/v1/namespaces/default/pods", json=pod("p1"))
                    await until(lambda: node_of(api, "p1"), lambda node: node == "n1")
                    assert await scheduler.terminated() == 0
        finally:
            redis.forget()

    assert "lacks a permission" not in scheduler.log()


async def test_the_process_ends_with_the_reason_if_one_service_cannot_run(tmp_path: Path) -> None:
    async with api_server() as api:
        missing = ("--quotas", str(tmp_path / "missing.yaml"))
        with processes(tmp_path, api, missing) as (_, _, (scheduler,)):
            async with asyncio.timeout(LIMIT_S):
                await until(scheduler.process.poll, lambda code: code is not None)

    assert scheduler.process.returncode == 2, "as for any invalid setting"
    assert "missing.yaml" in scheduler.log()
    assert "Traceback" not in scheduler.log()


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ("placer,api", "of watcher, placer, planner or binder: 'api' is none"),
        ("", "none is named; choose from watcher,placer,planner,binder"),
    ],
)
def test_other_services_are_refused(named: str, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.scheduler", "--services", named],
        capture_output=True,
        check=False,
        text=True,
        timeout=LIMIT_S,
    )

    assert done.returncode == 2
    assert done.stderr.endswith(f"{text}\n")
    assert done.stderr.count("\n") == 1
