"""Idle leases: marked in gpus, ps, explain and top, and added up by `report --idle`."""

from dataclasses import replace

from msgspec import structs

from services.cli.admin import idle_report
from services.cli.inspect import json_output, render, top
from services.cli.inspect.explanation import explain
from services.cli.snapshot.snapshot import MeasuredUsage, Snapshot
from shared.model.ledger import NodeTotals
from shared.model.names import Namespace, PodUid
from shared.model.usage import ShareMeasurement
from tests.support.snapshots import HELD, LEASE, MEASURED, NODE, OURS, POD, drawn

NOW = 8_000.0
"""Two hours after the last use, at 800."""


def usage_of(*measured: ShareMeasurement, idle_after_s: float = 600.0) -> MeasuredUsage:
    shares = {one.key: one for one in measured}
    return MeasuredUsage(shares=shares, read_at=NOW, idle_after_s=idle_after_s)


def snapshot_of(*nodes: NodeTotals, usage: MeasuredUsage) -> Snapshot:
    return replace(HELD, read_at=NOW, nodes=nodes, usage=usage)


IDLE = replace(MEASURED, idle_since=800.0)


def test_an_idle_lease_is_marked_everywhere_with_how_long() -> None:
    usage = usage_of(IDLE)
    snapshot = snapshot_of(NODE, usage=usage)

    explained = "\n".join(explain(POD, snapshot, OURS).lines)

    assert "in use: 1200 MiB, 0%, idle 2h" in drawn(render.gpus([NODE], 160, usage), 160)
    assert "active, idle 2h" in drawn(render.ps(snapshot), 160)
    assert "idle        for 2h, since 1970-01-01T00:13:20Z" in explained
    rows = top.top_rows([NODE], usage, sort="idle")
    assert "2h idle" in drawn(top.top_table(rows, usage))
    ((lease,),) = (json_output.ps(snapshot)["leases"],)
    measured = lease["shares"][0]["measured"]
    assert (measured["idle"], measured["idle_since"]) == (True, 800.0)


def test_a_lease_is_not_marked_before_the_time_has_passed() -> None:
    usage = usage_of(IDLE, idle_after_s=3 * 3600)
    snapshot = snapshot_of(NODE, usage=usage)

    assert "idle" not in drawn(render.gpus([NODE], 160, usage), 160)
    assert "idle" not in drawn(render.ps(snapshot), 160)
    assert not any(line.startswith("idle") for line in explain(POD, snapshot, OURS).lines)
    ((lease,),) = (json_output.ps(snapshot)["leases"],)
    assert lease["shares"][0]["measured"]["idle"] is False


def test_a_lease_with_one_share_in_use_is_not_idle_but_its_other_share_is() -> None:
    second = structs.replace(LEASE.shares[0], container="side", slot=2)
    lease = structs.replace(LEASE, shares=(*LEASE.shares, second))
    node = replace(NODE, leases=(lease,))
    usage = usage_of(IDLE, replace(IDLE, container="side", idle_since=None))

    assert "idle 2h" in drawn(render.gpus([node], 160, usage), 160)
    assert "idle" not in drawn(render.ps(snapshot_of(node, usage=usage)), 160)


def two_owners() -> Snapshot:
    """Return a job with two idle pods, one of two hours, and a pod of its own of one hour."""
    names = {"job-1": "Job/train", "job-2": "Job/train", "alone": ""}
    leases = tuple(structs.replace(LEASE, pod=PodUid(name), name=name) for name in names)
    leases = (*leases[:2], structs.replace(leases[2], namespace=Namespace("other")))
    pods = tuple(replace(POD, pod=PodUid(name), owner=owner) for name, owner in names.items())
    since = {"job-1": NOW - 7_200, "job-2": NOW - 60, "alone": NOW - 3_600}
    measured = (replace(IDLE, pod=PodUid(name), idle_since=at) for name, at in since.items())
    snapshot = snapshot_of(replace(NODE, leases=leases), usage=usage_of(*measured))
    return replace(snapshot, pods=pods)


def test_the_report_adds_up_idle_gpu_hours_and_mib_hours_by_owner() -> None:
    shape = idle_report.idle_shape(two_owners())

    assert [(one["namespace"], one["owner"]) for one in shape["holders"]] == [
        ("team", "Job/train"),
        ("other", "Pod/alone"),
    ]
    job, alone = shape["holders"]
    assert (job["shares"], job["gpus"], job["gpu_hours"], job["mib_hours"]) == (1, 0.3, 0.6, 6_000)
    assert (alone["gpu_hours"], alone["mib_hours"]) == (0.3, 3_000)
    assert shape["total"]["gpu_hours"] == 0.9
    assert shape["total"]["idle_since"] == NOW - 7_200


def test_the_report_as_a_table_ends_with_the_sum() -> None:
    lines = drawn(idle_report.idle_table(two_owners()), 160).splitlines()

    assert lines[0].split() == [
        "NAMESPACE", "OWNER", "SHARES", "GPUS", "MIB", "GPU-HOURS", "MIB-HOURS", "SINCE"
    ]  # fmt: skip
    assert lines[1].split()[:7] == ["team", "Job/train", "1", "0.30", "3000", "0.60", "6000"]
    assert lines[-1].split()[:6] == ["total", "2", "0.60", "6000", "0.90", "9000"]


def test_a_share_counts_by_the_larger_part_of_its_device() -> None:
    large = structs.replace(LEASE.shares[0], memory_mib=7_500)
    whole = structs.replace(LEASE.shares[0], whole=True)

    def gpus(share: object) -> float:
        node = replace(NODE, leases=(structs.replace(LEASE, shares=(share,)),))
        (found,) = idle_report.idle_shares(snapshot_of(node, usage=usage_of(IDLE)))
        return found.gpus

    assert [gpus(large), gpus(whole)] == [0.5, 1.0]


def test_without_idle_shares_the_report_says_so_and_names_nodes_that_did_not_reply() -> None:
    usage = replace(usage_of(), unmeasured_nodes=(NODE.node.facts.name,))

    text = drawn(idle_report.idle_table(snapshot_of(NODE, usage=usage)))

    assert "no share has been idle for 10m" in text
    assert "no reply from the agents of: node-0" in text
