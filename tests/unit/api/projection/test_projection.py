"""Devices, leases, their measured usage, and waiting pods, as read last; a pod to try."""

from dataclasses import replace

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from services.api.aggregated.objects import KINDS
from services.api.http.first_pod import EXAMPLES, first_pod
from services.api.projection.problems import HIDDEN
from services.api.projection.projection import EVENTS, NAMESPACES, PROBLEMS, WAITING, Projection
from services.api.reports import legacy_metrics
from services.api.reports.legacy_metrics import metric_families
from services.webhook.admission import decide
from services.webhook.pod_admission import AdmissionPolicy, PodAdmission
from shared.model.devices.device import Hardware, XidEvent
from shared.model.devices.node import CORDON_PREFIX
from shared.model.events.pod_events import PodBound
from shared.model.leases.lease import Lease, LeaseState, MigPlacement, ShareMeasurement
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.views.pods import TraceView
from tests.support import build, snapshots
from tests.support.api.board import (
    budget,
    devices_of,
    lease,
    node_totals,
    projected,
    seen,
    usage,
    waiting,
)
from tests.support.webhook.reviews import reviewed


@pytest.mark.parametrize("resource", EXAMPLES)
def test_the_pod_to_try_is_admitted_and_requests_a_gpu(resource: str) -> None:
    manifest = first_pod(["other", resource])
    assert manifest is not None
    pod = reviewed(yaml.safe_load(manifest), "default")

    decision = decide(PodAdmission(pod=pod, policy=AdmissionPolicy()))

    assert decision.allowed, decision.message
    assert decision.requests_gpu
    assert resource in manifest


def test_there_is_none_if_no_node_serves_a_resource() -> None:
    assert first_pod([]) is None


def test_a_device_contains_its_leases_with_their_fields() -> None:
    place = MigPlacement(layout="g1", position=2, profile="1g.10gb")
    instance = build.lease("p", "n1", build.share("GPU-n1-1", slot=2, mig=place))
    held = lease(namespace="team", name="train", created_at=7.0)
    board = projected(node_totals(held, instance))

    device = board.devices[DeviceUuid("GPU-n1-0")]

    (share,) = device.shares
    assert [each.mig for each in board.devices[DeviceUuid("GPU-n1-1")].shares] == [place]
    assert device.used_memory_mib == share.memory_mib == 1000
    assert (share.namespace, share.name, share.container) == ("team", "train", "main")
    assert (share.state, share.created_at, share.slot) == ("bound", 7.0, 0)


def test_a_duplicate_changes_nothing() -> None:
    board = Projection()
    same = node_totals(lease())

    first = board.update_nodes([], [same])

    assert {("node", "n1"), ("device", "GPU-n1-0"), NAMESPACES} <= first
    assert board.update_nodes(["n1"], [same]) == frozenset()  # type: ignore[list-item]


def test_only_changes_are_returned() -> None:
    board = projected(node_totals(lease()))

    changed = board.update_nodes([], [node_totals(lease(state=LeaseState.ACTIVE))])

    assert changed == {("device", "GPU-n1-0"), NAMESPACES}


def test_a_requested_node_that_is_not_found_is_removed_with_its_devices() -> None:
    board = projected(node_totals(lease()))
    before = board.namespaces()

    changed = board.update_nodes([NodeName("n1")], [])

    assert [one.namespace for one in before] == [lease().namespace]
    assert changed == {("node", "n1"), ("device", "GPU-n1-0"), ("device", "GPU-n1-1"), NAMESPACES}
    assert (board.nodes, board.devices, board.namespaces()) == ({}, {}, [])


LEASES = st.lists(
    st.builds(
        lambda pod, gpu, namespace, state: lease(f"p{pod}", gpu, namespace=namespace, state=state),
        st.integers(0, 5),
        st.integers(0, 1),
        st.sampled_from(["a", "b"]),
        st.sampled_from([LeaseState.RESERVED, LeaseState.BOUND, LeaseState.ACTIVE]),
    ),
    max_size=4,
    unique_by=lambda one: one.pod,
)


@given(st.lists(LEASES, min_size=1, max_size=5))
def test_the_projection_is_the_latest_read_after_any_history(history: list[list[Lease]]) -> None:
    board = Projection()
    for leases in history:
        board.update_nodes([], [node_totals(*leases)])

        fresh = projected(node_totals(*leases))
        assert board.devices == fresh.devices
        assert board.namespaces() == fresh.namespaces()
        assert devices_of(seen(board)) == list(fresh.devices.values())


def test_a_device_is_encoded_once_for_all_viewers_until_it_changes() -> None:
    board = projected(node_totals(lease(namespace="a"), lease("p2", 1, namespace="b")))
    first, *_ = seen(board).state("x").devices
    again, *_ = seen(board).state("x").devices
    of_b, other = devices_of(seen(board, {"b"}.__contains__))
    board.update_nodes([], [node_totals(lease(name="renamed"))])
    changed, *_ = devices_of(seen(board))

    assert again is first
    assert [of_b.shares[0].name, other.shares[0].namespace] == ["", "b"]
    assert changed.shares[0].name == "renamed"


