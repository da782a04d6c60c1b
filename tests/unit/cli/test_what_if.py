"""Forecasts: what fits on the nodes of now, what would have to end, what could be added."""

from services.cli.plan.what_if import Forecast, TriedPod, forecast
from services.cli.request.manifests import pods_in
from shared.model.lease import Lease
from shared.model.ledger import NodeTotals, counted_use
from shared.model.request import PodRequest
from tests.support.build import V100_MIB, device, gpu, lease, ledger_node, request, share

NOW = 1_000.0


def totals(name: str, gpus: int, *leases: Lease) -> NodeTotals:
    """Return a node GPU-<name>-0, GPU-<name>-1, ... with leases."""
    counted, _ = counted_use(leases)
    held = [device(f"GPU-{name}-{index}", index) for index in range(gpus)]
    pairs = [(each, counted[each.uuid]) if each.uuid in counted else each for each in held]
    return NodeTotals(node=ledger_node(name, *pairs), leases=leases)


def held(pod: str, name: str, index: int, mib: int, created_at: float = 0.0) -> Lease:
    part = share(f"GPU-{name}-{index}", index, memory_mib=mib, slot=0, fence=1)
    return lease(pod, name, part, created_at=created_at)


def tried(wanted: PodRequest, count: int = 1) -> list[TriedPod]:
    return [TriedPod(origin="Pod p", name="default/p", request=wanted)] * count


def places(found: Forecast) -> list[str]:
    return [each.node for each in found.pods]


def test_each_pod_counts_for_those_after_it() -> None:
    nodes = [totals("n1", 1), totals("n2", 1)]

    found = forecast(tried(request(gpu(memory=20_000)), 3), nodes, now=NOW)

    assert sorted(places(found)) == ["", "n1", "n2"]
    assert len(found.waiting) == 1
    assert "2 Insufficient GPU memory" in found.waiting[0].refusal


def test_the_fewest_leases_are_named_and_of_equal_ones_those_that_used_least() -> None:
    nodes = [
        totals("n1", 1, held("a", "n1", 0, 10_000), held("b", "n1", 0, 10_000)),
        totals("n2", 2, held("old", "n2", 0, 20_000), held("new", "n2", 1, 20_000, 900.0)),
    ]

    found = forecast(tried(request(gpu(memory=30_000))), nodes, now=NOW)

    [waiting] = found.waiting
    assert waiting.room is not None
    assert waiting.room.leases == ("default/new",)


def test_nodes_to_add_are_of_the_kinds_of_the_cluster_and_as_few_as_possible() -> None:
    nodes = [totals("small", 1, held("a", "small", 0, V100_MIB)), totals("cpu", 0)]

    found = forecast(tried(request(gpu(memory=V100_MIB // 2)), 5), nodes, now=NOW)

    [added] = found.add_nodes
    assert (added.like, added.count, added.pods) == ("small", 3, 5)


def test_a_pod_that_fits_on_no_kind_of_node_needs_another_kind() -> None:
    found = forecast(tried(request(gpu(gpus=2, memory=1))), [totals("n1", 1)], now=NOW)

    assert len(found.waiting) == 1
    assert not found.add_nodes
    assert found.waiting[0].room is None


def test_replicas_and_parallelism_say_how_many_pods_there_are() -> None:
    template = "template: {spec: {containers: []}}"
    text = "\n---\n".join(
        [
            f"{{kind: Deployment, metadata: {{name: a}}, spec: {{replicas: 3, {template}}}}}",
            f"{{kind: Job, metadata: {{name: b}}, spec: {{parallelism: 2, {template}}}}}",
            f"{{kind: CronJob, metadata: {{name: c}}, "
            f"spec: {{jobTemplate: {{spec: {{parallelism: 4, {template}}}}}}}}}",
            "{kind: Pod, metadata: {name: d}, spec: {containers: []}}",
        ]
    )

    assert [each.replicas for each in pods_in(text, "f")] == [3, 2, 4, 1]
