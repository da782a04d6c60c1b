"""Replays of traces: who waits how long, and what is idle meanwhile."""

from dataclasses import replace
from pathlib import Path

import pytest

from shared.model.errors import RequestError
from shared.model.requests.request import NodeOrder
from shared.placing.starts import SOON_S
from tests.benchmarks.replay import Means, Terms, main, replay
from tests.benchmarks.trace import TracePod, read_nodes, read_pods, with_density, with_gangs

NODES = """\
sn,cpu_milli,memory_mib,gpu,model
n1,8000,65536,1,T4
"""
PODS = """\
cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time,scheduled_time
1000,1024,1,600,,0,100,
1000,1024,1,600,T4,10,110,60
1000,1024,1,300,,20,30,
1000,1024,2,1000,,40,90,
"""


INSTANCES = """\
instance_sn,role,app_name,cpu_request,gpu_request,memory_request,max_instance_per_node,\
creation_time,scheduled_time,deletion_time
i0,HN,a,1,1,8.0,2,,,
i1,CN,a,0.5,0,0.5,-1,,,30.0
i2,HN,a,1,1,8.0,2,10.0,20.0,50.0
i3,HN,a,1,1,8.0,2,15.0,15.0,25.0
i4,HN,b,1,1,8.0,2,20.0,20.0,30.0
"""


def pods(text: str = PODS) -> list[TracePod]:
    return read_pods(text.splitlines(), "pods.csv", timed=True)


def test_a_pod_waits_until_another_ends_and_smaller_ones_pass_it() -> None:
    nodes = read_nodes(NODES.splitlines(), "nodes.csv")

    found = replay(pods(), nodes, NodeOrder.BINPACK)

    assert found.waits_s == [0, 0, 90]
    assert (found.never, found.impossible) == (0, 1)
    assert [moment.at_s for moment in found.moments if moment.allocated == 0] == [0, 100, 150]


def test_means_are_weighted_by_time() -> None:
    nodes = read_nodes(NODES.splitlines(), "nodes.csv")

    found = replay(pods(), nodes, NodeOrder.BINPACK)

    assert found.means(0, 20) == pytest.approx(Means(0.4, 0.2, 0.5))
    assert found.means(20, 30) == pytest.approx(Means(0.1, 0.1, 1))


def test_a_pod_that_names_models_waits_for_one_of_them_and_the_column_may_be_missing() -> None:
    nodes = read_nodes(NODES.splitlines(), "nodes.csv")
    other = PODS.replace("T4", "A10|V100", 1)
    without = [line.split(",") for line in PODS.splitlines()]

    assert replay(pods(other), nodes, NodeOrder.BINPACK).impossible == 2
    bare = pods("\n".join(",".join(cells[:4] + cells[5:]) for cells in without))
    assert replay(bare, nodes, NodeOrder.BINPACK).waits_s == [0, 0, 90]


def test_a_pod_without_an_end_keeps_its_place() -> None:
    endless = PODS.replace("0,100,", "0,,", 1)
    nodes = read_nodes(NODES.splitlines(), "nodes.csv")

    found = replay(pods(endless), nodes, NodeOrder.SPREAD)

    assert (found.waits_s, found.never) == ([0, 0], 1)


@pytest.mark.parametrize(
    ("instance", "pod"),
    [
        ("8,1,2.0,-1,5.0,7.0,9.0", "8000,2048,1,1000,5,9,7"),
        ("0.5,0,0.25,-1,5.0,,", "500,256,0,0,5,,"),
        ("0.5,2,16,-1,,,30.0", "500,16384,2,1000,0,30,0"),
        ("1,1,8.0,-1,,,", "1000,8192,1,1000,,,"),
    ],
)
def test_an_instance_is_the_pod_that_the_older_columns_describe(instance: str, pod: str) -> None:
    header = PODS.splitlines()[0].replace("gpu_spec,", "")
    columns = INSTANCES.splitlines()[0].removeprefix("instance_sn,role,")

    assert pods(f"{columns}\na,{instance}") == pods(f"{header}\n{pod}")


