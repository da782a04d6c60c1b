"""`leasehold doctor` on a running stack, on one with faults, and where there is nothing."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from services.cli.commands import Doctor
from services.cli.doctor.doctor import NODE_CHECKS, run_check, target_of
from services.cli.parser import build_parser
from services.node_agent.diagnosis.node_probes import NodeProbes
from shared.model.findings import Finding
from shared.runtime.settings import from_arguments
from tests.support.simcluster.kubelet import ScriptedPlugin, healthy
from tests.support.stack import Done, Stack, command, gpu_pod, running, succeeded, vgpu
from tests.support.waiting import until

SIMULATED = {"library", "library-loads", "processes"}
"""Checks that do not apply to simulated GPUs."""
NODE = "/api/v1/nodes/node-0"
UNHEALTHY = "volcano.sh/gpu-unhealthy-ids"
NUMBER = "volcano.sh/vgpu-number"


def findings(done: Done) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in json.loads(done.out)["findings"]}


def outcomes(done: Done, outcome: str) -> set[str]:
    return {name for name, finding in findings(done).items() if finding["outcome"] == outcome}


async def test_doctor_finds_no_fault_in_a_healthy_stack(up: Stack) -> None:
    await up.create(gpu_pod("one", vgpu(memory=1000)))
    await up.until("one", running)
    await up.audit()

    done = await until(
        lambda: up.leasehold("doctor", "--json"),  # a heartbeat may be late
        lambda done: not outcomes(done, "fail") | outcomes(done, "warn"),
    )
    shown, node, around = await asyncio.gather(
        until(lambda: up.leasehold("doctor"), succeeded),
        up.leasehold("doctor", "--json", "--only", "node"),
        up.leasehold("doctor", "--json", "--only", "cluster"),
    )

    assert done.code == 0
    assert len(outcomes(done, "ok")) >= 15
    assert "checkpoint: 1" in findings(done)["checkpoint"]["text"]
    assert "pods with devices: 1" in findings(done)["pod-resources"]["text"]
    assert all(finding["text"] for finding in findings(done).values())
    assert "0 fail" in shown.out
    assert findings(done)["extender"]["text"] == (
        "the components do not run as workloads of this cluster"
    )
    assert findings(node).keys() | findings(around).keys() == findings(done).keys()
    assert findings(node).keys() & findings(around).keys() == {"api-clock"}
    assert {"rights", "kubelet-socket"} <= findings(node).keys()
    assert {"nats", "redis", "components"} <= findings(around).keys()


async def faults(up: Stack) -> dict[str, str]:
    """Return what doctor warns of or fails at on the node."""
    by_check = findings(await up.leasehold("doctor", "--json", "--only", "node"))
    return {
        name: finding["text"]
        for name, finding in by_check.items()
        if finding["outcome"] in {"warn", "fail"}
    }


async def test_doctor_is_right_after_each_operation(up: Stack) -> None:
    await up.create(gpu_pod("train", vgpu(memory=3000)))
    ended = gpu_pod("job", vgpu(memory=1000))
    ended["spec"]["containers"][0]["command"] = ["sleep", "1"]
    ended["spec"]["restartPolicy"] = "Never"
    await up.create(ended)
    await up.until("train", running)
    await up.until("job", lambda pod: pod["status"].get("phase") == "Succeeded")
    completed = await until(lambda: faults(up), lambda texts: not texts)

    resized = []
    for memory in ("100Mi", "2Gi", "3000Mi"):
        assert (await up.leasehold("resize", "train", "--memory", memory)).code == 0
        resized.append(await until(lambda: faults(up), lambda texts: not texts))
    assert (await up.leasehold("resize", "train", "--memory", "100Mi")).code == 0
    before = up.pid("agent-node-0")
    up.kill("agent-node-0")
    await until(lambda: _pid(up), lambda pid: pid not in {None, before})
    upgraded = await until(lambda: faults(up), lambda texts: not texts)
    await up.kube.patch_merge(NODE, {"spec": {"unschedulable": True}})
    await up.clear()
    drained = await until(lambda: faults(up), lambda texts: texts.keys() == {"device-health"})
    await up.kube.patch_merge(NODE, {"spec": {"unschedulable": None}})
    await until(lambda: faults(up), lambda texts: not texts)

    assert [completed, *resized, upgraded] == [{}] * 5
    assert "kubectl cordon" in drained["device-health"]


def _pid(up: Stack) -> int | None:
    pids = [
        component["pid"]
        for component in up.state()["components"]
        if component["name"] == "agent-node-0"
    ]
    return pids[0] if pids else None


async def test_in_the_agents_pod_only_what_needs_the_nodes_files_is_skipped(
    up: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await up.create(gpu_pod("one", vgpu(memory=1000)))
    await up.until("one", running)
    agent = json.loads((up.root / "run" / "agent-node-0.json").read_text())
    monkeypatch.setenv("LEASEHOLD_PROBE", agent["http"])
    flags = build_parser().parse_args(["doctor", "--state", str(up.root)])
    ((settings, gpus),) = target_of(from_arguments(Doctor, flags)).nodes
    node = NodeProbes(
        settings, gpus, kubernetes=up.kube, totals=None, ledger_is_readable=False, host=None
    )

    async def judge() -> dict[str, Finding]:
        return {
            name: await run_check(check.run(node))
            for name, check in NODE_CHECKS.items()
            if name != "pod-resources"  # its client of gRPC needs a process of its own
        }

    judged = await until(
        judge,
        lambda by_name: all(finding.outcome in {"ok", "skipped"} for finding in by_name.values()),
    )

    skipped = {name for name, finding in judged.items() if finding.outcome == "skipped"}
    of_the_runtime = {"container-toolkit", "device-variable", "open-runtime"}
    assert skipped <= {*of_the_runtime, "cdi", "cdi-devices", *SIMULATED}
    assert judged["device-health"].text == "healthy devices: 2"
    assert judged["node-resources"].outcome == judged["registration"].outcome == "ok"


async def test_a_closed_gpu_is_shown_with_its_reason_until_it_is_open_again(up: Stack) -> None:
    async def shown() -> str:
        return (await up.leasehold("gpus")).out

    done = await up.leasehold("cordon", "node-0/1", "--reason", "fan is loud")
    text = await until(shown, lambda text: "fan is loud" in text)
    await up.create(gpu_pod("wide", vgpu(2, memory=1000)))
    await until(lambda: up.leasehold("ps"), lambda done: "1 node(s) had cordoned GPUs" in done.out)
    warned = await until(lambda: faults(up), lambda texts: texts.keys() == {"device-health"})
    opened = await up.leasehold("uncordon", "node-0/1")
    await up.until("wide", running)
    uuid = json.loads((await up.leasehold("gpus", "--json")).out)["nodes"][0]["devices"][0]["uuid"]
    await up.kube.patch_merge(NODE, {"metadata": {"annotations": {UNHEALTHY: "0"}}})
    await until(shown, lambda text: f"annotation {UNHEALTHY}" in text)
    still = await up.leasehold("uncordon", f"node-0/{uuid}")
    await up.kube.patch_merge(
        f"{NODE}?fieldManager=kubectl-cordon",
        {"metadata": {"annotations": {UNHEALTHY: None}}, "spec": {"unschedulable": True}},
    )
    await until(shown, lambda text: "kubectl cordon" in text and UNHEALTHY not in text)
    cordoned = await until(lambda: faults(up), lambda texts: texts.keys() == {"device-health"})
    await up.kube.patch_merge(NODE, {"spec": {"unschedulable": None}})
    await until(shown, lambda text: "kubectl cordon" not in text)
    nothing = await up.leasehold("cordon", "node-0/7")

    assert done.out == "GPU 1 of node-0 gets no new pods\n"
    by = "cordoned by kubernetes-admin: fan is loud"
    assert f"closed to new pods: {by}" in text
    assert f"GPU 1: {by}" in warned["device-health"]
    assert opened.out == "GPU 1 of node-0 gets new pods\n"
    assert (still.code, UNHEALTHY in still.out) == (1, True)
    assert "kubectl cordon" in cordoned["device-health"]
    assert (nothing.code, "node node-0 has no GPU 7" in nothing.err) == (1, True)


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
        sick = await up.leasehold("uncordon", "node-0/1")
        await server.config_set("maxmemory-policy", "allkeys-lru")
        evicting = await until(  # a binder finds the policy, and closes the ledger
            lambda: up.leasehold("doctor", "--json", "--node", "node-0"),
            lambda done: findings(done)["device-health"]["outcome"] == "skipped",
        )
    finally:
        await server.config_set("maxmemory-policy", "noeviction")
        await server.aclose()
        assert succeeded(await up.leasehold("sim", "heal", "node-0/1"))

    assert done.code == 1
    assert {"device-health", "other-plugins"} <= outcomes(done, "fail"), done.out
    judged = findings(done)
    assert "Xid 79" in judged["device-health"]["text"]
    assert sick.code == 1
    assert "off the bus: drain the node and restart it" in sick.out
    assert sick.out.endswith("; its agent opens it once it is healthy\n")
    assert "vgpu.sock" in judged["other-plugins"]["text"]
    assert "allkeys-lru" in findings(evicting)["redis"]["text"]
    assert "the check `redis`" in findings(evicting)["device-health"]["text"]
    assert f"limits.{NUMBER} of default/gpus" in judged["resource-quotas"]["text"]
    assert f"requests.{NUMBER}" in judged["resource-quotas"]["fix"]
    assert (
        f"has {NUMBER} of a device plugin, and DeviceClass whole"
        in (judged["device-classes"]["text"])
    )
    assert all(judged[name]["fix"] for name in outcomes(done, "fail"))


async def test_without_a_stack_every_check_of_doctor_reports_what_is_missing(
    tmp_path: Path,
) -> None:
    env = {"KUBECONFIG": str(tmp_path / "none"), "LEASEHOLD_NATS_URL": "nats://127.0.0.1:9"}
    place = ("--kubelet-dir", str(tmp_path), "--agent-dir", str(tmp_path / "agent"))
    done = await command("doctor", "--json", *place, "--library-source", "/no", env=env)

    assert (done.code, done.err) == (1, "")
    by_check = findings(done)
    assert "No such file" in by_check["kubelet-socket"]["text"]
    assert all(finding["fix"] for finding in by_check.values() if finding["outcome"] == "fail")
    assert "NATS" in by_check["nats"]["text"]
    assert "/no has none" in by_check["library"]["text"]
    assert by_check["redis"]["outcome"] == "skipped"
    assert by_check["rights"]["outcome"] == "skipped"
