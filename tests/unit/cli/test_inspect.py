"""gpus, ps and top: what the API returns in, text out; and which fields it returns."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import yaml
from msgspec import structs
from rich.console import Group
from rich.text import Text

from services.api.projection.problems import AffectedObject
from services.cli.commands import Top
from services.cli.formats import FittedTable, age
from services.cli.inspect import render, views
from services.cli.terminal import print_document, print_text
from shared.model.bounds import printable_lines
from shared.model.devices.device import DeviceMode, DeviceUse, Hardware, XidEvent
from shared.model.devices.enforcers import MissingEnforcer
from shared.model.devices.node import CORDON_PREFIX
from shared.model.devices.replicas import Replicas
from shared.model.leases.lease import WaitingSize
from shared.model.leases.ledger import WaitingPod
from shared.model.names import DeviceUuid, Namespace, PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import Gang, PodRequest
from shared.model.views.leases import LeasesView
from tests.support.snapshots import (
    DEVICE,
    EMPTY,
    GPU,
    HELD,
    LEASE,
    MEASURED,
    NODE,
    POD,
    WAITING,
    cluster_of,
    drawn,
    explained,
    with_an_instance,
)


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (119, "119s"), (120, "2m"), (7_200, "2h"), (200_000, "2d")]
)
def test_ages_read_as_kubectl_writes_them(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_no_cell_is_cut_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "10")
    table = FittedTable("POD", "NODE")
    table.add_row("a-long-name", "node-1")

    print_text(table)

    assert "a-long-name  node-1" in capsys.readouterr().out


def test_gpus_draws_a_bar_that_fits_the_width() -> None:
    narrow = drawn(render.gpus(HELD.gpus(), 80), 80)
    wide = drawn(render.gpus(HELD.gpus(), 140), 140)

    assert all(len(line) <= 80 for line in narrow.splitlines())
    assert wide.splitlines()[1].count("A") == round(3_000 * 48 / 15_000)
    assert "memory by HAMi-core, cores by HAMi-core" in wide
    assert "team/first main  3000 MiB  30 % cores  active" in wide


def test_equal_amounts_of_several_devices_are_counted() -> None:
    (part,) = LEASE.shares
    parts = (part, part, structs.replace(part, memory_mib=5_000))
    held = cluster_of(replace(NODE, leases=(structs.replace(LEASE, shares=parts),))).leases()

    assert f"2x{part.memory_mib}+5000" in drawn(render.ps(held), 160)
    assert f"3x{part.cores_percent}%" in drawn(render.ps(held), 160)


def test_an_instance_is_shown_with_its_profile_and_real_size() -> None:
    cluster = cluster_of(with_an_instance())

    text = drawn(render.gpus(cluster.gpus(), 160), 160)
    row = drawn(render.ps(cluster.leases()), 160).splitlines()[1]
    (node,) = cluster.gpus().nodes
    output = explained(replace(POD, node="node-0", phase="Running"), cluster).lines

    assert "share       10240 of 15000 MiB, instance 2g.10gb" in output
    assert "10240/40960 MiB  MIG: group2 (3 x 2g.10gb + 1 x 1g.5gb), 1/4 instances" in text
    assert "team/first main  10240 MiB  2g.10gb  position 1  active" in text
    assert row.split()[:6] == ["team/first", "node-0", "2", "10240", "-", "2g.10gb"]
    assert (node.devices[0].mode, node.devices[0].layout) == ("mig", "group2")
    assert msgspec.to_builtins(node.devices[0].shares[0].mig) == {
        "layout": "group2", "position": 1, "profile": "2g.10gb"
    }  # fmt: skip


def test_an_idle_device_in_mig_mode_is_shown_as_idle() -> None:
    node = with_an_instance()
    ((device, _),) = node.node.devices
    idle = replace(node, node=replace(node.node, devices=((device, DeviceUse()),)), leases=())

    text = drawn(render.gpus(cluster_of(idle).gpus(), 160), 160)

    assert "MIG: idle, 1 possible layouts" in text


def test_replicas_are_shown_with_what_is_held_of_them() -> None:
    ((device, used),) = NODE.node.devices
    replicas = Replicas(number=4, strategy="time-slicing", resource="nvidia.com/gpu")
    divided = replace(device, mode=DeviceMode.REPLICAS, replicas=replicas, slots=4)
    (part,) = LEASE.shares
    turn = structs.replace(
        part, memory_mib=3_750, memory="none", compute="none", mode="time-slicing"
    )
    node = replace(
        NODE,
        node=replace(NODE.node, devices=((divided, used),)),
        leases=(structs.replace(LEASE, shares=(turn,)),),
    )

    text = drawn(render.gpus(cluster_of(node).gpus(), 160), 160)
    lines = "\n".join(
        explained(replace(POD, node="node-0", phase="Running"), cluster_of(node)).lines
    )

    assert "offered as 4 replicas by time-slicing, as nvidia.com/gpu: memory and cores of" in text
    assert "memory not held, cores not held" in lines


def test_gpus_shows_what_sensors_read_if_there_is_room() -> None:
    view = HELD.gpus()
    hardware = Hardware(
        device=DeviceUuid(GPU),
        at=1.0,
        temperature_c=61,
        power_w=312.4,
        throttle=("power limit",),
        xids=(XidEvent(number=79, at=1.0, meaning="the GPU has fallen off the bus"),),
    )
    devices = tuple(structs.replace(one, hardware=hardware) for one in view.nodes[0].devices[:1])
    shown = structs.replace(view, nodes=(structs.replace(view.nodes[0], devices=devices),))

    sensors = "61 °C; 312 W; slowed down by power limit; Xid 79: the GPU has fallen off the bus"
    assert f"{GPU}; {sensors}" in drawn(render.gpus(shown, 160, wide=True), 160)
    assert "61 °C" not in drawn(render.gpus(shown, 160), 160)


def test_gpus_without_a_device_prints_what_to_check() -> None:
    assert "are the node agents running?" in drawn(render.gpus(EMPTY.gpus(), 80))
    assert "no such node" in drawn(render.gpus(EMPTY.gpus(), 80, narrowed=True))


def test_an_empty_list_names_its_namespace_and_whether_it_is_narrowed() -> None:
    empty = EMPTY.leases()
    texts = [
        drawn(render.ps(empty, namespace="a", narrowed=True)),
        drawn(render.top_table((), empty, namespace="a")),
    ]

    assert [text.strip() for text in texts] == [
        "no such pod holds a lease in namespace a; -A shows all namespaces",
        "no pod holds a lease in namespace a; -A shows all namespaces",
    ]


def test_ps_lists_leases_and_waiting_pods() -> None:
    text = drawn(render.ps(cluster_of(NODE, waiting=[WAITING]).leases()), 160)

    assert "team/first node-0 2 3000 - 30% - active 2m volcano-vgpu" in " ".join(text.split())
    assert "Ask for at most 4 MiB." in text


def test_ps_has_one_row_for_the_pods_of_a_gang_that_wait_for_the_same_reason() -> None:
    def member(name: str, reason: str) -> WaitingPod:
        request = PodRequest(gang=Gang(name="team/g", min_member=4))
        queued = replace(WAITING.queued, pod=PodUid(name), name=name, request=request)
        return replace(WAITING, queued=queued, refusal=Refusal(reason=reason))

    waiting = [WAITING, *(member(name, "3 of 4 exist") for name in "abc"), member("d", "refused")]
    view = cluster_of(waiting=waiting).leases()

    text = drawn(render.ps(view), 160)
    wide = drawn(render.ps(view, wide=True), 300)

    shown = [line.split("  ")[0] for line in text.splitlines()[3:]]
    assert shown == ["team/first", "team/a and 2 more", "team/d"]
    assert all(f"team/{name} " in wide for name in "abcd")


def test_no_value_of_a_pod_changes_how_the_rest_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile = "[/x] [bold]\x1b[2J:smile:\u202e"
    table = FittedTable("VERDICT")
    table.add_row(hostile)

    print_text(Group(table, Text(f"{hostile}\nnext line")))

    shown = r"[/x] [bold]\x1b[2J:smile:\u202e"
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["VERDICT", shown, shown, "next line"]


def test_no_value_changes_how_a_view_that_is_refreshed_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneAnswer:
        def __init__(self, _: object) -> None: ...

        def get(self, *_: object, **_named: object) -> LeasesView:
            return LeasesView(read_at=0.0, idle_after_s=0.0, problems=("[bold]\x1b]0;mine",))

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(views, "ApiClient", OneAnswer)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("time.sleep", interrupted)

    assert views.top(Top(namespace="")) == 0

    shown = capsys.readouterr().out
    assert r"[bold]\x1b]0;mine" in shown
    assert "\x1b]0;mine" not in shown


@pytest.mark.parametrize(
    ("form", "read"),
    [
        ("json", json.loads),
        ("yaml", yaml.safe_load),
    ],
)
@pytest.mark.parametrize("hostile", ["\x9b2J", "a\u202eb", "\x7f", "\U000e0001 \xe9"])
def test_a_document_does_not_drive_a_terminal_and_is_read_as_it_is(
    form: str, read: Callable[[str], Any], hostile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_document({"name": hostile}, form)

    shown = capsys.readouterr().out
    assert printable_lines(shown) == shown
    assert read(shown.replace("\xe9", r"\xe9"))["name"] == hostile
    print_document({"name": "caf\xe9"}, form)
    assert "caf\xe9" in capsys.readouterr().out


def test_leases_are_of_one_namespace_or_pod() -> None:
    waiting = replace(WAITING.queued, name="later", namespace=Namespace("b"), pod=PodUid("later"))
    both = cluster_of(NODE, waiting=[replace(WAITING, queued=waiting)])
    here = both.leases(LEASE.namespace, LEASE.name)
    there = both.leases(waiting.namespace, waiting.name)

    assert ([one.name for one in here.leases], here.waiting) == ([LEASE.name], ())
    assert (there.leases, [one.name for one in there.waiting]) == ((), ["later"])
    assert both.leases("nowhere").leases == ()


def test_a_narrow_table_lacks_its_least_columns_and_no_word_is_cut() -> None:
    table = FittedTable("POD", "NODE", "VERDICT", "AGE", least=("NODE", "AGE"), wrapped="VERDICT")
    table.add_row("team/a-long-name-of-a-pod", "node-0", "waits for a GPU with room", "2m")

    wide, narrow, tiny = (drawn(table, width).splitlines() for width in (100, 65, 58))

    assert wide[0].split() == ["POD", "NODE", "VERDICT", "AGE"]
    assert narrow[0].split() == ["POD", "VERDICT", "AGE"]
    assert tiny[0].split() == ["POD", "VERDICT"]
    assert "team/a-long-name-of-a-pod" in tiny[1]
    assert all("…" not in line for line in (*wide, *narrow, *tiny))


@pytest.mark.parametrize("width", [80, 100])
def test_the_state_of_a_lease_is_shown_in_80_columns(width: int) -> None:
    lines = drawn(render.ps(HELD.leases()), width).splitlines()

    assert all(len(line) <= width for line in lines)
    assert {"POD", "NODE", "STATE"} <= set(lines[0].split())
    assert "active" in lines[1]


def test_ps_shows_uids_and_uuids_if_it_is_wide() -> None:
    assert f"{LEASE.pod}  {GPU}" in drawn(render.ps(HELD.leases(), wide=True), 300)
    assert LEASE.pod not in drawn(render.ps(HELD.leases()), 300)


def test_an_unhealthy_device_and_its_leases_are_marked() -> None:
    sick = replace(DEVICE, healthy=False, fault="cordoned: XidError: Xid 79")
    ((_, use),) = NODE.node.devices
    node = replace(NODE, node=replace(NODE.node, devices=((sick, use),)))
    cluster = cluster_of(node)

    bars = drawn(render.gpus(cluster.gpus(), 120))
    leases = cluster.leases()
    assert "UNHEALTHY" in bars
    assert "cordoned: XidError: Xid 79" in bars
    assert "active, on an unhealthy device" in drawn(render.ps(leases), 160)
    assert "node-0 device 2: cordoned: XidError: Xid 79" in drawn(render.ps(leases))
    assert "XidError" not in drawn(render.ps(cluster.leases("nowhere")))
    assert leases.leases[0].unhealthy_devices == {GPU: sick.fault}
    assert any("UNHEALTHY: cordoned" in line for line in explained(POD, cluster).lines)


def test_a_lease_that_waits_for_a_smaller_size_is_marked_with_what_is_missing() -> None:
    (share,) = LEASE.shares
    size = WaitingSize(container=share.container, memory_mib=1_000, cores_percent=30, since=880.0)
    waiting = structs.replace(LEASE, waiting_size=size)
    cluster = cluster_of(replace(NODE, leases=(waiting,)), measured=[MEASURED])
    text = f"ResizeWaiting: container {share.container} gets 1000 MiB when 200 MiB less are in use"

    listed = drawn(render.ps(cluster.leases()), 200)

    assert "active, ResizeWaiting" in listed
    assert f"{LEASE.namespace}/{LEASE.name} {text}" in listed
    (line,) = (line for line in explained(POD, cluster).lines if line.startswith("resize"))
    assert line == f"resize      {text}; since 1970-01-01T00:14:40Z, tried again every 15 s"
    unmeasured = cluster_of(replace(NODE, leases=(waiting,))).leases()
    assert "when less memory is in use" in unmeasured.leases[0].waiting_text


def test_explain_shows_why_a_gpu_does_not_offer_any_more_what_holds_a_lease() -> None:
    missing = (MissingEnforcer("driver", "another program limits memory"),)
    (share,) = LEASE.shares
    held = structs.replace(LEASE, shares=(structs.replace(share, memory="driver"),))
    ((_, use),) = NODE.node.devices
    devices = ((replace(DEVICE, missing=missing), use),)
    node = replace(NODE, node=replace(NODE.node, devices=devices), leases=(held,))
    line = "new pods    do not get that of GPU 2: another program limits memory"

    assert line in explained(POD, cluster_of(node)).lines
    assert line not in explained(POD, cluster_of(replace(node, leases=(LEASE,)))).lines


def test_usage_is_shown_beside_each_lease() -> None:
    cluster = cluster_of(NODE, measured=[MEASURED], idle_after_s=601.0)

    running = explained(POD, cluster)

    assert "in use: 1200 MiB, 0%" in drawn(render.gpus(cluster.gpus(), 160))
    assert "3000 1200 30% 0%" in " ".join(drawn(render.ps(cluster.leases())).split())
    assert any("1200 MiB and 0% of its cores, processes: 2, not used for 10m" in line
               for line in running.lines)  # fmt: skip
    (device,) = cluster.gpus().nodes[0].devices
    (lease,) = cluster.leases().leases
    shown = running.lease
    assert shown is not None
    for share in (device.shares[0], lease.shares[0], shown.shares[0]):
        assert msgspec.to_builtins(share.measured) == {
            "memory_mib": 1_200,
            "cores_percent": 0,
            "processes": 2,
            "idle": False,
            "idle_since": 400.0,
            "held_memory_mib": None,
            "held_cores_percent": None,
            "held_difference": "",
            "read_back_at": 0.0,
        }


def test_missing_usage_is_a_dash_and_nodes_without_a_reply_are_named() -> None:
    cluster = cluster_of(NODE, measured=None)

    for text in (drawn(render.gpus(cluster.gpus(), 160)), drawn(render.ps(cluster.leases()))):
        assert "no reply from the agents of: node-0" in text
    assert "active  not measured" in drawn(render.gpus(cluster.gpus(), 160))
    assert cluster.leases().leases[0].shares[0].measured is None
    assert cluster.leases().unmeasured_nodes == ("node-0",)


def test_gpus_names_cordoned_nodes_and_missing_components() -> None:
    reason = "the agent of node node-0 does not respond"
    node = replace(NODE, node=replace(NODE.node, served=(CORDON_PREFIX + reason,)))
    late = AffectedObject(
        service="node-agent", name="node-agent of node-0", since=0.0, cause="No heartbeats"
    )
    view = replace(cluster_of(node), components=(late,)).gpus()

    text = drawn(render.gpus(view, 160))

    assert f"gets no pods: {reason}" in text
    problem = "No heartbeats: node-agent of node-0"
    assert problem in text
    assert (view.nodes[0].cordoned, view.problems) == (reason, (problem,))
    assert HELD.gpus().nodes[0].cordoned == ""


def test_top_sorts_by_usage_and_filters_by_node() -> None:
    other = structs.replace(LEASE, pod=PodUid("other"), name="second", namespace=Namespace("b"))
    cluster = cluster_of(replace(NODE, leases=(other, LEASE)), measured=[MEASURED])
    view = cluster.leases()

    by_memory = render.top_rows(view, sort="memory")
    by_pod = render.top_rows(view, sort="pod")
    of_b = render.top_rows(cluster.leases("b"), sort="cores")

    assert [row.name for row in by_memory] == ["first", "second"]
    assert [row.name for row in by_pod] == ["second", "first"]
    assert [row.name for row in of_b] == ["second"]
    assert render.top_rows(view, sort="idle", node="elsewhere") == []
    text = drawn(render.top_table(by_memory, view))
    assert "1200 of 3000  0% of 30%  2          10m idle" in text
    assert "- of 3000     - of 30%   -          -" in text
    assert [share.measured for share in render.top_view(of_b, view).shares] == [None]


def test_gpus_ends_with_how_many_there_are_and_shows_what_holds_parts_if_wide() -> None:
    missing = (MissingEnforcer("driver", "another program limits memory"),)
    ((_, use),) = NODE.node.devices
    devices = ((replace(DEVICE, missing=missing), use),)
    cluster = cluster_of(replace(NODE, node=replace(NODE.node, devices=devices)))

    short = drawn(render.gpus(cluster.gpus(), 120), 120)
    wide = drawn(render.gpus(cluster.gpus(), 120, wide=True), 120)

    assert short.splitlines()[-1] == "1 GPU: 1 Closed; 0.30 GPUs leased"
    assert "GPU 2: parts are held: memory by hami-core" in wide
    assert "no driver: another program limits memory" in wide
    assert "no driver" not in short


def test_what_holds_parts_of_several_gpus_alike_is_said_once() -> None:
    missing = (MissingEnforcer("driver", "another program limits memory"),)
    ((_, use),) = NODE.node.devices
    devices = tuple(
        (replace(DEVICE, uuid=DeviceUuid(f"GPU-{index}"), index=index, missing=reasons), use)
        for index, reasons in enumerate((missing, (), missing))
    )

    def offers(*shown: int) -> list[str]:
        node = replace(NODE.node, devices=tuple(devices[index] for index in shown))
        view = cluster_of(replace(NODE, node=node, leases=())).gpus()
        lines = drawn(render.gpus(view, 200, wide=True), 200).splitlines()
        return [line.strip() for line in lines if "another program" in line]

    held = "parts are held: memory by hami-core, cores by hami-core"
    reason = "no driver: another program limits memory"
    assert offers(0, 2) == [f"all GPUs: {held}; {reason}"]
    assert offers(0, 1, 2) == [f"GPU 0, 2: {held}; {reason}"]