def test_a_node_has_no_more_pods_of_an_app_than_their_limit() -> None:
    eight = NODES.replace(",1,T4", ",8,T4")
    nodes = with_density(read_nodes(eight.splitlines(), "nodes.csv"), pods(INSTANCES))

    found = replay(pods(INSTANCES), nodes, NodeOrder.BINPACK)

    assert nodes[0].facts.allocatable["a/2-per-node"] == 2
    assert found.waits_s == [0, 0, 0, 25]
    assert (found.never, found.impossible) == (0, 0)
    alone = pods(INSTANCES.replace("8.0,2", "8.0,1"))
    one = replay(alone, with_density(nodes, alone), NodeOrder.BINPACK)
    assert (sorted(one.waits_s), one.never) == ([0, 0], 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PODS.replace("num_gpu", "gpus"), "no column num_gpu; its first line must name"),
        (PODS.replace("0,100,", "0,soon,", 1), "line 2: column deletion_time: 'soon'"),
        (PODS.replace("0,100,", "0,nan,", 1), "line 2: column deletion_time: 'nan'"),
        (PODS.replace("1000,1024,2,1000,,40,90,", "1000,1024"), "line 5: column num_gpu: ''"),
        (PODS.replace(",600,", ",0.5,", 1), "line 2: column gpu_milli: '0.5' is not a whole"),
        (INSTANCES.replace("app_name", "app"), "no column app_name; its first line must name"),
        (INSTANCES.replace("8.0,2", "8.0,-2", 1), "line 2: column max_instance_per_node: '-2'"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said(text: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        pods(text)


def test_the_command_prints_a_line_for_each_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "pods.csv"
    nodes = tmp_path / "nodes.csv"
    nodes.write_text(NODES)
    trace.write_text(PODS)

    main([str(trace), "--nodes", str(nodes), "--load", "2"])

    headings, *lines = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    found = [dict(zip(headings, line, strict=True)) for line in lines]
    assert [line["policy"] for line in found] == list(NodeOrder)
    assert (found[0]["max s"], found[0]["impossible"]) == ("95.0", "1")


WAITING = """\
cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time
1000,1024,1,1000,0,100
1000,1024,1,1000,1,201
1000,1024,2,1000,10,110
1000,1024,1,1000,110,160
1000,1024,1,1000,120,420
"""


@pytest.mark.parametrize(
    ("terms", "waits"),
    [
        (Terms.NONE, [0, 0, 0, 40, 450]),
        (Terms.EXACT, [0, 0, 0, 181, 191]),
        (Terms.DOUBLE, [0, 0, 0, 181, 191]),
    ],
)
def test_what_ends_before_a_planned_start_is_let_in_and_what_may_not_is_not(
    terms: Terms, waits: list[float]
) -> None:
    nodes = read_nodes(NODES.replace(",1,T4", ",2,T4").splitlines(), "nodes.csv")

    found = replay(pods(WAITING), nodes, NodeOrder.BINPACK, terms)

    assert sorted(found.waits_s) == waits
    late = sorted(promise.late_s for promise in found.promises)
    assert late == {Terms.NONE: [], Terms.EXACT: [0, 0], Terms.DOUBLE: [-200, -100]}[terms]


@pytest.mark.parametrize(("run_s", "waits"), [(600, [590, 550]), (2 * SOON_S, [0, 7340])])
def test_no_device_is_claimed_for_long_for_what_is_only_expected(
    run_s: float, waits: list[float]
) -> None:
    nodes = read_nodes(NODES.replace(",1,T4", ",2,T4").splitlines(), "nodes.csv")
    one, two = pods(WAITING)[1:3]
    trace = [
        replace(one, created_s=0, runs_s=run_s),
        replace(one, created_s=0, runs_s=run_s),
        replace(one, created_s=run_s, runs_s=run_s),
        replace(one, created_s=run_s, runs_s=100),
        replace(two, created_s=run_s + 10, runs_s=100),
        replace(one, created_s=run_s + 150, runs_s=run_s),
    ]

    found = replay(trace, nodes, NodeOrder.BINPACK, Terms.LEARNED)

    assert found.waits_s == [0, 0, 0, 0, *waits]


def test_a_gang_starts_as_one_when_its_planned_start_has_come() -> None:
    nodes = read_nodes(NODES.replace(",1,T4", ",2,T4").splitlines(), "nodes.csv")
    single = [replace(pod, created_s=pod.created_s) for pod in pods(WAITING)]
    gang = replace(single[0], created_s=10, members=2)

    found = replay([*single[:2], gang, *single[3:]], nodes, NodeOrder.BINPACK, Terms.EXACT)

    assert found.gang_waits_s == [191]
    assert with_gangs(5 * [single[2]])[4].members > 1
