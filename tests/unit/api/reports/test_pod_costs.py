"""What a pod costs and draws: the weight of budgets, times prices and power."""

from decimal import Decimal

import pytest
from msgspec import structs

from services.api.projection.lease_views import finished_pod
from services.api.projection.projection import Projection
from services.api.reports.pod_costs import cost_of_finished, cost_of_lease
from shared.kubernetes.kinds.gpu_prices import Prices
from shared.model.devices.device import Hardware
from shared.model.leases.lease import Lease
from shared.model.names import DeviceUuid, NodeName
from shared.model.views.leases import LeaseView
from tests.support import build
from tests.support.api.board import node_totals, projected, seen, usage

HOUR_S = 3600.0
NOW = 10 * HOUR_S
EUROS = Prices(currency="EUR", models={"*": Decimal(2)})
FREE = Prices(currency="", models={})


def lease_on(*gpus: int, cores: int = 50) -> Lease:
    shares = [
        build.share(f"GPU-n1-{gpu}", gpu, slot=0, memory_mib=100, cores_percent=cores)
        for gpu in gpus
    ]
    return build.lease("p1", "n1", *shares, created_at=NOW - 4 * HOUR_S)


def view_of(board: Projection, lease: Lease) -> LeaseView:
    return seen(board, now=NOW).lease(lease)


def test_a_lease_costs_its_part_of_each_gpu_since_it_exists() -> None:
    lease = lease_on(0, 1)
    board = projected(node_totals(lease))

    cost = cost_of_lease(view_of(board, lease), board.devices, {}, EUROS, NOW)

    assert (cost.gpu_hours, cost.per_hour, cost.so_far) == (4.0, 2.0, 8.0)
    assert (cost.currency, cost.idle_gpu_hours, cost.power_w) == ("EUR", 0.0, None)


def test_without_a_price_there_is_gpu_time_and_no_cost() -> None:
    lease = lease_on(0)
    board = projected(node_totals(lease))

    cost = cost_of_lease(view_of(board, lease), board.devices, {}, FREE, NOW)

    assert (cost.gpu_hours, cost.per_hour, cost.so_far) == (2.0, None, None)


def test_what_is_idle_is_wasted_since_the_last_use() -> None:
    lease = lease_on(0)
    board = projected(node_totals(lease))
    idle = build.measurement(lease, memory_mib=0, cores_percent=0, idle_since=NOW - HOUR_S)
    board.update_measured(NodeName("n1"), usage(idle), now=NOW, idle_after_s=600)

    cost = cost_of_lease(view_of(board, lease), board.devices, {}, EUROS, NOW)

    assert (cost.gpu_hours, cost.idle_gpu_hours) == (2.0, 0.5)
    unused = build.measurement(lease, memory_mib=0, cores_percent=0, idle_since=NOW - 360)
    board.update_measured(NodeName("n1"), usage(unused), now=NOW, idle_after_s=600)
    cost = cost_of_lease(view_of(board, lease), board.devices, {}, EUROS, NOW)
    assert cost.idle_gpu_hours == 0.05, "before it is marked as idle, as in the costs of namespaces"


def test_a_gpu_that_is_not_used_is_wasted_beside_one_that_is() -> None:
    lease = lease_on(0, 1)
    board = projected(node_totals(lease))
    parts = [structs.replace(lease, shares=(share,)) for share in lease.shares]
    uses = (None, NOW - HOUR_S)
    measured = [
        build.measurement(part, memory_mib=0, cores_percent=0, idle_since=since)
        for part, since in zip(parts, uses, strict=True)
    ]
    board.update_measured(NodeName("n1"), usage(*measured), now=NOW, idle_after_s=600)

    cost = cost_of_lease(view_of(board, lease), board.devices, {}, EUROS, NOW)

    assert (cost.gpu_hours, cost.idle_gpu_hours) == (4.0, 0.5)


@pytest.mark.parametrize(("others", "watts"), [((), 200.0), ((75,), 80.0)])
def test_power_is_shared_by_what_is_leased(others: tuple[int, ...], watts: float) -> None:
    lease = lease_on(0)
    neighbours = [structs.replace(lease_on(0, cores=cores), pod="p2") for cores in others]
    board = projected(node_totals(lease, *neighbours))
    uuid = DeviceUuid("GPU-n1-0")
    hardware = {uuid: Hardware(device=uuid, at=NOW, power_w=200.0)}

    cost = cost_of_lease(view_of(board, lease), board.devices, hardware, EUROS, NOW)

    assert cost.power_w == watts


def test_a_finished_pod_has_cost_what_it_held_until_its_end() -> None:
    lease = lease_on(0)
    board = projected(node_totals(lease))
    finished = finished_pod(lease, NOW - HOUR_S, "Succeeded")

    cost = cost_of_finished(finished, board.devices, EUROS)
    gone = cost_of_finished(finished, {}, EUROS)

    assert (cost.gpu_hours, cost.so_far, cost.power_w) == (1.5, 3.0, None)
    assert (gone.gpu_hours, gone.so_far) == (1.5, None)
