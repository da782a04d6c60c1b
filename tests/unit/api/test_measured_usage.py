"""The measured usage beside leases: on the page, in the API and in the schedulers' metrics."""

from dataclasses import replace

import msgspec
import pytest

from services.api import legacy_metrics
from services.api.legacy_metrics import metric_families
from services.api.projection import Projection
from services.api.static_page import page
from shared.model.device import Hardware, XidEvent
from shared.model.lease import Lease, ShareMeasurement
from shared.model.names import DeviceUuid, NodeName
from tests.support.api.board import lease, node_totals, projected, seen, usage

NODE = NodeName("n1")
GPU = DeviceUuid("GPU-n1-0")
HELD = lease(namespace="team", name="train")
USED = ShareMeasurement(
    pod=HELD.pod,
    namespace=HELD.namespace,
    name=HELD.name,
    container="main",
    device=GPU,
    memory_mib=600,
    cores_percent=20,
    processes=1,
)
IDLE = replace(USED, cores_percent=0, idle_since=1_000.0)


def board_of(
    measured: ShareMeasurement | None, *held: Lease, now: float = 2_000.0
) -> tuple[Projection, frozenset[tuple[str, str]]]:
    board = projected(node_totals(*(held or (HELD,))))
    reply = None if measured is None else usage(measured)
    return board, board.update_measured(NODE, reply, now=now, idle_after_s=600.0)


def test_sensors_are_those_of_the_devices_of_the_node_whose_agent_reports_them() -> None:
    board = projected(node_totals(HELD), node_totals(name="n2"))
    own = Hardware(device=GPU, at=5.0, temperature_c=61, xids=(XidEvent(number=79, at=4.0),))
    foreign = Hardware(device=DeviceUuid("GPU-n2-0"), at=5.0, temperature_c=99)
    report = usage(hardware=[own, foreign])

    board.update_measured(NODE, report, now=6.0, idle_after_s=600.0)

    shown = seen(board)
    assert shown.details(board.devices[GPU]).hardware == own
    assert shown.details(board.devices[foreign.device]).hardware is None
    first, second = shown.gpus().nodes
    assert [one.hardware for one in (*first.devices, *second.devices)] == [own, None, None, None]
    board.update_measured(NODE, None, now=9.0, idle_after_s=600.0)
    assert shown.details(board.devices[GPU]).hardware is None


def measured_of(board: Projection) -> object:
    (share,) = seen(board).device(board.devices[GPU]).shares
    return share.measured and msgspec.to_builtins(share.measured)


def table_of(board: Projection) -> str:
    return page(seen(board).state("x"), number=1, only_table=True, signed_in=False)


def test_a_share_has_its_measured_usage_and_is_marked_once_it_is_idle() -> None:
    used, changed = board_of(USED)
    young, _ = board_of(IDLE, now=1_500.0)
    idle, _ = board_of(IDLE)

    assert changed == {("device", GPU)}
    assert measured_of(used) == {
        "memory_mib": 600, "cores_percent": 20, "processes": 1, "idle": False, "idle_since": None
    }  # fmt: skip
    assert measured_of(idle) == measured_of(young)
    assert seen(young, now=1_500.0).lease(HELD).idle_since is None
    assert seen(idle).lease(HELD).idle_since == 1_000.0
    assert "uses 600 MiB, 20 % of the cores<" in table_of(used)
    assert "uses 600 MiB, 0 % of the cores, idle for 16 min<" in table_of(idle)


def test_the_same_usage_changes_nothing_and_a_silent_agent_removes_it() -> None:
    board, _ = board_of(USED)

    again = board.update_measured(NODE, usage(USED), now=2_005.0, idle_after_s=600.0)
    silent = board.update_measured(NODE, None, now=2_010.0, idle_after_s=600.0)

    assert again == frozenset()
    assert silent == {("device", GPU)}
    assert measured_of(board) is None


def test_usage_stays_when_the_node_is_read_again_and_ends_with_the_lease() -> None:
    board, _ = board_of(USED)

    unchanged = board.update_nodes([], [node_totals(HELD)])
    kept = measured_of(board)
    board.update_nodes([], [node_totals()])

    assert unchanged == frozenset()
    assert kept is not None
    assert board.leased_nodes() == []
    assert board.devices[GPU].shares == ()


def test_a_viewer_of_other_namespaces_sees_no_usage() -> None:
    board, _ = board_of(USED)

    (share,) = seen(board, lambda _: False).device(board.devices[GPU]).shares

    assert share.measured is None


def test_the_schedulers_port_counts_the_shares_that_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(legacy_metrics, "MOST_SHARES", 0)

    families = {family.name: family.samples for family in metric_families(board_of(USED)[0])}

    assert families["leasehold_share_memory_bytes"] == []
    assert [one.value for one in families["leasehold_shares_left_out"]] == [1]


def test_the_schedulers_port_has_the_usage_of_each_share() -> None:
    def values(board: Projection) -> dict[str, list[float]]:
        return {
            family.name: [sample.value for sample in family.samples]
            for family in metric_families(board)
        }

    used, idle, unknown = (values(board_of(one)[0]) for one in (USED, IDLE, None))

    assert used["leasehold_share_memory_used_bytes"] == [600 << 20]
    assert used["leasehold_share_cores_used_ratio"] == [0.2]
    assert (used["leasehold_share_idle"], idle["leasehold_share_idle"]) == ([0], [1])
    assert unknown["leasehold_share_memory_used_bytes"] == unknown["leasehold_share_idle"] == []
