"""Containers of a simulated kubelet: environment, starts and restarts, deletion, exec, a kill."""

import asyncio
import base64
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from shared.kubelet_api.deviceplugin import api_pb2
from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, at_path, name_of
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.storage.records import ObjectChange
from simcluster.kubelet.fleet import KubeletFleet
from simcluster.kubelet.settings import NodeSettings
from simcluster.ports import LogOptions
from tests.support.simcluster.kubelet import (
    FAST,
    SLOT,
    Node,
    PluginRefusalError,
    ScriptedPlugin,
    answering,
    container,
    new_store,
    one_fleet,
    one_kubelet,
    pod,
    slots,
)
from tests.support.waiting import until


class Terminal:
    """The client's end of an exec session, kept in memory."""

    def __init__(self) -> None:
        self.size = None
        self.out = b""
        self.err = b""

    async def read_stdin(self) -> bytes:
        return b""

    async def write_stdout(self, data: bytes) -> None:
        self.out += data

    async def write_stderr(self, data: bytes) -> None:
        self.err += data


async def test_the_pods_environment_takes_precedence_over_the_plugins() -> None:
    async with slots("a") as (node, plugin):
        plugin.on_allocate = answering({"LIMIT": "1000m", "VISIBLE": "GPU-1"})
        env = [{"name": "LIMIT", "value": "0"}, {"name": "COPY", "value": "$(VISIBLE)"}]
        await node.run("one", containers=[container("main", limits={SLOT: 1}, env=env)])

        seen = node.container("one").env
        assert (seen["LIMIT"], seen["VISIBLE"]) == ("0", "GPU-1")
        assert seen["COPY"] == "$(VISIBLE)", "the kubelet expands only what the pod sets"
        assert seen["HOSTNAME"] == "one"


async def test_sources_of_variables_are_read_when_a_container_starts() -> None:
    async with slots("a") as (node, plugin):
        plugin.on_allocate = answering({"VISIBLE": "GPU-1", "A": "plugin", "B": "plugin"})
        later = {"configMapRef": {"name": "later", "optional": True}}
        needed = {"prefix": "A", "secretRef": {"name": "needed"}}
        keys = {"secretKeyRef": {"name": "needed", "key": ""}}
        env = [
            {"name": "C", "value": "own $(VISIBLE)"},
            {"name": "KEY", "valueFrom": keys},
            {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "no", "optional": True}}},
        ]
        main = container("main", limits={SLOT: 1}, env=env) | {"envFrom": [later, needed]}
        node.create(pod("one", containers=[main]))
        await until(lambda: 'secret "needed" not found' in str(node.pod("one").get("status")))

        meta = {"namespace": "default"}
        data = {"VISIBLE": "all", "A": "first", "C": "source"}
        node.store.create("configmaps", {"metadata": {"name": "later", **meta}, "data": data})
        secret = {"": base64.b64encode(b"second").decode()}
        node.store.create("secrets", {"metadata": {"name": "needed", **meta}, "data": secret})
        await node.phase("one", "Running")

        seen = node.container("one").env
        assert seen["VISIBLE"] == "all", "the device plugin's value loses"
        assert (seen["A"], seen["B"], seen["C"]) == ("second", "plugin", "own all")
        assert seen["KEY"] == "second"
        assert "NONE" not in seen


async def test_a_start_that_the_plugin_refuses_is_retried() -> None:
    async with slots("a", pre_start=True) as (node, plugin):
        agreed = asyncio.Event()

        async def not_yet(_devices: list[str]) -> Mapping[str, str]:
            if not agreed.is_set():
                raise PluginRefusalError("not yet")
            return {}

        plugin.on_pre_start = not_yet
        node.create(pod("one", limits={SLOT: 1}))

        def refused() -> Json | None:
            statuses = node.pod("one")["status"].get("containerStatuses") or [{}]
            waiting: Json = statuses[0].get("state", {}).get("waiting", {})
            return waiting if waiting.get("reason") == "CreateContainerConfigError" else None

        reason = await until(refused)
        await until(lambda: len(plugin.device_ids("PreStartContainer")) > 1)
        agreed.set()
        await node.phase("one", "Running")

        assert "not yet" in reason["message"]
        assert len(plugin.device_ids("Allocate")) == 1


async def test_a_refused_sidecar_blocks_the_other_containers_and_a_refused_app_does_not() -> None:
    async with slots("a", "b", pre_start=True) as (node, plugin):
        refused = {"a"}

        async def refuse(devices: list[str]) -> Mapping[str, str]:
            if refused & set(devices):
                raise PluginRefusalError("not this one")
            return {}

        def running() -> list[str]:
            state = node.kubelet.state_of("default", "one")
            return [n for n, c in state.containers.items() if c.container_id] if state else []

        plugin.on_pre_start = refuse
        side = container("side", limits={SLOT: 1}, restartPolicy="Always")
        apps = [container("slot", limits={SLOT: 1}), container("plain")]
        node.create(pod("one", initContainers=[side], containers=apps))
        await until(lambda: len(plugin.device_ids("PreStartContainer")) > 1)
        assert running() == []

        refused.symmetric_difference_update({"a", "b"})
        await until(lambda: running() == ["side", "plain"])
        refused.clear()

        await node.phase("one", "Running")


