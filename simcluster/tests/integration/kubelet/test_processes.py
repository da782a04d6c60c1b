"""Commands of containers that are processes: ends, restarts, logs, termination."""

import asyncio
import contextlib
import ctypes
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.node_agent.kubelet.cgroups import parse_cgroup, pods_of_processes
from shared.kubelet_api.deviceplugin import api_pb2
from shared.model.names import PodUid
from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json
from simcluster.kubelet.containers.runtime_devices import OPEN_RUNTIME
from simcluster.kubelet.fleet import KubeletFleet
from simcluster.kubelet.programs.gpu_programs import SimulatedPrograms
from simcluster.kubelet.programs.process_table import ProcessTable
from simcluster.ports import LogOptions
from tests.support.gpu_driver import GpuDriver, gpu
from tests.support.simcluster.kubelet import (
    NODE,
    SLOT,
    Node,
    ScriptedPlugin,
    answering,
    container,
    new_store,
    one_fleet,
    one_kubelet,
    pod,
)
from tests.support.waiting import until

LINKED = ("status", "stat")


class Cluster:
    """One node whose containers have logs."""

    def __init__(self, fleet: KubeletFleet, node: Node) -> None:
        self.fleet = fleet
        self.node = node

    async def log(self, name: str, container: str = "main", **options: Any) -> str:
        log = self.fleet.log("default", name, container, LogOptions(**options))
        return b"".join([chunk async for chunk in log]).decode()

    def create(self, name: str, script: str, **spec: Any) -> Json:
        main = container("main", command=["sh", "-c", script])
        return self.node.create(pod(name, containers=[main], **spec))

    def pids(self, name: str) -> list[int]:
        """Return the processes of a pod, as the node's /proc shows them."""
        uid = self.node.pod(name)["metadata"]["uid"]
        found = []
        for entry in self.node.kubelet.files.proc.glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if parse_cgroup((entry / "cgroup").read_text())[0] == uid:
                    found.append(int(entry.name))
        return sorted(found)


@pytest.fixture
async def one() -> AsyncIterator[Cluster]:
    async with one_fleet() as (fleet, node):
        yield Cluster(fleet, node)


def state_of(obj: Json, kind: str = "terminated", part: str = "state") -> Json:
    state: Json = obj["status"]["containerStatuses"][0][part].get(kind) or {}
    return state