def test_whether_a_share_is_idle_is_a_matter_of_the_viewer_and_of_time() -> None:
    board, _ = board_of(IDLE, now=1_500.0)
    unused = [
        devices_of(seen(board, now=now, idle_after_s=after))[0].idle_milli_gpu
        for now, after in ((1_500.0, 600.0), (1_500.0, 400.0), (1_700.0, 600.0))
    ]

    assert unused[0] == 0
    assert unused[1] == unused[2] > 0


def test_the_queue_is_by_priority_then_by_age_and_positions_count_all_pods() -> None:
    board = Projection()
    board.update_waiting([waiting("late", since=9), waiting("early", since=1, namespace="b")])
    board.update_waiting([waiting("first", priority=5, since=20)], requested=[PodUid("first")])

    queue = seen(board, lambda namespace: namespace == "a").queue()

    assert [(pod.name, pod.position) for pod in queue.pods] == [("first", 1), ("late", 3)]
    assert (queue.total, queue.hidden) == (3, 1)


def test_a_requested_pod_that_does_not_wait_leaves_the_queue() -> None:
    board = Projection()
    board.update_waiting([waiting("p1"), waiting("p2")])

    changed = board.update_waiting([], requested=[PodUid("p1")])

    assert changed == {WAITING, NAMESPACES}
    assert list(board.waiting) == ["p2"]
    assert board.update_waiting([], requested=[PodUid("p1")]) == frozenset()


def test_only_the_use_of_other_namespaces_is_shown() -> None:
    secret = lease("uid-secret", namespace="secret", name="hidden-name", dialect="d", gang="g")
    board = projected(node_totals(secret, lease("mine", 1, namespace="mine")))
    board.update_waiting([waiting("waits", namespace="secret")])
    board.add_events([PodBound(lease=secret)], 1.0)
    board.update_budgets([budget("secret")])

    cluster = seen(board, {"mine"}.__contains__, now=2.0)
    state = cluster.state("x")

    sent = msgspec.json.encode(state).decode()
    assert "secret" not in sent
    assert "hidden-name" not in sent
    assert "waits" not in str(state.waiting.pods)
    first, _ = devices_of(cluster)
    (share,) = first.shares
    hidden = {"pod", "namespace", "name", "container", "dialect", "gang", "created_at", "fence"}
    assert not any(getattr(share, name) for name in hidden)
    assert (share.state, share.memory_mib, share.slot) == ("bound", 1000, 0)
    assert [one.namespace for one in state.namespaces] == ["mine"]


NODE = NodeName("n1")
GPU = DeviceUuid("GPU-n1-0")
HELD = lease(namespace="team", name="train")
USED = build.measurement(HELD, memory_mib=600, cores_percent=20, processes=1)
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


def test_a_share_has_its_measured_usage_and_is_marked_once_it_is_idle() -> None:
    used, changed = board_of(USED)
    young, _ = board_of(IDLE, now=1_500.0)
    idle, _ = board_of(IDLE)

    assert changed == {("device", GPU)}
    measured = measured_of(used)
    assert isinstance(measured, dict)
    assert {key: measured[key] for key in ("memory_mib", "cores_percent", "processes")} == {
        "memory_mib": 600, "cores_percent": 20, "processes": 1
    }  # fmt: skip
    assert (measured["idle"], measured["idle_since"]) == (False, None)
    assert measured_of(idle) == measured_of(young)
    assert seen(young, now=1_500.0).lease(HELD).idle_since is None
    assert seen(idle).lease(HELD).idle_since == 1_000.0


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


@pytest.mark.parametrize("viewed", ["other", "team"])
def test_a_pod_that_closes_a_node_is_named_to_viewers_of_its_namespace_only(viewed: str) -> None:
    reason = "pod other/late is bound to the node, and the kubelet has not requested its devices"
    base = snapshots.NODE
    facts = replace(base.node.facts, labels={"zone": "a"})
    served = (CORDON_PREFIX + reason,)
    node = replace(base, node=replace(base.node, facts=facts, served=served))
    board = projected(node)
    board.add_problems({("node-0", reason)}, now=1.0)
    cluster = seen(board, viewed.__eq__)
    trace = TraceView(trace="", url="", spans=())

    views = (
        cluster.state("0-0"),
        cluster.delta({("node", "node-0"), PROBLEMS, EVENTS}, after_event=0),
        cluster.gpus(),
        replace(cluster, visible=lambda name: name != "other").pod(snapshots.LEASE.pod, trace),
    )

    (device,) = KINDS[0].read(cluster)
    assert device.status.message == HIDDEN  # any reader of nodes may see it
    shown = [msgspec.json.encode(view).decode() for view in views]
    is_named = viewed == "other"
    assert [reason in text for text in shown] == [is_named] * 3 + [False]
    assert [HIDDEN in text for text in shown] == [not is_named] * 3 + [True]
