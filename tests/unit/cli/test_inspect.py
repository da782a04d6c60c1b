"""gpus, ps and top: a snapshot in, text and JSON out."""

from dataclasses import replace

import pytest
from msgspec import structs
from rich.console import Group
from rich.text import Text

from services.cli.formats import age
from services.cli.inspect import json_output, render, top
from services.cli.inspect.explanation import explain, shape
from services.cli.snapshot.snapshot import MeasuredUsage, Snapshot
from services.cli.tables import new_table
from services.cli.terminal import print_text
from shared.model.device import DeviceUse
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.node import CORDON_PREFIX
from tests.support.snapshots import (
    DEVICE,
    GPU,
    HELD,
    LEASE,
    MEASURED,
    NODE,
    NOT_MEASURED,
    OURS,
    POD,
    WAITING,
    drawn,
    with_an_instance,
)


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (119, "119s"), (120, "2m"), (7_200, "2h"), (200_000, "2d")]
)
def test_ages_read_as_kubectl_writes_them(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_gpus_draws_a_bar_that_fits_the_width() -> None:
    narrow = drawn(render.gpus([NODE], 80, NOT_MEASURED), 80)
    wide = drawn(render.gpus([NODE], 140, NOT_MEASURED), 140)

    assert all(len(line) <= 80 for line in narrow.splitlines())
    assert wide.count("A") == 1 + round(3_000 * 48 / 15_000)
    assert "team/first main  3000 MiB  30 %  slot 1  active" in wide


def test_equal_amounts_of_several_devices_are_counted() -> None:
    (lease,) = HELD.leases
    (part,) = lease.shares
    parts = (part, part, structs.replace(part, memory_mib=5_000))
    held = replace(HELD, nodes=(replace(NODE, leases=(structs.replace(lease, shares=parts),)),))

    assert f"2x{part.memory_mib}+5000" in drawn(render.ps(held), 160)
    assert f"3x{part.cores_percent}%" in drawn(render.ps(held), 160)


def test_an_instance_is_shown_with_its_profile_and_real_size() -> None:
    node = with_an_instance()
    snapshot = Snapshot(read_at=1_000.0, nodes=(node,))

    text = drawn(render.gpus([node], 160, NOT_MEASURED), 160)
    row = drawn(render.ps(snapshot), 160).splitlines()[1]
    (node,) = json_output.gpus([node], NOT_MEASURED)["nodes"]

    output = explain(replace(POD, node="node-0", phase="Running"), snapshot, OURS).lines

    assert "instance 2g.10gb at position 1 of layout group2 of device 2" in " ".join(output)
    assert "10240/40960 MiB  MIG: group2 (3 x 2g.10gb + 1 x 1g.5gb), 1/4 instances" in text
    assert "team/first main  10240 MiB  2g.10gb  position 1  active" in text
    assert row.split()[:6] == ["team/first", "node-0", "2", "10240", "-", "2g.10gb"]
    assert (node["devices"][0]["mode"], node["devices"][0]["layout"]) == ("mig", "group2")
    assert node["devices"][0]["shares"][0]["mig"] == {
        "layout": "group2", "position": 1, "profile": "2g.10gb"
    }  # fmt: skip


def test_an_idle_device_in_mig_mode_is_shown_as_idle() -> None:
    node = with_an_instance()
    ((device, _),) = node.node.devices
    idle = replace(node, node=replace(node.node, devices=((device, DeviceUse()),)), leases=())

    assert "MIG: idle, 1 possible layouts" in drawn(render.gpus([idle], 160, NOT_MEASURED), 160)


def test_gpus_without_a_device_prints_what_to_check() -> None:
    assert "are the node agents running?" in drawn(render.gpus([], 80, NOT_MEASURED))


def test_ps_lists_leases_and_waiting_pods() -> None:
    text = drawn(render.ps(replace(HELD, waiting=(WAITING,))), 160)

    assert "team/first  node-0  2        3000  -     30%    -     active  2m   volcano-vgpu" in text
    assert "Ask for at most 4 MiB." in text


def test_no_value_of_a_pod_changes_how_the_rest_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile = "[/x] [bold]\x1b[2J:smile:\u202e"
    table = new_table("VERDICT")
    table.add_row(hostile)

    print_text(Group(table, Text(f"{hostile}\nnext line")))

    shown = r"[/x] [bold]\x1b[2J:smile:\u202e"
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["VERDICT", shown, shown, "next line"]


def test_ps_is_of_one_namespace_or_pod_and_lists_names() -> None:
    waiting = replace(WAITING.queued, name="later", namespace=Namespace("b"))
    both = replace(HELD, waiting=(replace(WAITING, queued=waiting),))
    here = both.of_pods(LEASE.namespace, LEASE.name)
    there = both.of_pods(waiting.namespace, waiting.name)

    assert both.of_pods("", "") == both
    assert both.pod_names == [LEASE.name, waiting.name]
    assert (here.leases, here.waiting) == (both.leases, ())
    assert (there.leases, there.waiting) == ((), both.waiting)
    assert both.of_pods("nowhere", "").pod_names == []


def test_ps_shows_uids_and_uuids_if_it_is_wide() -> None:
    assert f"{LEASE.pod}  {GPU}" in drawn(render.ps(HELD, wide=True), 300)
    assert LEASE.pod not in drawn(render.ps(HELD), 300)


def test_the_json_of_gpus_names_each_share_of_each_device() -> None:
    ((device,),) = [node["devices"] for node in json_output.gpus([NODE], NOT_MEASURED)["nodes"]]

    assert (device["used_memory_mib"], device["slots"], device["fence"]) == (3_000, 4, 5)
    assert device["shares"][0]["name"] == "first"


def test_an_unhealthy_device_and_its_leases_are_marked() -> None:
    sick = replace(DEVICE, healthy=False, fault="cordoned: XidError: Xid 79")
    ((_, use),) = NODE.node.devices
    node = replace(NODE, node=replace(NODE.node, devices=((sick, use),)))
    held = replace(HELD, nodes=(node,))

    bars = drawn(render.gpus([node], 120, NOT_MEASURED))
    assert "UNHEALTHY" in bars
    assert "cordoned: XidError: Xid 79" in bars
    assert "active, on an unhealthy device" in drawn(render.ps(held), 160)
    assert f"{node.node.facts.name} device 2: cordoned: XidError: Xid 79" in drawn(render.ps(held))
    assert "XidError" not in drawn(render.ps(held.of_pods("nowhere", "")))
    assert json_output.ps(held)["leases"][0]["unhealthy_devices"] == [GPU]
    assert json_output.gpus([node], NOT_MEASURED)["nodes"][0]["devices"][0]["fault"] == sick.fault
    assert any("UNHEALTHY: cordoned" in line for line in explain(POD, held, OURS).lines)
    assert explain(POD, held, OURS).next.startswith("kubectl delete pod first -n team: ")


def test_usage_is_shown_beside_each_lease() -> None:
    usage = MeasuredUsage(shares={MEASURED.key: MEASURED})
    snapshot = replace(HELD, usage=usage)

    running = explain(POD, snapshot, OURS)

    assert "in use: 1200 MiB, 0%" in drawn(render.gpus([NODE], 160, usage))
    assert "3000  1200  30%    0%" in drawn(render.ps(snapshot))
    assert any("uses 1200 MiB and 0% of the cores; processes: 2, idle for 10m" in line
               for line in running.lines)  # fmt: skip
    ((device,),) = [node["devices"] for node in json_output.gpus([NODE], usage)["nodes"]]
    ((lease,), explained) = json_output.ps(snapshot)["leases"], shape(POD, running)["lease"]
    for share in (device["shares"][0], lease["shares"][0], explained["shares"][0]):
        assert share["measured"] == {
            "memory_mib": 1_200,
            "cores_percent": 0,
            "processes": 2,
            "idle": False,
            "idle_since": 400.0,
        }


def test_missing_usage_is_a_dash_and_nodes_without_a_reply_are_named() -> None:
    usage = MeasuredUsage(unmeasured_nodes=(NodeName("node-0"),))
    snapshot = replace(HELD, usage=usage)

    for text in (drawn(render.gpus([NODE], 160, usage)), drawn(render.ps(snapshot))):
        assert "no reply from the agents of: node-0" in text
    assert "in use: - MiB, -" in drawn(render.gpus([NODE], 160, usage))
    assert json_output.ps(snapshot)["leases"][0]["shares"][0]["measured"] is None
    assert json_output.ps(snapshot)["unmeasured_nodes"] == ["node-0"]


def test_gpus_names_cordoned_nodes_and_missing_components() -> None:
    reason = "the agent of node node-0 does not respond"
    node = replace(NODE, node=replace(NODE.node, served=(CORDON_PREFIX + reason,)))
    usage = MeasuredUsage(missing_components=("node-agent of node-0 does not send heartbeats",))

    text = drawn(render.gpus([node], 160, usage))
    document = json_output.gpus([node], usage)

    assert f"gets no pods: {reason}" in text
    assert "node-agent of node-0 does not send heartbeats" in text
    assert document["nodes"][0]["cordoned"] == reason
    assert document["problems"] == ["node-agent of node-0 does not send heartbeats"]
    assert json_output.gpus([NODE], NOT_MEASURED)["nodes"][0]["cordoned"] == ""


def test_top_sorts_by_usage_and_filters_by_namespace_and_node() -> None:
    other = structs.replace(LEASE, pod=PodUid("other"), name="second", namespace=Namespace("b"))
    nodes = [replace(NODE, leases=(other, LEASE))]
    usage = MeasuredUsage(shares={MEASURED.key: MEASURED}, read_at=1_000.0)

    by_memory = top.top_rows(nodes, usage, sort="memory")
    by_pod = top.top_rows(nodes, usage, sort="pod")
    of_b = top.top_rows(nodes, usage, sort="cores", namespace="b")

    assert [row.lease.name for row in by_memory] == ["first", "second"]
    assert [row.lease.name for row in by_pod] == ["second", "first"]
    assert [row.lease.name for row in of_b] == ["second"]
    assert top.top_rows(nodes, usage, sort="idle", node="elsewhere") == []
    text = drawn(top.top_table(by_memory, usage))
    assert "1200 of 3000  0% of 30%  2          10m idle" in text
    assert "- of 3000     - of 30%   -          -" in text
    assert [share["measured"] for share in top.top_shape(of_b, usage)["shares"]] == [None]
