"""The decisions of `leasehold up`: restart policy, layouts, components."""

import fcntl
import os
from itertools import pairwise
from pathlib import Path
from threading import Timer

import pytest

from services.cli import credentials
from services.cli.local_commands import Up
from services.cli.state_dir import StateDir, locked, supervisor_pid, wipe
from services.cli.up.components import Component, components_of, stages_of
from services.cli.up.plan import Plan, layouts_of, plan_of, with_library
from services.cli.up.servers import is_free
from services.cli.up.supervisor import (
    RestartHistory,
    RestartPolicy,
    after_exit,
    is_given_up,
    pause_s,
)
from services.cli.up.up import forget_devices
from shared.model.errors import RequestError
from shared.model.names import NodeName
from tests.support.servers.nats import free_port
from tests.support.states import state

POLICY = RestartPolicy()


def exits(count: int, *, ran_s: float = 0.1, ever_ready: bool = True) -> RestartHistory:
    history = RestartHistory(ever_ready=ever_ready)
    for _ in range(count):
        history = after_exit(history, POLICY, ran_s=ran_s)
    return history


def test_the_pause_between_restarts_doubles_from_a_fifth_of_a_second_to_five_seconds() -> None:
    pauses = [pause_s(exits(count), POLICY) for count in range(1, 9)]

    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_the_pause_stays_finite_after_a_very_long_row_of_exits() -> None:
    assert pause_s(RestartHistory(exits_in_row=100_000), POLICY) == 5.0


def test_a_stable_component_restarts_quickly() -> None:
    history = after_exit(exits(6), POLICY, ran_s=11.0)

    assert pause_s(history, POLICY) == 0.2
    assert history.restarts == 7


def test_a_component_that_was_ready_once_is_never_given_up() -> None:
    assert not is_given_up(exits(50), POLICY)
    assert is_given_up(exits(4, ever_ready=False), POLICY)
    assert not is_given_up(exits(3, ever_ready=False), POLICY)


@pytest.mark.parametrize(
    ("gpus", "nodes", "before", "expected"),
    [
        ("", None, {}, ["4xT4", "4xT4"]),
        ("", 3, {}, ["4xT4"] * 3),
        ("local", None, {"node-0": "4xT4", "node-1": "4xT4"}, ["local"]),
        ("", None, {"node-0": "local"}, ["local"]),
        ("8xH200", None, {}, ["8xH200", "8xH200"]),
        ("8xH200, 2xA10+1xT4", None, {}, ["8xH200", "2xA10+1xT4"]),
        ("", None, {"node-0": "1xL4"}, ["1xL4"]),
        ("", 2, {"node-0": "1xL4"}, ["1xL4", "1xL4"]),
        ("2xA10", None, {"node-0": "1xL4"}, ["2xA10"]),
    ],
)
def test_layouts_come_from_the_flags_then_from_the_last_run_then_from_the_defaults(
    gpus: str, nodes: int | None, before: dict[str, str], expected: list[str]
) -> None:
    layouts = layouts_of(gpus, nodes, before=before, check=str)

    assert list(layouts.values()) == expected
    assert list(layouts) == [f"node-{number}" for number in range(len(expected))]


def test_a_number_of_layouts_that_is_not_the_number_of_nodes_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"2 layouts for 3 nodes"):
        layouts_of("4xT4,2xA10", 3, before={}, check=str)


@pytest.mark.parametrize(("gpus", "nodes"), [("local", 2), ("local,4xT4", None)])
def test_this_machine_is_one_node(gpus: str, nodes: int | None) -> None:
    with pytest.raises(RequestError, match="--gpus local is one node, this machine"):
        layouts_of(gpus, nodes, before={}, check=str)


def test_the_library_of_the_last_run_stays_while_the_nodes_do() -> None:
    nodes = {"node-0": "local"}
    library = Path("/libvgpu.so")
    before = state(nodes=nodes, library_source=str(library))

    assert with_library(Up(), nodes, before).library_source == library
    assert with_library(Up(library_source=Path("/new")), nodes, before).library_source != library
    assert with_library(Up(fresh=True), nodes, before).library_source is None
    assert with_library(Up(), {"node-0": "4xT4"}, before).library_source is None
    assert with_library(Up(), nodes, None).library_source is None