async def test_a_container_that_is_shown_to_run_has_its_process_in_the_table(
    one: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_slowly(table: ProcessTable, pid: int, pod_uid: str, container_id: str) -> None:
        time.sleep(0.5)  # as on a loaded machine
        add_tree(table, pid, pod_uid, container_id)

    add_tree = ProcessTable.add_tree
    monkeypatch.setattr(ProcessTable, "add_tree", add_slowly)
    one.create("runs", "sleep 1000 & wait")

    await one.node.phase("runs", "Running")

    assert one.pids("runs")


async def test_a_command_that_ends_sets_the_status_and_the_log(one: Cluster) -> None:
    one.create("fine", "echo a; echo b >&2; printf c", restartPolicy="Never")
    one.create("broken", "echo $(echo x); exit 3", restartPolicy="Never")

    fine = await one.node.phase("fine", "Succeeded")
    broken = await one.node.phase("broken", "Failed")

    assert (state_of(fine)["exitCode"], state_of(fine)["reason"]) == (0, "Completed")
    assert (state_of(broken)["exitCode"], state_of(broken)["reason"]) == (3, "Error")
    assert sorted((await one.log("fine")).splitlines()) == ["a", "b", "c"]
    assert await one.log("broken", tail_lines=1, limit_bytes=1) == "x"
    assert await one.log("fine", since_s=3600)
    with pytest.raises(ApiError, match="previous terminated container"):
        await one.log("fine", previous=True)


async def test_a_command_gets_what_the_pod_and_the_device_plugin_set(one: Cluster) -> None:
    async with ScriptedPlugin(one.node.device_plugins) as plugin:
        plugin.on_allocate = answering({"LIMIT": "1000m"})
        plugin.mounts = [api_pb2.Mount(container_path="/lease", host_path="/", read_only=True)]
        await plugin.serve(one.node, "a")
        main = container(
            "main",
            limits={SLOT: 1},
            command=["sh", "-c"],
            args=["echo $(OWN) $LIMIT $1; echo $$(id -u)", "-", "$(LIMIT)"],
            env=[{"name": "OWN", "value": "mine"}],
        )
        one.node.create(pod("one", containers=[main], restartPolicy="Never"))

        await one.node.phase("one", "Succeeded")

        assert await one.log("one") == f"mine 1000m 1000m\n{os.getuid()}\n"


@pytest.mark.parametrize(("policy", "restarts"), [("Always", True), ("OnFailure", False)])
async def test_the_restart_policy_applies_and_the_previous_log_stays(
    one: Cluster, policy: str, restarts: bool
) -> None:
    count = one.node.kubelet.files.root / "count"
    one.create("one", f"echo run >>{count}; wc -l <{count}; [ -e {count}.end ]; exit $?",
               restartPolicy=policy)  # fmt: skip

    backing_off = await until(
        lambda: one.node.pod("one"),
        lambda status: (
            status["status"].get("containerStatuses")
            and state_of(status, "waiting").get("reason") == "CrashLoopBackOff"
        ),
    )
    (count.parent / "count.end").touch()
    await until(lambda: one.node.pod("one"), succeeded)

    assert state_of(backing_off, part="lastState")["exitCode"] == 1
    log = int(await until(partial(one.log, "one")))
    previous = int(await one.log("one", previous=True))
    assert previous in {log, log - 1}, "the latest end is the previous one while it waits"
    assert (one.node.pod("one")["status"]["phase"] == "Succeeded") is not restarts


def succeeded(obj: Json) -> bool:
    status = obj["status"]["containerStatuses"][0]
    ends = (status["state"].get("terminated"), status["lastState"].get("terminated"))
    return any(end and end["exitCode"] == 0 for end in ends)


async def test_a_program_of_the_machine_runs_if_it_is_named() -> None:
    async with one_kubelet(programs=partial(SimulatedPrograms, more=["python3"])) as node:
        main = container("main", command=["python3", "-c", "exit(4)"])
        node.create(pod("one", containers=[main], restartPolicy="Never"))

        assert state_of(await node.phase("one", "Failed"))["exitCode"] == 4


async def test_logs_follow_until_the_container_ends(one: Cluster) -> None:
    gate = one.node.kubelet.files.root / "gate"
    one.create("one", f"echo first; until [ -e {gate} ]; do sleep 0.05; done; echo last",
               restartPolicy="Never")  # fmt: skip
    await one.node.phase("one", "Running")
    chunks = one.fleet.log("default", "one", "main", LogOptions(follow=True))

    assert await anext(chunks) == b"first\n"
    gate.touch()

    assert [chunk async for chunk in chunks] == [b"last\n"]


async def test_deletion_terminates_within_the_grace_and_then_kills(one: Cluster) -> None:
    one.create("polite", "trap 'exit 0' TERM; setsid sleep 1000 & wait")
    one.create("stubborn", "trap '' TERM; while :; do sleep 0.1; done",
               terminationGracePeriodSeconds=1)  # fmt: skip
    seen: dict[str, int] = {}

    def note(_kind: object, change: Any) -> None:
        for name in ("polite", "stubborn"):
            if change.latest.obj["metadata"]["name"] == name:
                statuses = change.latest.obj["status"].get("containerStatuses")
                ended = state_of(change.latest.obj) if statuses else {}
                seen.update({name: ended["exitCode"]} if ended else {})

    one.node.store.listeners.append(note)
    pids: list[int] = []
    for name in ("polite", "stubborn"):
        pids += await until(partial(one.pids, name), lambda pids: len(pids) > 1)

    for name in ("polite", "stubborn"):
        one.node.store.delete("pods", "default", name)
        await until(partial(gone, one.node, name))

    assert seen == {"polite": 0, "stubborn": 137}
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.fixture
def no_reaper() -> Iterator[None]:
    """Orphans become children of this process, which leaves them as zombies."""
    libc = ctypes.CDLL(None)
    subreaper = 36
    before = set(children())
    assert libc.prctl(subreaper, 1, 0, 0, 0) == 0
    yield
    libc.prctl(subreaper, 0, 0, 0, 0)
    for pid in set(children()) - before:
        os.waitpid(pid, 0)


def children() -> list[int]:
    return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]


@pytest.mark.parametrize("grace_s", [0, 30])
async def test_processes_that_are_never_reaped_do_not_outlive_their_pod(
    one: Cluster, no_reaper: None, grace_s: int
) -> None:
    one.create("one", "trap 'exit 0' TERM; sleep 1000 & (sleep 1000 & exit 0); wait")
    pids = await until(lambda: one.pids("one"), lambda running: len(running) > 1)

    one.node.store.delete("pods", "default", "one", grace_s=grace_s)

    await until(partial(gone, one.node, "one"))
    await until(lambda: not list(one.node.kubelet.files.proc.iterdir()))
    assert any(Path(f"/proc/{pid}").exists() for pid in pids), "a zombie is left"