async def test_pre_start_is_called_before_every_restart_and_allocate_only_once() -> None:
    async with slots("a", pre_start=True) as (node, plugin):
        crashing = {"sim.leasehold.dev/run-for": "10ms", "sim.leasehold.dev/exit-code": "3"}
        node.create(pod("one", limits={SLOT: 1}, annotations=crashing))
        await until(lambda: len(plugin.device_ids("PreStartContainer")) >= 3)

        status = node.pod("one")["status"]["containerStatuses"][0]
        assert status["restartCount"] >= 1
        assert status["lastState"]["terminated"]["exitCode"] == 3
        assert plugin.device_ids("Allocate") == [("a",)]


async def test_a_command_that_ends_is_handled_by_the_restart_policy() -> None:
    async with one_kubelet() as node:
        for name, command in {"fine": ["sleep", "0.05"], "broken": ["false"]}.items():
            echo = container("main", command=command)
            node.create(pod(name, containers=[echo], restartPolicy="Never"))

        await node.phase("fine", "Succeeded")
        failed = await node.phase("broken", "Failed")

        assert failed["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 1


async def test_a_running_pod_s_status_has_what_readers_expect_and_keeps_others_conditions() -> None:
    async with one_kubelet() as node:
        obj = pod("one")
        node.create(obj)
        scheduled = {"type": "PodScheduled", "status": "True"}
        node.store.patch(
            "pods", "default", "one", {"status": {"conditions": [scheduled]}}, subresource="status"
        )
        status = (await node.phase("one", "Running"))["status"]

        conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}
        assert conditions == {
            "PodScheduled": "True",
            "PodReadyToStartContainers": "True",
            "Initialized": "True",
            "Ready": "True",
            "ContainersReady": "True",
        }
        assert status["hostIP"] == "127.0.0.1"
        assert status["podIP"].startswith("10.244.")
        reasons = [event["reason"] for event in node.store.list("events", "default")]
        assert sorted(reasons) == ["Created", "Pulled", "Started"]


async def test_a_running_pod_costs_one_status_write() -> None:
    async with one_kubelet() as node:
        await node.run("one")

        assert node.store.writes.counts("pods", "default/one") == {"create": 1, "patch/status": 1}


async def test_a_deleted_pod_stops_in_a_final_phase_and_is_removed() -> None:
    async with one_kubelet() as node:
        await node.run("one", annotations={"sim.leasehold.dev/stop-after": "200ms"})
        phases: list[str] = []

        def note(kind: Resource, change: ObjectChange) -> None:
            if kind.plural == "pods":
                after = change.after
                phases.append("gone" if after is None else after.obj["status"]["phase"])

        node.store.listeners.append(note)

        node.store.delete("pods", "default", "one")

        assert node.exists("one")
        await until(lambda: not node.exists("one"))
        assert phases[0] == "Running"
        assert phases[-2:] == ["Succeeded", "gone"]
        assert await node.list_pods() == []


async def test_a_pod_that_outlasts_its_grace_is_killed() -> None:
    async with one_kubelet() as node:
        stubborn = {"sim.leasehold.dev/stop-after": "60s"}
        await node.run("one", annotations=stubborn, terminationGracePeriodSeconds=1)
        seen: list[int] = []

        def note(_kind: Resource, change: ObjectChange) -> None:
            statuses = at_path(change.latest.obj, "status.containerStatuses") or ()
            endings = [at_path(status, "state.terminated.exitCode") for status in statuses]
            seen.extend(code for code in endings if code is not None)

        node.store.listeners.append(note)

        node.store.delete("pods", "default", "one")
        await until(lambda: not node.exists("one"))

        assert set(seen) == {137}


async def test_a_pod_past_its_deadline_fails_and_its_devices_are_free() -> None:
    async with slots("a") as (node, _plugin):
        await node.run("one", limits={SLOT: 1}, activeDeadlineSeconds=600)

        node.store.patch(
            "pods", "default", "one",
            lambda obj: obj | {"spec": obj["spec"] | {"activeDeadlineSeconds": 1}},
        )  # fmt: skip

        failed = await node.phase("one", "Failed")
        assert failed["status"]["reason"] == "DeadlineExceeded"
        assert at_path(failed, "status.containerStatuses")[0]["restartCount"] == 0
        (kept,) = node.kubelet.files.pods.glob("*.json")
        await until(lambda: b'"phase":"terminated"' in kept.read_bytes())
        await node.run("two", limits={SLOT: 1})


async def test_a_force_deleted_pod_s_devices_are_free_at_once() -> None:
    async with slots("a") as (node, _plugin):
        await node.run("one", limits={SLOT: 1})

        node.store.delete("pods", "default", "one", grace_s=0)
        node.create(pod("one", limits={SLOT: 1}))

        await node.phase("one", "Running")
        assert (await node.allocated_devices())["one", "main"] == {"a"}