def test_zero_nodes_are_refused() -> None:
    with pytest.raises(RequestError, match="at least one node"):
        layouts_of("", 0, before={}, check=str)


def plan(settings: dict[str, object] | None = None, **changes: object) -> Plan:
    settings = settings or {}
    values: dict[str, object] = {
        "settings": Up(**{"placers": 3, **settings}),  # type: ignore[arg-type]
        "nodes": {"node-0": "4xT4", "node-1": "2xA10"},
        "ports": {"nats": 1, "redis": 2, "api": 3, "page": 4, "aggregated": 5, "extender": 7}
        | {"usage-node-0": 5, "usage-node-1": 6},
        "nats_program": "/bin/nats-server",
        "redis_program": "/bin/valkey-server",
        "nats_url": "nats://127.0.0.1:1",
        "redis_url": "redis://127.0.0.1:2/0",
        "python": ("python", "-m"),
    }
    return Plan(**{**values, **changes})  # type: ignore[arg-type]


def components(planned: Plan, root: Path = Path("/s")) -> dict[str, Component]:
    return {each.name: each for each in components_of(planned, StateDir(root))}


def test_the_plan_holds_every_service_once_each_placer_and_an_agent_per_node() -> None:
    found = components(plan())

    assert list(found) == [
        *("nats", "valkey", "simcluster", "watcher", "placer-0", "placer-1", "placer-2"),
        *("planner", "binder", "timekeeper", "webhook", "api", "extender"),
        *("agent-node-0", "agent-node-1"),
    ]
    stages = [{component.name for component in stage} for stage in stages_of([*found.values()])]
    assert stages[0] == {"nats", "valkey", "simcluster"}
    assert len(stages) == 2


def test_a_combined_scheduler_replaces_watcher_placers_planner_and_binder() -> None:
    found = components(plan({"combined": True}))

    assert "scheduler" in found
    assert not {"watcher", "planner", "binder", "placer-0"} & set(found)
    assert {"--kubeconfig", "--redis-url", "--nats-url"} <= set(found["scheduler"].argv)


