"""`leasehold doctor` on a running stack, on one with faults, and where there is nothing."""

import asyncio
import json
from pathlib import Path
from typing import Any

import redis.asyncio

from tests.support.simcluster.kubelet import ScriptedPlugin, healthy
from tests.support.stack import LEASEHOLD, Done, Stack, gpu_pod, run, running, succeeded, vgpu

NUMBER = "volcano.sh/vgpu-number"


def findings(done: Done) -> dict[str, dict[str, Any]]:
    return {one["check"]: one for one in json.loads(done.out)["findings"]}


def outcomes(done: Done, outcome: str) -> set[str]:
    return {name for name, one in findings(done).items() if one["outcome"] == outcome}


async def test_doctor_finds_no_fault_in_a_healthy_stack(up: Stack) -> None:
    await up.create(gpu_pod("one", vgpu(memory=1000)))
    await up.until("one", running)
    await up.audit()

    done, shown, node, around = await asyncio.gather(
        up.leasehold("doctor", "--json"),
        up.leasehold("doctor"),
        up.leasehold("doctor", "--json", "--only", "node"),
        up.leasehold("doctor", "--json", "--only", "cluster"),
    )

    assert outcomes(done, "fail") | outcomes(done, "warn") == set(), done.out
    assert (done.code, shown.code) == (0, 0)
    assert len(outcomes(done, "ok")) >= 15
    assert "1 containers" in findings(done)["checkpoint"]["text"]
    assert "1 pods" in findings(done)["pod-resources"]["text"]
    assert all(one["text"] for one in findings(done).values())
    assert "0 fail" in shown.out
    assert findings(node).keys() | findings(around).keys() == findings(done).keys()
    assert findings(node).keys() & findings(around).keys() == {"api-clock"}
    assert {"rights", "kubelet-socket"} <= findings(node).keys()
    assert {"nats", "redis", "components"} <= findings(around).keys()


async def test_doctor_names_each_fault_and_its_remedy(up: Stack) -> None:
    assert succeeded(await up.leasehold("sim", "break", "node-0/1", "--xid", "79"))
    server = redis.asyncio.Redis.from_url(up.state()["redis_url"], **up.login())
    await up.kube.delete(
        "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/leasehold"
    )
    quota = {"metadata": {"name": "gpus"}, "spec": {"hard": {f"limits.{NUMBER}": "4"}}}
    await up.kube.create("/api/v1/namespaces/default/resourcequotas", quota)
    device_class = {
        "metadata": {"name": "whole"},
        "spec": {"selectors": [], "extendedResourceName": NUMBER},
    }
    await up.kube.create("/apis/resource.k8s.io/v1/deviceclasses", device_class)
    plugins = up.root / "nodes" / "node-0" / "device-plugins"
    done = Done(0, "{}", "")
    try:
        async with ScriptedPlugin(plugins, NUMBER, endpoint="vgpu.sock") as other:
            other.report(healthy("theirs-0", "theirs-1"))
            await other.register()
            for _ in range(10):
                done = await up.leasehold("doctor", "--json", "--node", "node-0")
                wrong = outcomes(done, "fail")
                if {"device-health", "other-plugins"} <= wrong:
                    break
        await server.config_set("maxmemory-policy", "allkeys-lru")
        evicting = findings(await up.leasehold("doctor", "--json", "--node", "node-0"))
    finally:
        await server.config_set("maxmemory-policy", "noeviction")
        await server.aclose()
        assert succeeded(await up.leasehold("sim", "heal", "node-0/1"))

    assert done.code == 1
    assert {"device-health", "other-plugins"} <= outcomes(done, "fail"), done.out
    found = findings(done)
    assert "Xid 79" in found["device-health"]["text"]
    assert "vgpu.sock" in found["other-plugins"]["text"]
    assert "allkeys-lru" in evicting["redis"]["text"]
    assert "the check `redis`" in evicting["device-health"]["text"]
    assert f"limits.{NUMBER} of default/gpus" in found["resource-quotas"]["text"]
    assert f"requests.{NUMBER}" in found["resource-quotas"]["fix"]
    assert (
        f"has {NUMBER} of a device plugin, and DeviceClass whole"
        in (found["device-classes"]["text"])
    )
    assert all(found[name]["fix"] for name in outcomes(done, "fail"))


async def test_without_a_stack_every_check_of_doctor_reports_what_is_missing(
    tmp_path: Path,
) -> None:
    env = {"KUBECONFIG": str(tmp_path / "none"), "LEASEHOLD_NATS_URL": "nats://127.0.0.1:9"}
    place = ("--kubelet-dir", str(tmp_path), "--agent-dir", str(tmp_path / "agent"))
    done = await run(*LEASEHOLD, "doctor", "--json", *place, "--library-source", "/no", env=env)

    assert (done.code, done.err) == (1, "")
    found = findings(done)
    assert "No such file" in found["kubelet-socket"]["text"]
    assert all(one["fix"] for one in found.values() if one["outcome"] == "fail")
    assert "NATS" in found["nats"]["text"]
    assert "/no has none" in found["library"]["text"]
    assert found["redis"]["outcome"] == "skipped"
    assert found["rights"]["outcome"] == "skipped"