async def test_containers_survive_a_kill_of_the_whole_process() -> None:
    store = new_store()
    with tempfile.TemporaryDirectory(prefix="lh-") as root:
        async with one_kubelet(store=store, directory=Path(root)) as node:
            async with ScriptedPlugin(node.device_plugins) as plugin:

                async def limits(_devices: list[str]) -> Mapping[str, str]:
                    return {"LIMIT": "1000m"}

                plugin.on_allocate = limits
                await plugin.serve(node, "a")
                await node.run("one", limits={SLOT: 1})
            before = node.container("one")
            port = node.kubelet.port
        async with one_kubelet(store=store, directory=Path(root)) as node:
            await until(lambda: node.kubelet.state_of("default", "one"))

            assert node.container("one") == before
            assert node.container("one").env["LIMIT"] == "1000m"
            assert (await node.allocated_devices())["one", "main"] == {"a"}
            assert node.kubelet.port == port


async def test_the_https_endpoint_requires_its_token() -> None:
    async with one_kubelet() as node:
        assert (await node.request("/pods", token=""))[0] == 401
        assert (await node.request("/healthz", token=f"{node.kubelet.token}x"))[0] == 401
        assert await node.request("/healthz") == (200, b"ok")


async def test_the_node_reports_its_kubelets_address_and_renews_its_lease() -> None:
    async with one_kubelet() as node:
        status = node.node()["status"]
        lease = await until(lambda: node.store.find("leases", "kube-node-lease", "node-0"))

        assert status["daemonEndpoints"]["kubeletEndpoint"]["Port"] == node.kubelet.port
        assert status["nodeInfo"]["kubeletVersion"].startswith("v1.36.")
        assert {"type": "Hostname", "address": "node-0"} in status["addresses"]
        assert ("Ready", "True") in [(c["type"], c["status"]) for c in status["conditions"]]
        assert lease.obj["spec"]["holderIdentity"] == "node-0"
        described = json.loads(node.kubelet.files.description.read_text())
        assert described["port"] == node.kubelet.port


async def test_commands_in_a_container_see_its_environment_and_its_mounts(
    tmp_path: Path,
) -> None:
    (tmp_path / "limit").write_text("1000\n")
    async with one_fleet() as (fleet, node), ScriptedPlugin(node.device_plugins) as plugin:
        plugin.mounts = [
            api_pb2.Mount(container_path="/lease", host_path=str(tmp_path), read_only=True)
        ]
        await plugin.serve(node, "a")
        await node.run("one", limits={SLOT: 1})

        async def executed(*command: str, tty: bool = False) -> tuple[int, bytes, bytes]:
            streams = Terminal()
            code = await fleet.exec("default", "one", "main", command, tty=tty, streams=streams)
            return code, streams.out, streams.err

        assert b"HOSTNAME=one\r\n" in (await executed("env", tty=True))[1]
        assert await executed("printenv", "HOSTNAME") == (0, b"one\n", b"")
        assert await executed("sh", "-c", "echo $HOSTNAME") == (0, b"one\n", b"")
        assert await executed("cat", "/lease/limit") == (0, b"1000\n", b"")
        assert (await executed("cat", "/etc/passwd"))[0] == 1
        assert (await executed("false"))[0] == 1
        code, _, err = await executed("git")
        assert code == 127
        assert b"executable file not found in $PATH" in err
        assert await executed("sh", "-c", "echo $HOSTNAME | tr o O") == (0, b"One\n", b"")


async def test_the_log_is_the_output_of_a_printing_command() -> None:
    async with one_fleet(NodeSettings(), nodes=2) as (fleet, node):
        echo = container("main", command=["echo", "hello", "there"])
        node.create(pod("one", containers=[echo], restartPolicy="Never", node="node-1"))
        await node.phase("one", "Succeeded")

        chunks = [c async for c in fleet.log("default", "one", "main", LogOptions())]

        assert chunks == [b"hello there\n"]
        with pytest.raises(ApiError, match="container not found"):
            await fleet.exec("default", "one", "main", ["env"], tty=False, streams=Terminal())


async def test_a_smaller_fleet_leaves_no_node_without_a_kubelet() -> None:
    store = new_store()
    with tempfile.TemporaryDirectory(prefix="lh-") as root:
        async with KubeletFleet(store, Path(root), nodes=2, settings=FAST) as fleet:
            for number in range(2):
                node = Node(store, fleet.kubelets[f"node-{number}"])
                node.create(pod(f"on-{number}", node=f"node-{number}"))
                await node.phase(f"on-{number}", "Running")

        async with KubeletFleet(store, Path(root), nodes=1, settings=FAST):
            assert [name_of(node) for node in store.list("nodes")] == ["node-0"]
            assert [name_of(left) for left in store.list("pods")] == ["on-0"]
