"""Health states of devices, by example and by property; which XIDs are critical."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.node_agent.gpus.device_faults import (
    APPLICATION_XIDS,
    LISTED_AGAIN,
    NOT_LISTED,
    XID_GUIDES,
    Fault,
    Xid,
    XidRules,
    missing_fault,
    no_response,
)
from services.node_agent.gpus.device_health import (
    DeviceHealth,
    HealthPolicy,
    HealthState,
    update_health,
)
from services.node_agent.gpus.health_monitor import HealthMonitor
from services.node_agent.gpus.inventory import Gpu
from services.node_agent.mig.instances import MigState
from shared.model.devices.device import Hardware, UnreadDevice, XidEvent
from shared.model.events.request_reply import UsageReply
from shared.model.names import DeviceUuid
from shared.nats import wire
from tests.support.node_agent.node import node_of

POLICY = HealthPolicy(
    first_backoff_s=30,
    max_backoff_s=240,
    reset_after_s=3600,
    failure_threshold=2,
    success_threshold=3,
)
A, B = DeviceUuid("GPU-a"), DeviceUuid("GPU-b")
MILD = no_response("NVML: Unknown Error")
GRAVE = Xid(A, 79).fault


def gpu(uuid: DeviceUuid = A, **changes: Any) -> Gpu:
    facts: dict[str, Any] = {"uuid": uuid, "index": 0, "model": "Tesla T4", "memory_mib": 15360}
    return Gpu(**(facts | changes))


def after(*probes: tuple[float, Fault | None]) -> DeviceHealth:
    record = DeviceHealth()
    for at, fault in probes:
        record = POLICY.next_record(record, fault, at)
    return record


@pytest.mark.parametrize(
    ("probes", "state"),
    [
        ([(0, None)], HealthState.HEALTHY),
        ([(0, MILD)], HealthState.SUSPECT),
        ([(0, MILD), (5, None)], HealthState.HEALTHY),
        ([(0, MILD), (5, MILD)], HealthState.CORDONED),
        ([(0, MILD), (5, GRAVE)], HealthState.CORDONED),
        ([(0, GRAVE)], HealthState.CORDONED),
        ([(0, GRAVE), (29, None)], HealthState.CORDONED),
        ([(0, GRAVE), (30, None)], HealthState.PROBING),
        ([(0, GRAVE), (30, None), (35, None), (40, None)], HealthState.PROBING),
        ([(0, GRAVE), (30, None), (35, MILD)], HealthState.CORDONED),
    ],
)
def test_a_probe_changes_the_health_state_as_the_table_says(
    probes: Sequence[tuple[float, Fault | None]], state: HealthState
) -> None:
    assert after(*probes).state is state


def test_koordinator_32_a_device_recovers_after_consecutive_clean_probes() -> None:
    healed = after((0, GRAVE), (30, None), (35, None), (40, None), (45, None))

    assert (healed.state, healed.fault, healed.message) == (HealthState.HEALTHY, None, "")


def test_each_cordon_lasts_twice_as_long_up_to_a_limit_until_the_device_was_steady() -> None:
    assert [POLICY.backoff_s(n) for n in (1, 2, 3, 4, 5, 99)] == [30, 60, 120, 240, 240, 240]
    again = after((0, GRAVE), (30, MILD))
    assert (again.state, again.probe_at) == (HealthState.CORDONED, 90)
    healed = after((0, GRAVE), *((30 + 5 * n, None) for n in range(4)))
    assert POLICY.next_record(healed, GRAVE, 100).probe_at == 160
    assert POLICY.next_record(healed, GRAVE, 4000).probe_at == 4030


def test_the_first_cause_is_kept_until_the_device_is_healthy() -> None:
    record = after((0, GRAVE), (5, MILD), (30, None))

    assert record.message.startswith("probing: XidError: Xid 79, the GPU has fallen off the bus: ")


TRANSITIONS: Mapping[HealthState, frozenset[HealthState]] = {
    HealthState.HEALTHY: frozenset({HealthState.SUSPECT, HealthState.CORDONED}),
    HealthState.SUSPECT: frozenset({HealthState.HEALTHY, HealthState.CORDONED}),
    HealthState.CORDONED: frozenset({HealthState.PROBING}),
    HealthState.PROBING: frozenset({HealthState.HEALTHY, HealthState.CORDONED}),
}
FAULTS = st.sampled_from([None, None, MILD, GRAVE])


@given(st.lists(st.tuples(st.floats(0.1, 5000), FAULTS), max_size=60))
def test_every_transition_is_in_the_table_and_only_healthy_devices_have_no_fault(
    probes: list[tuple[float, Fault | None]],
) -> None:
    record = DeviceHealth()
    now = 0.0
    for pause, fault in probes:
        now += pause
        before, record = record, POLICY.next_record(record, fault, now)
        assert record.state is before.state or record.state in TRANSITIONS[before.state]
        assert (record.fault is None) is (record.state is HealthState.HEALTHY)
        assert fault is None or record.state in {HealthState.SUSPECT, HealthState.CORDONED}


@given(st.lists(st.tuples(st.floats(0.1, 5000), FAULTS), max_size=60))
def test_a_device_without_faults_becomes_healthy_whatever_happened_before(
    probes: list[tuple[float, Fault | None]],
) -> None:
    record = DeviceHealth()
    now = 0.0
    for pause, fault in probes:
        now += pause
        record = POLICY.next_record(record, fault, now)

    for number in range(1 + POLICY.success_threshold):
        record = POLICY.next_record(record, None, now + POLICY.max_backoff_s + number)

    assert record.state is HealthState.HEALTHY


def probe(
    health: dict[DeviceUuid, DeviceHealth],
    *gpus: Gpu,
    now: float = 0.0,
    xids: Sequence[Xid] = (),
    missing_fault: Fault = NOT_LISTED,
) -> dict[DeviceUuid, DeviceHealth]:
    return update_health(
        health,
        gpus,
        xids,
        rules=XidRules(),
        policy=POLICY,
        now=now,
        missing_fault=lambda _: missing_fault,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_mib": 12288}, "MemoryChanged: its memory was 15360 MiB and is now 12288 MiB"),
        (
            {"mig": MigState(enabled=True, pending=True)},
            "ModeChanged: its mode was hami-core and is now",
        ),
        ({"ecc_errors": 5}, "EccErrors: 2 new uncorrected memory errors"),
    ],
)
def test_a_changed_device_is_cordoned_and_then_accepted(
    changes: dict[str, Any], message: str
) -> None:
    health = probe(probe({}, gpu(ecc_errors=3)), gpu(**changes))
    assert health[A].message.startswith(f"cordoned: {message}")

    for now in (30, 35, 40, 45):
        health = probe(health, gpu(**changes), now=now)

    assert health[A].state is HealthState.HEALTHY


def test_a_device_of_which_the_driver_keeps_more_is_healthy() -> None:
    health = probe(probe({}, gpu()), gpu(reserved_mib=448))

    assert health[A].state is HealthState.HEALTHY
    assert health[A].memory_mib == gpu().memory_mib - 448


def test_a_missing_ecc_count_is_not_a_fault() -> None:
    health = probe({}, gpu(ecc_errors=3))

    for ecc_errors in (None, 3):
        health = probe(health, gpu(ecc_errors=ecc_errors))
        assert health[A].message == ""
    health = probe(probe(health, gpu()), gpu(ecc_errors=4))

    assert "EccErrors: 1 new uncorrected" in health[A].message


def test_a_device_that_returns_is_recognised_by_its_uuid() -> None:
    health = probe({}, gpu(A), gpu(B, index=1))
    health = probe(probe(health, gpu(B, index=0)), gpu(B, index=0))
    assert health[A].fault == NOT_LISTED
    assert health[A].state is HealthState.CORDONED
    assert health[B].state is HealthState.HEALTHY

    health = probe(health, gpu(A, index=1), gpu(B, index=0), now=10)
    assert health[A].fault == LISTED_AGAIN
    for now in (30, 35, 40, 45):
        health = probe(health, gpu(A, index=1), gpu(B, index=0), now=now)

    assert {device.state for device in health.values()} == {HealthState.HEALTHY}


def test_a_cordoned_device_is_not_listed_only_while_that_is_certain() -> None:
    silent = missing_fault(A, {0: "NVML: Unknown Error"})
    health = probe({}, gpu())
    codes = []
    for now, (gpus, fault) in enumerate(
        [
            ((), silent),
            ((), silent),
            ((), missing_fault(A, {})),
            ((gpu(),), NOT_LISTED),
            ((), NOT_LISTED),
            ((gpu(fault=MILD),), NOT_LISTED),
        ]
    ):
        health = probe(health, *gpus, now=now, missing_fault=fault)
        codes.append(health[A].message.split(": ")[1])

    assert codes == [
        *("NoResponse", "NoResponse", "NotListed"),
        *("ListedAgain", "NotListed", "NoResponse"),
    ]


@pytest.mark.parametrize(
    ("unread", "fault"),
    [
        ((), NOT_LISTED),
        ((UnreadDevice(uuid=B, reason="another one"),), NOT_LISTED),
        ((UnreadDevice(uuid=A, reason="it hangs"),), no_response("it hangs")),
        ((UnreadDevice(reason="some GPU"),), no_response("some GPU")),
        (
            (UnreadDevice(reason="some GPU"), UnreadDevice(uuid=A, reason="it hangs")),
            no_response("it hangs"),
        ),
    ],
)
def test_a_missing_device_that_the_kernel_driver_may_list_does_not_respond(
    unread: tuple[UnreadDevice, ...], fault: Fault
) -> None:
    assert missing_fault(A, {}, unread) == fault


def test_while_the_driver_does_not_respond_all_devices_are_cordoned_and_none_is_dropped() -> None:
    health = probe({}, gpu(A), gpu(B))
    for now in (5, 10):
        health = probe(health, missing_fault=MILD, now=now)

    assert [device.state for device in health.values()] == [HealthState.CORDONED] * 2


def test_a_critical_xid_cordons_its_own_device_only() -> None:
    known = probe({}, gpu(A), gpu(B))

    one = probe(known, gpu(A), gpu(B), xids=[Xid(B, 31), Xid(B, 48)])

    assert [one[A].state, one[B].state] == [HealthState.HEALTHY, HealthState.CORDONED]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (13, "restart the program; the GPU works on, and needs no reset"),
        (31, "restart the program; the GPU works on, and needs no reset"),
        (48, "drain the GPU and reset it; have it replaced (RMA) if that happens again"),
        (74, "drain the GPU and reset it; check the connectors, and have it replaced"),
        (79, "drain the node and restart it, with its power off; have it replaced (RMA)"),
        (94, "restart the pods whose programs have failed, and reset the GPU at the next"),
        (95, "drain the GPU and reset it before it gets new pods"),
        (999, "https://docs.nvidia.com/deploy/xid-errors/"),
    ],
)
def test_an_xid_says_what_nvidia_advises_to_do(number: int, remedy: str) -> None:
    fault = Xid(A, number).fault

    assert fault.text.startswith(f"Xid {number}, ")
    assert f": {remedy}" in fault.text


@pytest.mark.parametrize("number", [*XID_GUIDES, 999])
def test_the_usage_of_a_node_with_an_xid_is_accepted(number: int) -> None:
    event = XidEvent(number=number, at=1.0, meaning=Xid(A, number).meaning)
    reply = UsageReply(measured_at=1.0, hardware=(Hardware(device=A, at=1.0, xids=(event,)),))

    assert wire.decode(wire.encode([reply]), UsageReply) == [reply]


def test_application_xids_cordon_no_device() -> None:
    storm = [Xid(A, number) for number in (13, 31, 43, 45, 68, 109)] * 500

    assert probe(probe({}, gpu()), gpu(), xids=storm)[A].state is HealthState.HEALTHY


@pytest.mark.parametrize(
    ("disable", "enable", "condemned", "spared"),
    [
        ("", "", {48, 79}, APPLICATION_XIDS),
        ("all", "", set(), {48, 79} | APPLICATION_XIDS),
        ("xids", "", set(), {48, 79}),
        (" 79 , 48,x", "", {74}, {48, 79} | APPLICATION_XIDS),
        ("", "31", {31, 79}, {13}),
        ("", "all", {79} | APPLICATION_XIDS, set()),
        ("all", "48,13", {48, 13}, {79, 31}),
        ("79", "all", {79, 13}, set()),
    ],
)
def test_critical_xids_follow_the_variables_of_nvidias_plugin(
    disable: str, enable: str, condemned: set[int], spared: set[int]
) -> None:
    rules = XidRules.from_environment(
        {"DP_DISABLE_HEALTHCHECKS": disable, "DP_ENABLE_HEALTHCHECKS": enable}
    )

    assert all(rules.is_critical(xid) for xid in condemned)
    assert not any(rules.is_critical(xid) for xid in spared)
    assert rules.invalid_words == (("x",) if "x" in disable.split(",") else ())


def test_a_removed_device_has_no_series_and_words_that_are_no_xids_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def shown() -> list[float]:
        labels = ({"device_uuid": "GPU-m", "index": "7", "state": state} for state in HealthState)
        values = (REGISTRY.get_sample_value("leasehold_device_health", each) for each in labels)
        return [value for value in values if value is not None]

    node = node_of()
    monitor = HealthMonitor(
        node.name,
        xids=tuple,
        environ={"DP_DISABLE_HEALTHCHECKS": "79,x"},
        policy=POLICY,
        leases=node.leases,
        checkpoint=node.checkpoint,
        clock=node.clock,
    )
    monitor.update([gpu(DeviceUuid("GPU-m"), index=7)])
    before = shown()
    monitor.forget([DeviceUuid("GPU-m"), DeviceUuid("never shown")])

    assert sorted(before) == [0, 0, 0, 1]
    assert shown() == []
    assert "list XIDs by number, not x" in caplog.text


def test_a_removed_device_leaves_no_xids() -> None:
    node = node_of()
    events = [Xid(A, 31), Xid(B, 31)]
    monitor = HealthMonitor(
        node.name,
        xids=lambda: tuple(events),
        environ={},
        policy=POLICY,
        leases=node.leases,
        checkpoint=node.checkpoint,
        clock=node.clock,
    )
    monitor.update([gpu(A), gpu(B)])

    monitor.forget([A])

    assert monitor.latest_xids.keys() == {B}