def test_components_get_the_files_of_their_secrets_and_never_the_secrets(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    credentials.write(folder, [NodeName("node-0"), NodeName("node-1")], names=["127.0.0.1"])

    def logins(name: str, planned: Plan) -> dict[str, Path]:
        argv = components(planned, tmp_path)[name].argv
        files = {flag: Path(value) for flag, value in pairwise(argv) if "-credentials" in flag}
        assert all(path.exists() for path in files.values())
        assert ("--nats-ca-file", str(folder / "ca.crt")) in pairwise(
            argv
        ) or not planned.nats_program
        return files

    nats = "--nats-credentials"
    redis = "--redis-credentials"
    assert logins("agent-node-1", plan()) == {nats: folder / "nats" / "node-agent.node-1"}
    assert logins("placer-1", plan()) == {
        nats: folder / "nats" / "placer", redis: folder / "redis" / "placer"
    }  # fmt: skip
    combined = logins("scheduler", plan({"combined": True}))
    assert combined == {nats: folder / "nats", redis: folder / "redis"}
    assert nats not in logins("placer-1", plan(nats_program=""))


def test_components_that_start_after_each_other_are_an_error() -> None:
    circular = [Component(name=a, argv=(), after=(b,)) for a, b in ("ab", "ba")]

    with pytest.raises(ValueError, match="a, b start after each other"):
        stages_of(circular)


def test_a_server_that_runs_elsewhere_is_not_started_and_its_url_reaches_the_services() -> None:
    url = "nats://10.0.0.5:4222"

    found = components(plan(nats_program="", nats_url=url))

    others = {name for name, component in found.items() if url not in component.argv}
    assert others == {"valkey", "simcluster"}


def test_only_services_that_use_the_ledger_get_the_url_of_redis() -> None:
    found = components(plan())

    with_redis = {name for name, each in found.items() if "--redis-url" in each.argv}
    placers = {"placer-0", "placer-1", "placer-2"}
    assert with_redis == placers | {"planner", "binder", "timekeeper", "api", "extender"}


def test_up_is_ready_without_the_extender_alone_which_one_flag_leaves_out() -> None:
    with_it = components(plan())
    without = components(plan({"kube_scheduler": False}))

    assert [name for name, component in with_it.items() if not component.awaited] == ["extender"]
    assert list(without) == [name for name in with_it if name != "extender"]
    assert "--kube-scheduler" in with_it["webhook"].argv
    assert "--kube-scheduler" not in without["webhook"].argv
    assert "--scheduler-config" not in without["simcluster"].argv


def test_flags_reach_the_components_that_they_are_for() -> None:
    found = components(plan({"volcano_conf": Path("/c/volcano.conf")}))

    assert ("--volcano-conf", "/c/volcano.conf") in pairwise(found["watcher"].argv)
    agent = found["agent-node-1"].argv
    of_node = {("--node", "node-1"), ("--gpus", "2xA10"), ("--kubelet-dir", "/s/nodes/node-1")}
    assert of_node <= set(pairwise(agent))


def test_nodes_take_consecutive_ports_for_usage_metrics_from_the_flag_on() -> None:
    first = next(port for port in iter(free_port, 0) if is_free(port + 1))
    settings = Up(usage_port=first)

    planned = plan_of(settings, {"node-0": "1xT4", "node-1": "1xT4"}, None)

    assert planned.ports["usage-node-0"] == first
    assert planned.ports["usage-node-1"] == first + 1


def test_ports_beyond_the_last_and_those_requested_twice_are_refused() -> None:
    nodes = {"node-0": "1xT4", "node-1": "1xT4"}
    port = free_port()

    with pytest.raises(RequestError, match=r"--usage-port: port 65536 is .* above 65535"):
        plan_of(Up(usage_port=65535), nodes, None)
    with pytest.raises(RequestError, match=rf"--api-port: port {port} is .* requested twice"):
        plan_of(Up(api_port=port, page_port=port), nodes, None)


def test_a_smaller_cluster_keeps_nothing_of_the_other_nodes(tmp_path: Path) -> None:
    directory = StateDir.at(tmp_path)
    for node in ("node-0", "node-1"):
        for folder in (directory.agent(node), directory.node(node)):
            folder.mkdir(parents=True)
        directory.agent(node).joinpath("checkpoint.json").write_text('{"devices": [], "pods": []}')

    forget_devices(directory, {"node-0": "2xT4", "node-1": "2xT4"}, {"node-0": "4xT4"})

    assert directory.agent("node-0").joinpath("checkpoint.json").read_text() == '{"pods": []}'
    assert directory.node("node-0").exists()
    assert not directory.agent("node-1").exists()
    assert not directory.node("node-1").exists()


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"devices": ' * 20_000])
def test_a_damaged_checkpoint_is_left_to_its_agent(tmp_path: Path, damaged: str) -> None:
    directory = StateDir.at(tmp_path)
    directory.agent("node-0").mkdir(parents=True)
    checkpoint = directory.agent("node-0") / "checkpoint.json"
    checkpoint.write_text(damaged)

    forget_devices(directory, {"node-0": "2xT4"}, {"node-0": "4xT4"})

    assert checkpoint.read_text() == damaged


def test_a_directory_that_was_emptied_in_part_can_be_emptied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = StateDir.at(tmp_path)
    for name in ("kubeconfig", "first-pod.yaml", "state.json", *map(str, range(20))):
        tmp_path.joinpath(name).touch()
    removed: list[str] = []
    monkeypatch.setattr(Path, "unlink", lambda path: removed.append(path.name))

    wipe(directory)

    assert len(removed) == 23
    assert removed[-1] == "state.json"


def test_a_command_that_looks_at_the_lock_is_no_supervisor(tmp_path: Path) -> None:
    directory = StateDir.at(tmp_path)
    directory.lock.write_text("4711\n")
    with directory.lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as another `leasehold status`

        assert supervisor_pid(directory) is None

        Timer(0.05, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        with locked(directory):
            assert supervisor_pid(directory) == os.getpid()