async def test_processes_on_a_stuck_gpu_outlive_their_pod_until_it_is_healed(
    one: Cluster, driver: GpuDriver
) -> None:
    files = one.node.kubelet.files
    files.gpu_state.parent.mkdir()
    driver.state = files.gpu_state
    driver.create(gpu(0), gpu(1))
    one.node.store.patch("nodes", None, NODE, {"metadata": {"labels": {OPEN_RUNTIME: "true"}}})
    files.faults.write_text(json.dumps({"1": "stuck"}))
    pods = {}
    for number in range(2):
        env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": gpu(number).uuid}]
        main = container("main", command=["sh", "-c", "sleep 1000 & wait"], env=env)
        pods[f"pod-{number}"] = one.node.create(pod(f"pod-{number}", containers=[main]))
    for name in pods:
        await until(partial(one.pids, name), lambda running: len(running) > 1)
        one.node.store.delete("pods", "default", name, grace_s=0)

    def is_asleep(pid: int) -> bool:
        with contextlib.suppress(FileNotFoundError):  # it has ended
            status, stat = ((files.proc / str(pid) / name).read_text() for name in LINKED)
            return "\nState:\tD (disk sleep)\n" in status and ") D " in stat
        return False

    def asleep() -> dict[int, PodUid]:
        processes = pods_of_processes(files.proc)
        return {pid: uid for pid, uid in processes.items() if is_asleep(pid)}

    stuck = {pods["pod-1"]["metadata"]["uid"]}
    # Processes of the other pod may be in state D, too, for the moment in which they end.
    kept = await until(
        asleep,
        lambda sleeping: (
            {*sleeping.values()} == stuck and sleeping == pods_of_processes(files.proc)
        ),
    )
    assert len(kept) > 1
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in kept))
    assert pods_of_processes(files.proc) == kept
    files.faults.write_text("{}")
    await until(lambda: not list(files.proc.iterdir()))


def gone(node: Node, name: str) -> bool:
    return not node.exists(name)


async def test_init_containers_run_first_and_sidecars_beside(one: Cluster) -> None:
    file = one.node.kubelet.files.root / "file"
    init = [
        container("first", command=["sh", "-c", f"echo one >{file}; cat {file} | tr a-z A-Z"]),
        container("side", command=["sh", "-c", "echo up; sleep 1000 & wait"],
                  restartPolicy="Always"),
    ]  # fmt: skip
    apps = [
        container("main", command=["sh", "-c", f"echo two >>{file}; cat {file} | wc -l"]),
        container("plain", image="train:1"),
    ]
    one.node.create(
        pod("one", initContainers=init, containers=apps, restartPolicy="Never",
            terminationGracePeriodSeconds=2)
    )  # fmt: skip

    def ended() -> bool:
        statuses = one.node.pod("one")["status"].get("containerStatuses") or [{}]
        return bool(statuses[0].get("state", {}).get("terminated"))

    await until(ended)

    assert (await one.log("one", "first")).strip() == "ONE"
    assert (await one.log("one", "side")).strip() == "up"
    assert (await one.log("one", "main")).strip() == "2"
    assert "image train:1 is not run" in await one.log("one", "plain")


async def test_processes_survive_a_restart_of_the_kubelet_but_no_reboot(one: Cluster) -> None:
    one.create("one", "echo up; sleep 1000 & wait")
    await one.node.phase("one", "Running")
    (pid, *_) = await until(lambda: one.pids("one"))

    await one.node.kubelet.restart()
    await until(lambda: one.node.kubelet.state_of("default", "one"))
    assert pid in one.pids("one")
    assert one.node.container("one").restarts == 0
    await one.node.kubelet.reboot()

    again = await until(lambda: one.pids("one"), lambda running: running and pid not in running)
    assert not Path(f"/proc/{pid}").exists()
    assert again


async def test_what_a_killed_cluster_leaves_is_ended_at_the_next_start() -> None:
    store = new_store()
    with tempfile.TemporaryDirectory(prefix="lh-") as root:
        async with one_kubelet(store=store, directory=Path(root)) as node:
            main = container("main", command=["sh", "-c", "sleep 1000 & wait"])
            await node.run("one", containers=[main], restartPolicy="Never")
            marker = {"SIMULATED_CONTAINER": f"{node.kubelet.files.root}/containerd://x"}
            left = await asyncio.create_subprocess_exec("sleep", "1000", env=os.environ | marker)
        async with one_kubelet(store=store, directory=Path(root)) as node:
            failed = await node.phase("one", "Failed")

            assert state_of(failed)["exitCode"] == 137
            assert await left.wait() == -9
