"""Each invariant finds mutations of a right state: at once, or after its bound."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from services.node_agent.isolation.region_image import RegionSeed, image_of
from shared.ledger.rows.lease_rows import encode_lease
from shared.model.leases.lease import Lease, LeaseState, MigPlacement, Share
from shared.model.leases.lease_copy import dump_lease
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from tests.campaign.readers import REGION_HEAD, region_limits
from tests.campaign.schedule import FAULTS, rounds_of
from tests.campaign.workload import DEVICE_MIB, HARDWARE
from tests.proof.judge import INVARIANTS, Judge, checks_of
from tests.proof.ledger import checkpoint_grants, copied, decode
from tests.proof.observations import (
    AgentGrant,
    Grant,
    HardwareInstance,
    RawCharge,
    RawClaim,
    RawDevice,
    RawLease,
    RawLedger,
    RawShare,
    RegionLimits,
    Resources,
    Sample,
    SeenNode,
    SeenPod,
    Want,
)

AT = 1000.0
NODE = "node-0"
OTHER = "node-1"
HALF = DEVICE_MIB // 2 + 1
SHARE = RawShare(container="main", device="gpu-0", mib=1000, cores=10, slot=0, fence=1)
LEASE = RawLease(
    pod="a",
    node=NODE,
    state="active",
    version=1,
    created_at=AT,
    expires_at=0,
    activated_at=AT,
    shares=(SHARE,),
)
GRANT = Grant(pod="a", node=NODE, device="gpu-0", mib=1000, cores=10)
AGENT = AgentGrant(
    pod="a",
    node=NODE,
    container="main",
    device="gpu-0",
    mib=1000,
    cores=10,
    slot=0,
    fence=5,
    activated_at=AT,
)
POD = SeenPod(
    uid="a",
    name="pod-a",
    created_at=AT,
    want=Want(1, 1000, 10),
    node=NODE,
    phase="Running",
    lease_node=NODE,
    devices=("gpu-0",),
    copied_mib=(1000,),
    runs=True,
)
UNBOUND: dict[str, Any] = {"lease_node": "", "devices": (), "copied_mib": ()}
WAITING = replace(
    POD,
    node="",
    phase="Pending",
    runs=False,
    reason="Unschedulable",
    message="0/1 nodes are available: 1 Insufficient GPU memory. Request less.",
    **UNBOUND,
)
CHARGE = RawCharge(
    lease="b/1", start_ms=0, end_ms=10, weight=10, units=100, kind="charge", window="w"
)
MIG = Want(1, 9000, mig=True)
INSTANCE = HardwareInstance(uuid="MIG-a", device="gpu-0", mib=9728)
MIG_STATE: dict[str, Any] = {
    "mig_devices": frozenset({"gpu-0"}),
    "instances": {"MIG-a": INSTANCE},
}


SHARE_FIELDS = ("slot", "device", "layout", "memory", "mode")


def of(uid: str, one: Any, mib: int = 1000, **changes: Any) -> Any:
    """The same of another pod, or of another size."""
    if isinstance(one, SeenPod):
        want = changes.pop("want", replace(one.want, mib=mib))
        copied_mib = (want.mib,) * len(one.devices)
        changes = {"name": f"pod-{uid}", "want": want, "copied_mib": copied_mib} | changes
        return replace(one, uid=uid, **changes)
    if isinstance(one, RawLease):
        share = {key: changes.pop(key) for key in SHARE_FIELDS if key in changes}
        return replace(one, pod=uid, shares=(replace(SHARE, mib=mib, **share),), **changes)
    return replace(one, pod=uid, mib=mib, **changes)


def ledger(*leases: RawLease, mig: bool = False, **changes: Any) -> dict[str, RawLedger]:
    """A ledger of two devices with these leases, and the right sums."""
    used = [share for one in leases for share in one.shares]
    devices = {
        uuid: RawDevice(
            uuid=uuid,
            node=NODE,
            healthy=True,
            used_mib=sum(share.mib for share in used if share.device == uuid),
            used_cores=sum(share.cores for share in used if share.device == uuid),
            shares=sum(share.device == uuid for share in used),
            fence=99,
            in_mig_mode=mig and uuid == "gpu-0",
        )
        for uuid in ("gpu-0", "gpu-1")
    }
    values: dict[str, Any] = {"ready": True, "generation": "g", "nodes": frozenset({NODE})}
    values |= {"leases": {one.pod: one for one in leases}, "devices": devices}
    return {"ledger": RawLedger(**values | changes)}


def sample(at: float = AT, pods: Iterable[SeenPod] = (), **changes: Any) -> Sample:
    """A sample of one node with these pods, and a ledger that has their leases."""
    bound = [one for one in pods if one.lease_node and not one.ended]
    leases = [of(one.uid, LEASE, one.want.mib, slot=n) for n, one in enumerate(bound)]
    values: dict[str, Any] = {"nodes": {NODE: SeenNode(name=NODE)}, "hardware": HARDWARE}
    values |= {"pods": {one.uid: one for one in pods}} | ledger(*leases)
    return Sample(at=at, **values | changes)


def judged(*samples: Sample, cannot_work: Mapping[str, float] | None = None) -> Judge:
    judge = Judge()
    judge.end_faults(AT)
    for one in samples:
        judge.observe(one, cannot_work=cannot_work or {})
        judge.judge_liveness(one.at)
    return judge


def found(*samples: Sample, **more: Any) -> set[str]:
    """Return the invariants that are violated."""
    return {violation.check for violation in judged(*samples, **more).violations}


def lasting(for_s: float, **state: Any) -> tuple[Sample, ...]:
    return tuple(sample(AT + n, **state) for n in range(int(for_s) + 1))


HALVES = {"pods": (of("a", POD, HALF), of("b", POD, HALF))}
EXCLUSIVE = replace(GRANT, exclusive=True, mib=5)
FORGED = replace(POD, forged=True, **UNBOUND)
CORDONED = {NODE: SeenNode(name=NODE, cordoned=True)}
CLAIMED = {key: replace(d, is_claimed=True) for key, d in ledger()["ledger"].devices.items()}
REFUSAL = "0/{} nodes are available: 1 Insufficient GPU memory. Set nvidia.com/gpumem: {}."
GANG: dict[str, Any] = {"gang": "g", "gang_min": 2}
OF_MIG = {
    "pods": (of("a", POD, want=MIG, copied_mib=(1000,)),),
    **ledger(of("a", LEASE, layout="group1"), mig=True),
    **MIG_STATE,
}
BY_DRIVER = ledger(of("a", LEASE, mode="driver", memory="driver"))
DEMANDING = of("b", WAITING, want=replace(WAITING.want, memory="driver"))
REFUSED: dict[str, Any] = {
    "phase": "Failed",
    "failure": "device gpu-0 would be over-committed: it has 10 MiB, and 20 would be given out; pod"
    " ns/a would have 10 MiB and 0 % of the cores, pod ns/old has 10 MiB and 0 % of the cores",
    "runs": False,
}
GIVEN = replace(GRANT, mib=9728, cores=0, instance="MIG-a")


def in_mode(mode: str) -> dict[str, RawLedger]:
    """Both devices have a lease in this mode."""
    held = (of(f"x{n}", LEASE, device=f"gpu-{n}", mode=mode) for n in range(2))
    return ledger(*held)


def refusal(**changes: Any) -> dict[str, Any]:
    return {"pods": (replace(WAITING, **changes),)}


def promised(after_s: float) -> tuple[SeenPod, ...]:
    """A waiting pod that is promised a start so long after the first sample."""
    at = datetime.fromtimestamp(AT + after_s, UTC).isoformat()
    return (replace(WAITING, message=f"{WAITING.message} starts by {at} at the latest: b ends"),)


def promised_later(**withdrawn: float) -> set[str]:
    later = lasting(20, pods=promised(200), withdrawn=withdrawn)
    return found(sample(AT - 1, pods=promised(100)), *later)


def let_in(**term: int) -> set[str]:
    """A pod gets a device that is claimed for another until 200 s later."""
    claim = RawClaim(pod="b", node=NODE, devices=frozenset({"gpu-0"}), until=AT + 200)
    of_start: dict[str, Any] = {"claims": {"b": claim}, "devices": CLAIMED}
    before, after = ledger(**of_start), ledger(replace(LEASE, term=term), **of_start)
    return found(sample(ledger=before["ledger"]), sample(AT + 1, ledger=after["ledger"]))


MUTATIONS: tuple[tuple[str, str, float, dict[str, Any]], ...] = (
    ("S1", "containers", 0, {"grants": (of("a", GRANT, HALF), of("b", GRANT, HALF))}),
    ("S1", "cores", 0, {"grants": tuple(of(uid, GRANT, cores=60) for uid in "ab")}),
    ("S1", "exclusive", 0, {"grants": (EXCLUSIVE, of("b", GRANT, 5))}),
    ("S1", "slots", 0, {"grants": tuple(of(uid, GRANT, 1, cores=1) for uid in "abcdefghijk")}),
    ("S1", "slices", 0, {"grants": tuple(of(u, GIVEN, slices=range(2)) for u in "ab")}),
    ("S1", "pods", 0, HALVES | {"ledger": None}),
    ("S1", "leases", 0, ledger(of("a", LEASE, HALF), of("b", LEASE, HALF, slot=1))),
    ("S1", "one instance", 0, OF_MIG | {"grants": (GIVEN, of("b", GIVEN, 9728))}),
    ("S1", "layouts", 0, ledger(LEASE, of("b", LEASE, slot=1, layout="group2"))),
    ("S2", "one slot", 0, ledger(LEASE, of("b", LEASE))),
    ("S2", "another node", 0, {"pods": (POD,), **ledger(replace(LEASE, node=OTHER))}),
    ("S2", "agents", 0, {"agents": (AGENT, replace(AGENT, node=OTHER, device="gpu-9"))}),
    ("S2", "containers", 0, {"grants": (GRANT, replace(GRANT, node=OTHER, device="gpu-9"))}),
    ("S3", "no lease", 0, {"pods": (replace(POD, **UNBOUND),), "grants": (GRANT,)}),
    ("S5", "a forged grant", 0, {"pods": (FORGED,), "grants": (GRANT,)}),
    ("P8", "one cause", 0, {"pods": tuple(replace(POD, uid=u, **REFUSED) for u in "ab")}),
    ("P9", "after all", 110 + 30 + 11, {"pods": (WAITING, replace(POD, uid="b", max_run_s=5))}),
    ("S11", "late", 40, {"pods": promised(-1)}),
    ("S6", "sum", 0, ledger(charges=(CHARGE,), used_units={"w": 101})),
    ("S6", "units", 0, ledger(charges=(replace(CHARGE, units=99),), used_units={"w": 99})),
    (
        "S6",
        "a gap",
        0,
        ledger(charges=(CHARGE, replace(CHARGE, start_ms=11, end_ms=21)), used_units={"w": 200}),
    ),
    (
        "S6",
        "weight",
        0,
        {
            "pods": (POD,),
            **ledger(LEASE, charges=(replace(CHARGE, lease="a/1000000"),), used_units={"w": 100}),
        },
    ),
    ("S7", "a higher limit", 0, {"pods": (POD,), "grants": (of("a", GRANT, 1001),)}),
    ("S7", "too few", 0, {"pods": (replace(POD, want=Want(2, 1000, 10)),), "grants": (GRANT,)}),
    (
        "S7",
        "another device",
        0,
        {"pods": (POD,), "grants": (GRANT,), **ledger(of("a", LEASE, device="gpu-1"))},
    ),
    (
        "S7",
        "a region allows more",
        0,
        {"pods": (POD,), "limits": {"a": RegionLimits(pod="a", mib=(1001,), cores=(10,))}},
    ),
    ("S7", "a small instance", 0, OF_MIG | {"grants": (replace(GIVEN, mib=8000),)}),
    ("S7", "no such instance", 0, OF_MIG | {"grants": (GIVEN,), "instances": {}}),
    ("S8", "no lease", 0, {"pods": (POD,), "grants": (GRANT,), **ledger()}),
    (
        "S9",
        "sum",
        0,
        {"agents": (of("a", AGENT, HALF), of("b", AGENT, HALF, slot=1, fence=2))},
    ),
    ("S9", "one slot", 0, {"agents": (AGENT, of("b", AGENT))}),
    ("S9", "exclusive", 0, {"agents": (replace(AGENT, exclusive=True), of("b", AGENT, slot=1))}),
    ("O3", "no reason", 0, refusal(reason="")),
    ("O3", "no numbers", 0, refusal(message="No room. Wait a bit.")),
    ("O3", "no advice", 0, refusal(message="0/1 nodes")),
    ("O3", "advice of nothing", 0, refusal(message=REFUSAL.format(1, 0))),
    ("O3", "advice of more", 0, refusal(message=REFUSAL.format(1, 4000))),
    ("O3", "other nodes", 15, refusal(message=REFUSAL.format(3, 10))),
    ("M4", "a denied request", 0, {"denied": {"binder": "PATCH /api/v1/nodes/n: Forbidden"}}),
    ("P7", "distrusted", 0, ledger(distrusted=frozenset({NODE}))),
    ("P1", "no verdict", 15, refusal(message="", reason="")),
    ("P1", "not started", 30, {"pods": (replace(POD, runs=False, phase="Pending"),)}),
    ("P2", "a lease without a pod", 30, ledger(LEASE)),
    (
        "P2",
        "a lease of a pod that ended",
        30,
        {"pods": (replace(POD, phase="Succeeded", runs=False),), **ledger(LEASE)},
    ),
    (
        "P2",
        "expired",
        5,
        {"pods": (WAITING,), **ledger(replace(LEASE, state="reserved", expires_at=AT - 1))},
    ),
    ("P2", "waits and is gone", 30, ledger(waiting=frozenset({"gone"}))),
    ("P2", "waits and is bound", 30, {"pods": (POD,), **ledger(LEASE, waiting=frozenset("a"))}),
    ("P2", "exists and is gone", 30, {"pods": (POD,), **ledger(LEASE, gone=frozenset("a"))}),
    ("P2", "claimed for no pod", 10, ledger(devices=CLAIMED)),
    ("P3", "unready", 10, {"unready": {"binder": "no Redis"}}),
    ("P3", "no Redis", 10, {"ledger": None}),
    ("P3", "distrusted", 20, ledger(distrusted=frozenset({NODE}))),
    ("P4", "it fits", 12, {"pods": (WAITING,)}),
    (
        "P4",
        "an instance fits",
        12,
        {"pods": (replace(WAITING, want=MIG),), **ledger(mig=True), **MIG_STATE},
    ),
    (
        "P5",
        "a part of a gang",
        10,
        {"pods": (replace(POD, **GANG), of("b", WAITING, **GANG))},
    ),
    ("P6", "no lease", 10, {"pods": (POD,), **ledger()}),
    ("P6", "closed", 10, ledger(ready=False)),
    ("P6", "a copy of another size", 10, {"pods": (replace(POD, copied_mib=(999,)),)}),
    ("P6", "a node is missing", 10, ledger(nodes=frozenset())),
    ("P6", "an old cordon", 10, ledger(cordoned=frozenset({NODE}))),
    (
        "P6",
        "a device elsewhere",
        10,
        {"homes": {"gpu-0": OTHER}, "nodes": {name: SeenNode(name=name) for name in (NODE, OTHER)}}
        | ledger(nodes=frozenset({NODE, OTHER})),
    ),
    (
        "S1",
        "two modes",
        0,
        ledger(of("a", LEASE, 500, mode="driver"), of("b", LEASE, 500, mode="hami-core", slot=1)),
    ),
    ("P6", "sums", 10, {"pods": (POD,), **ledger(LEASE, devices=ledger()["ledger"].devices)}),
    (
        "S7",
        "a region allows less",
        30,
        {"pods": (POD,), "limits": {"a": RegionLimits(pod="a", mib=(999,), cores=(10,))}},
    ),
    *(
        ("S7", f"the driver has {what}", 40, {"pods": (POD,), "driver_limits": held, **BY_DRIVER})
        for what, held in (("no limit", {}), ("another limit", {("a", "gpu-0"): 999}))
    ),
    ("P4", "the driver can hold it", 12, {"pods": (DEMANDING,), **in_mode("driver")}),
)


@pytest.mark.parametrize(
    ("invariant", "bound_s", "state"),
    [(invariant, bound_s, state) for invariant, _, bound_s, state in MUTATIONS],
    ids=[f"{invariant} {what}" for invariant, what, *_ in MUTATIONS],
)
def test_a_mutation_is_found_after_its_bound(
    invariant: str, bound_s: float, state: dict[str, Any]
) -> None:
    if bound_s:
        assert invariant not in found(*lasting(bound_s, **state))
    assert invariant in found(*lasting(bound_s + 2, **state))


def traces(*spans: tuple[str, str]) -> set[str]:
    judge = judged(sample(pods=(POD,)))
    judge.judge_traces(
        [{"trace": trace, "attributes": {"k8s.pod.uid": uid}} for uid, trace in spans], AT
    )
    return {each.check for each in judge.violations}


def resources(mib: int, keys: int) -> set[str]:
    judge = Judge()
    begin = Resources(memory_mib={"nats": 20}, keys=15)
    judge.judge_resources(begin, Resources(memory_mib={"nats": mib}, keys=keys), AT)
    return {each.check for each in judge.violations}


def audit(*differences: str, **state: Any) -> set[str]:
    judge = judged(*lasting(12, **state))
    reported = [{"invariant": each, "subject": "x", "text": "y"} for each in differences]
    judge.judge_audit({"differences": reported}, AT)
    return {each.check for each in judge.violations}


def evicted(*urgent: SeenPod, after_s: float = 3.0, announced: bool = True, **victim: Any) -> Any:
    """A pod is announced and evicted."""
    state: dict[str, Any] = ledger(LEASE)
    pods = (replace(POD, announced=announced, **victim), *urgent)
    return found(
        sample(pods=(POD, *urgent), **state),
        sample(AT + 0.2, pods=pods, **state),
        sample(AT + after_s + 0.1, pods=pods, evicted={"a": AT + after_s}, **state),
    )


def preemptible(**changes: Any) -> set[str]:
    """A pod needs a whole device, and pods of lower priority have all."""
    pods = (
        of("u", WAITING, DEVICE_MIB, priority=1000),
        replace(POD, **changes),
        of("b", POD, devices=("gpu-1",), **changes),
    )
    return found(*lasting(50, pods=pods, **ledger(LEASE, of("b", LEASE, device="gpu-1"))))


def waited(for_s: int, *claimed: str, since_s: int = 5, until_s: int = 1000) -> set[str]:
    """A pod needs a whole device, another one ends in time; ResourceClaims get some meanwhile."""
    pods = (of("w", WAITING, DEVICE_MIB), of("b", POD, max_run_s=5))
    claims = [of(uuid, POD, HALF, devices=(uuid,), of_claim=True) for uuid in claimed]
    leases = [of(uuid, LEASE, HALF, device=uuid) for uuid in claimed]
    with_claims: dict[str, Any] = {"pods": (*pods, *claims), **ledger(*leases)}
    without: dict[str, Any] = {"pods": pods}
    return found(
        *(
            sample(AT + second, **with_claims if since_s <= second < until_s else without)
            for second in range(for_s + 1)
        )
    )


LATE_S = 110 + 30 + 12
"""When it is noticed that the pod has not started."""
URGENT = of("u", WAITING, priority=1000)
STALE = replace(AGENT, pod="b", fence=4, activated_at=AT + 1)
STORIES: tuple[tuple[str, str, Callable[[], set[str]], Callable[[], set[str]]], ...] = (
    (
        "S4",
        "an older fence",
        lambda: found(sample(agents=(AGENT,)), sample(AT + 1, agents=(STALE,))),
        lambda: found(sample(agents=(AGENT,)), sample(AT + 1, agents=(replace(STALE, fence=6),))),
    ),
    (
        "P7",
        "ready without Redis",
        lambda: found(sample(AT + 11), cannot_work={"binder": AT}),
        lambda: found(sample(AT + 11, unready={"binder": "Redis"}), cannot_work={"binder": AT}),
    ),
    (
        "P7",
        "bound in spite of a cordon",
        lambda: found(sample(nodes=CORDONED), sample(AT + 12, nodes=CORDONED, pods=(POD,))),
        lambda: found(sample(nodes=CORDONED), sample(AT + 4, nodes=CORDONED, pods=(POD,))),
    ),
    ("S11", "later", promised_later, lambda: promised_later(a=AT)),
    ("S11", "let in", lambda: let_in(max_run_s=100), lambda: let_in(max_run_s=100, grace_s=5)),
    ("S11", "let in for good", let_in, lambda: let_in(max_run_s=90)),
    (
        "P9",
        "late beside a claim",
        lambda: waited(LATE_S + 1, "gpu-0"),
        lambda: waited(LATE_S + 1, "gpu-0", "gpu-1"),
    ),
    (
        "P9",
        "late after claims",
        lambda: waited(50 + LATE_S + 1, "gpu-0", "gpu-1", until_s=50),
        lambda: waited(50 + LATE_S - 1, "gpu-0", "gpu-1", until_s=50),
    ),
    (
        "P9",
        "late before claims",
        lambda: waited(LATE_S + 10, "gpu-0", "gpu-1", since_s=LATE_S + 3),
        lambda: waited(LATE_S + 10, "gpu-0", "gpu-1", since_s=LATE_S - 12),
    ),
    ("M1", "memory", lambda: resources(120, 15), lambda: resources(30, 15)),
    ("M1", "keys", lambda: resources(20, 90), lambda: resources(20, 16)),
    ("M2", "for no pod", evicted, lambda: evicted(URGENT)),
    ("M2", "protected", lambda: evicted(URGENT, spared=True), lambda: evicted(URGENT)),
    ("M2", "early", lambda: evicted(URGENT, after_s=1.0), lambda: evicted(URGENT)),
    ("M2", "unannounced", lambda: evicted(URGENT, announced=False), lambda: evicted(URGENT)),
    ("M3", "nothing is evicted", preemptible, lambda: preemptible(spared=True)),
    ("O1", "two traces", lambda: traces(("a", "1"), ("a", "2")), lambda: traces(("a", "1"))),
    ("O1", "no trace", traces, lambda: traces(("a", "1"))),
    ("O2", "silent", lambda: audit(pods=(POD,), **ledger()), lambda: audit(pods=(POD,))),
    ("O2", "loud", lambda: audit("S1", pods=(POD,)), lambda: audit(pods=(POD,))),
)


@pytest.mark.parametrize(
    ("invariant", "wrong", "right"),
    [(invariant, wrong, right) for invariant, _, wrong, right in STORIES],
    ids=[f"{invariant} {what}" for invariant, what, *_ in STORIES],
)
def test_a_mutation_of_a_story_is_found(
    invariant: str, wrong: Callable[[], set[str]], right: Callable[[], set[str]]
) -> None:
    assert invariant in wrong()
    assert invariant not in right()


def test_a_right_state_violates_nothing_and_every_invariant_finds_a_mutation() -> None:
    right = {
        "pods": (POD, of("b", POD)),
        "grants": (GRANT, of("b", GRANT)),
        "agents": (AGENT, of("b", AGENT, slot=1)),
    }
    mutated = {invariant for invariant, *_ in (*MUTATIONS, *STORIES)}

    assert not found(*lasting(60, **right))
    assert not found(sample(**OF_MIG, grants=(GIVEN,)))
    of_earlier: dict[str, Any] = {
        "charges": (replace(CHARGE, lease="a/1"),),
        "used_units": {"w": 100},
    }
    assert not found(sample(pods=(POD,), **dict[str, Any](ledger(LEASE, **of_earlier))))
    assert mutated == INVARIANTS.keys()
    assert all(checks_of(invariant) for invariant in INVARIANTS)


def test_a_pod_may_wait_for_what_does_not_fit() -> None:
    """P4 knows devices that are full, claimed, of another mode, or of a distrusted node."""
    full = [of(uid, POD, DEVICE_MIB, devices=(f"gpu-{n}",)) for n, uid in enumerate("bc")]
    mig = {"pods": (replace(WAITING, want=replace(MIG, mib=30_000)),), **MIG_STATE}

    assert "P4" not in found(*lasting(20, pods=(WAITING, *full)))
    assert "P4" not in found(*lasting(20, pods=(WAITING,), **ledger(devices=CLAIMED)))
    assert "P4" not in found(*lasting(20, pods=(WAITING,), **ledger(distrusted=frozenset({NODE}))))
    assert "P4" not in found(*lasting(20, pods=(DEMANDING,), **in_mode("hami-core")))
    taken = ledger(of("x", LEASE, layout="group1"), mig=True)
    assert "P4" not in found(*lasting(20, **mig, **taken))


STORED = Share(
    container="main",
    device=DeviceUuid("gpu-0"),
    index=0,
    device_mib=DEVICE_MIB,
    memory_mib=1000,
    cores_percent=20,
    slot=3,
    fence=11,
)


def test_what_the_product_writes_is_read() -> None:
    instance = msgspec.structs.replace(
        STORED,
        slot=2,
        mig=MigPlacement(layout="group1", position=2, profile="1g.10gb"),
        memory="mig",
        mode="mig",
    )
    lease = Lease(
        pod=PodUid("a"),
        namespace=Namespace("default"),
        name="pod-a",
        node=NodeName(NODE),
        shares=(STORED, instance),
        dialect="nvidia",
        state=LeaseState.RESERVED,
        version=7,
        created_at=5.0,
        expires_at=9.0,
    )
    raw: dict[str, Any] = {name: {} for name in ("ledger", "devices", "nodes", "waiting", "gone")}
    allocation = {"pod": "a", "container": "main", "lease": msgspec.to_builtins(lease)}
    entry = {"allocation": allocation | {"activated_at": 4.0}}
    head = bytes(image_of(RegionSeed(memory_bytes=(5 << 30,), cores_percent=(40,))))

    read = decode(raw | {"leases": {b"a": encode_lease(lease)}}).leases["a"]
    recorded = list(checkpoint_grants({"node": NODE, "entries": [entry, entry]}))

    assert (read.node, read.state, read.version, read.expires_at) == (NODE, "reserved", 7, 9.0)
    assert [(share.memory, share.mode) for share in read.shares] == [
        ("hami-core", "hami-core"),
        ("mig", "mig"),
    ]
    assert [(s.mib, s.cores, s.slot, s.fence) for s in read.shares] == [
        (1000, 20, 3, 11),
        (1000, 0, 2, 11),
    ]
    assert [(g.device, g.mib, g.slot, g.fence) for g in recorded] == [
        ("gpu-0", 1000, 3, 11),
        ("gpu-0", 1000, 2, 11),
    ]
    assert copied(dump_lease(lease))["copied_mib"] == (1000, 1000)
    assert region_limits("a", head[:REGION_HEAD]) == RegionLimits(
        pod="a", mib=(5 << 10,), cores=(40,)
    )


def test_a_seed_gives_one_schedule_with_all_kinds_of_faults() -> None:
    rounds = rounds_of(7, 20 * len(FAULTS))

    assert rounds == rounds_of(7, 20 * len(FAULTS))
    assert rounds != rounds_of(8, 20 * len(FAULTS))
    assert {kind for each in rounds for kind in each.kinds} == set(FAULTS)
