"""What budgets charge for a lease is what pages, reports and metrics show of it."""

import math

import pytest

from services.api.aggregated.objects import KINDS
from services.api.projection.lease_views import finished_pod
from services.api.reports.history import POD, sample_of
from services.api.reports.pod_costs import cost_of_lease
from services.cli.inspect import render
from shared.kubernetes.kinds.gpu_prices import Prices
from shared.model.budgets.budget import Budget
from shared.model.budgets.weights import gpus_of_share, weigh
from shared.model.leases.lease import MigPlacement, Share
from tests.support import build
from tests.support.api.board import node_totals, projected, seen
from tests.support.snapshots import drawn

HOUR_S = 3600.0
BEGIN = 9 * HOUR_S
MIG = MigPlacement(layout="1g.5gb", profile="1g.5gb", position=0)


def part(memory: int, cores: int, container: str = "main", gpu: int = 0, **fields: object) -> Share:
    """Return a share with so many percent of the memory and of the cores."""
    sizes = {"device_mib": 1000, "memory_mib": memory * 10, "cores_percent": cores}
    return build.share(f"GPU-n1-{gpu}", gpu, container, slot=0, **sizes, **fields)


LEASES: dict[str, tuple[tuple[Share, ...], float]] = {
    "memory": ((part(30, 10),), 0.3),
    "cores": ((part(10, 40),), 0.4),
    "two containers": ((part(10, 50, "a"), part(50, 10, "b")), 0.6),
    "an init container": ((part(70, 0, "first", init=True), part(20, 30)), 0.7),
    "a smaller init container": ((part(10, 0, "first", init=True), part(20, 30)), 0.3),
    "only an init container": ((part(40, 0, "first", init=True),), 0.4),
    "a MIG instance": ((part(12, 30, mig=MIG),), 0.3),
    "whole": ((part(100, 100, whole=True),), 1.0),
    "two GPUs": ((part(30, 10), part(30, 10, gpu=1)), 0.6),
    "more than all": ((part(60, 0, "a"), part(60, 0, "b")), 1.0),
}


@pytest.mark.parametrize(("shares", "gpus"), LEASES.values(), ids=LEASES.keys())
def test_a_lease_weighs_the_same_for_budgets_pages_reports_and_metrics(
    shares: tuple[Share, ...], gpus: float
) -> None:
    lease = build.lease("p1", "n1", *shares, created_at=BEGIN)
    board = projected(node_totals(lease))
    view = seen(board, now=BEGIN + HOUR_S).lease(lease)
    prices = Prices(currency="", models={})
    [namespace] = board.namespaces()

    cost = cost_of_lease(view, board.devices, {}, prices, BEGIN + HOUR_S)

    finished = finished_pod(lease, BEGIN + HOUR_S, "Succeeded")
    weights = {
        "budget": weigh(lease, Budget(namespace=lease.namespace), {}).milli_gpu / 1000,
        "devices": sum(device.milli_gpu for device in board.devices.values()) / 1000,
        "namespace": namespace.milli_gpu / 1000,
        "hour of a running pod": cost.gpu_hours,
        "finished": finished.gpus,
        "hour of a finished pod": finished.gpu_hours,
        "metrics of containers": sum(gpus_of_share(lease, share) for share in lease.shares),
    }
    assert weights == pytest.approx(dict.fromkeys(weights, gpus))


@pytest.mark.parametrize(
    ("name", "memory_mib"),
    [
        ("two containers", 600),
        ("an init container", 700),
        ("a smaller init container", 200),
        ("only an init container", 400),
        ("two GPUs", 600),
    ],
)
def test_a_lease_has_as_much_memory_in_history_reports_and_lists_as_in_totals(
    name: str, memory_mib: int
) -> None:
    shares, _ = LEASES[name]
    lease = build.lease("p1", "n1", *shares, created_at=BEGIN)
    board = projected(node_totals(lease))
    cluster = seen(board, now=BEGIN + HOUR_S)
    [namespace] = board.namespaces()
    sample = sample_of(board.devices.values(), [], {})
    (of_leases,) = (kind for kind in KINDS if kind.plural == "gpuleases")
    [listed] = of_leases.read(cluster)
    _, row, *_ = drawn(render.ps(cluster.leases()), 200).splitlines()
    leased = row.split()[3]

    amounts = {
        "devices": sum(device.used_memory_mib for device in board.devices.values()),
        "namespace": namespace.memory_mib,
        "history": sample[POD]["p1"][0],
        "finished": finished_pod(lease, BEGIN + HOUR_S, "Succeeded").memory_mib,
        "kubectl": of_leases.cells(listed.status, 0.0)[3],
        "ps": sum(math.prod(map(int, part.split("x"))) for part in leased.split("+")),
    }
    assert amounts == dict.fromkeys(amounts, memory_mib)
