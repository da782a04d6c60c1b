"""The leases of ResourceClaims whose names are as long, and as many, as Kubernetes allows."""

import json
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from services.claims.claim_answers import leased_answer
from services.claims.claim_shares import MOST_DATA, refusal_text, reservation_of, slices_refusal
from shared.dialects.nvidia.dra_parameters import NO_SLICES
from shared.kubernetes.resource_claims import ApiResourceClaim, allocated_claim
from shared.ledger.rows.lease_rows import new_lease
from shared.model.bounds import MOST_VERSION
from shared.model.devices.device import DeviceMode, MigLayout, MigProfile
from shared.model.devices.enforcers import NOTHING_OFFERED, MissingEnforcer, Offer
from shared.model.events.claim_events import AllocatedClaim
from shared.model.events.node_events import DeviceReported
from shared.model.events.request_reply import LeasesReply
from shared.model.leases.lease import Lease
from shared.model.leases.lease_copy import dump_lease, load_lease
from shared.model.leases.ledger import NoCapacity, NodeTotals, Reservation
from shared.model.names import NodeName, PodUid
from shared.model.requests.claim import DRIVER, allocated_name, device_name
from shared.nats import wire
from tests.support.build import allocation_of, device, ledger_node, use

GPU = device("GPU-12345678-1234-1234-1234-123456789abc", slots=64)
LONGEST = f"{'g' * 63}/{'m' * 63}"


def read_claim(
    request: str, results: int = 1, config: Any = (), mode: str = "", **metadata: Any
) -> AllocatedClaim:
    result: dict[str, Any] = {
        "driver": DRIVER,
        "pool": "n1",
        "device": device_name(GPU.uuid, mode),
        "consumedCapacity": {"memory": "100Mi"},
        "request": request,
    }
    shared = [{**result, "shareID": f"{number:036}"} for number in range(results)]
    claim = {
        "metadata": {"name": "c", "namespace": "a", "uid": f"{0:036}", **metadata},
        "status": {"allocation": {"devices": {"results": shared, "config": config}}},
    }
    read = allocated_claim(msgspec.json.decode(json.dumps(claim), type=ApiResourceClaim))
    assert read is not None
    return read


def reserved(request: str, results: int = 1, config: Any = ()) -> Reservation | str:
    return reservation_of(read_claim(request, results, config), ledger_node("n1", GPU))


def leased(wanted: Reservation | str) -> Lease:
    assert isinstance(wanted, Reservation)
    numbers = iter((MOST_VERSION - 1,) + (65_535, MOST_VERSION - 1) * 32)
    return new_lease(wanted, 1, numbers, 1_700_000_000.1234567, 0.0)


def test_a_lease_of_a_request_with_the_longest_name_is_read_by_all_that_get_it() -> None:
    lease = leased(reserved(LONGEST))
    reply = LeasesReply(leases=(lease,))
    report = DeviceReported(
        node=NodeName("n1"),
        devices=(),
        served=(),
        allocations=(allocation_of(lease, container=LONGEST),),
    )

    assert wire.decode(wire.encode([reply]), LeasesReply) == [reply]
    assert wire.decode(wire.encode([report]), DeviceReported) == [report]
    assert load_lease(dump_lease(lease), namespace=lease.namespace, name="c").shares == lease.shares


@pytest.mark.parametrize(
    ("request_name", "results", "fits"), [("gpu", 32, True), (LONGEST, 32, False)]
)
def test_a_lease_whose_copy_has_no_room_in_the_claims_status_is_refused(
    request_name: str, results: int, fits: bool
) -> None:
    wanted = reserved(request_name, results)

    if fits:
        assert len(dump_lease(leased(wanted))) <= MOST_DATA
    else:
        assert "its status has room for 10240: request fewer devices" in str(wanted)


@pytest.mark.parametrize("mode", ["", "driver"])
@pytest.mark.parametrize(
    ("owners", "memory"),
    [
        ([{"kind": "Pod", "uid": "p", "controller": True}], "driver"),
        ([{"kind": "Pod", "uid": "p", "controller": False}], "hami-core"),
        ([{"kind": "Job", "uid": "j", "controller": True}], "hami-core"),
        ([], "hami-core"),
    ],
)
def test_the_driver_holds_only_claims_that_are_one_pods_own(
    owners: list[dict[str, Any]], memory: str, mode: Any
) -> None:
    """The driver limits each pod for itself."""
    gpu = replace(GPU, offer=Offer(memory=("driver", "hami-core"), compute=("hami-core",)))
    shared = structs.replace(use(100, 0, 1) if mode else use(0, 0, 0), mode=mode)

    wanted = reservation_of(
        read_claim("gpu", ownerReferences=owners), ledger_node("n1", (gpu, shared))
    )

    assert isinstance(wanted, Reservation)
    [share] = wanted.candidates[0].shares
    assert (share.memory, share.compute, share.mode) == (memory, "hami-core", mode or memory)


OWN = ({"kind": "Pod", "uid": "p", "controller": True},)
EVERY_MODE = Offer(memory=("mps", "driver", "hami-core"), compute=("mps", "time", "hami-core"))


@pytest.mark.parametrize(
    ("mode", "owners", "held"),
    [
        ("mps", OWN, ("driver", "mps", "mps")),
        ("mps", (), ("mps", "mps", "mps")),
        ("time", OWN, ("driver", "time", "time")),
        ("time", (), ("hami-core", "time", "time")),
    ],
)
@pytest.mark.parametrize("memory_mib", [100, GPU.memory_mib])
def test_a_claim_is_held_as_the_device_that_it_selects_says(
    mode: str, owners: Any, held: tuple[str, ...], memory_mib: int
) -> None:
    """Also with all of the memory, which a device without a demand gives as a whole GPU."""
    gpu = replace(GPU, offer=EVERY_MODE)
    claim = read_claim("gpu", mode=mode, ownerReferences=list(owners))
    [allocated] = claim.devices
    claim = replace(claim, devices=(replace(allocated, memory_mib=memory_mib),))

    wanted = reservation_of(claim, ledger_node("n1", gpu))

    assert isinstance(wanted, Reservation)
    [share] = wanted.candidates[0].shares
    assert (share.memory, share.compute, share.mode) == held
    assert allocated_name(share) == allocated.device
    assert not share.whole


@pytest.mark.parametrize(
    ("offer", "mode", "text"),
    [
        (NOTHING_OFFERED, "", "nothing holds a part of .*: no library"),
        (Offer(memory=("driver",), compute=()), "", "by a ResourceClaimTemplate"),
        (Offer(memory=("hami-core",), compute=("hami-core",)), "mps", "shared in mode mps until"),
    ],
)
def test_a_claim_is_refused_where_nothing_would_hold_its_part(
    offer: Offer, mode: Any, text: str
) -> None:
    missing = (MissingEnforcer("hami-core", "no library"),)
    gpu = replace(GPU, offer=offer, missing=missing)
    shared = structs.replace(use(100, 0, 1) if mode else use(0, 0, 0), mode=mode)

    refused = reservation_of(read_claim("gpu"), ledger_node("n1", (gpu, shared)))

    assert isinstance(refused, str)
    assert re.search(text, refused)


def test_whatever_the_names_a_lease_that_is_not_refused_has_room_in_the_claims_status() -> None:
    wanted = [reserved("g" * length, 32) for length in range(1, 64)]
    leases = [leased(each) for each in wanted if isinstance(each, Reservation)]

    assert 0 < len(leases) < len(wanted)
    assert max(len(dump_lease(each)) for each in leases) <= MOST_DATA


@pytest.mark.parametrize(
    ("fault", "told"), [("XID 79", "is not available: XID 79"), ("of secret/p", "is not available")]
)
def test_a_fault_that_names_pods_is_not_told_to_the_user_of_a_claim(fault: str, told: str) -> None:
    wanted = reserved("gpu")
    assert isinstance(wanted, Reservation)
    broken = NodeTotals(node=ledger_node("n1", replace(GPU, healthy=False, fault=fault)), leases=())

    text = refusal_text(wanted, NoCapacity(pod=wanted.pod, reason="device-unhealthy"), broken)

    assert text.endswith(told)


def parameters(driver: str, kind: str = "GpuConfig", **sharing: Any) -> dict[str, Any]:
    config = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, "sharing": sharing}
    return {"source": "FromClaim", "opaque": {"driver": driver, "parameters": config}}


def test_words_33_the_condition_of_a_leased_claim_says_which_parameters_have_no_effect() -> None:
    of_instance = parameters(DRIVER, "MigDeviceConfig", strategy="TimeSlicing")
    lease = leased(reserved("gpu"))
    messages = [
        leased_answer(read_claim("gpu", config=[config]), lease).message
        for config in (of_instance, parameters(DRIVER, strategy="TimeSlicing"))
    ]

    said = f"leased on node n1 with version {lease.version}"
    assert messages == [f"{said}; {NO_SLICES}", said]


def test_a_claim_whose_parameters_no_node_can_meet_is_refused_in_words() -> None:
    by_mps = parameters(DRIVER, strategy="MPS")
    of_another = parameters("gpu.nvidia.com", strategy="MPS")
    slices = parameters(DRIVER, strategy="TimeSlicing")

    refused = reserved("gpu", config=[slices, by_mps])

    assert isinstance(refused, str)
    assert refused.startswith("sharing.strategy is MPS, and the claim has a device without")
    assert isinstance(reserved("gpu", config=[slices, of_another]), Reservation)


def test_parameters_are_for_the_devices_of_the_requests_that_they_name() -> None:
    gpu = replace(GPU, offer=EVERY_MODE)
    of_gpu = {**parameters(DRIVER, strategy="MPS"), "requests": ["gpu"]}
    of_choice = {**parameters(DRIVER, strategy="MPS"), "requests": ["gpu/mps"]}
    of_another = {**parameters(DRIVER, strategy="MPS"), "requests": ["other"]}

    for config, mode, fits in [
        (of_gpu, "mps", True),
        (of_choice, "mps", True),
        (of_gpu, "time", False),
        (of_another, "time", True),
    ]:
        claim = read_claim("gpu/mps", config=[config], mode=mode)
        wanted = reservation_of(claim, ledger_node("n1", gpu))
        assert isinstance(wanted, Reservation) is fits


def slicing(interval: str, **config: Any) -> dict[str, Any]:
    """Parameters of the claim's DeviceClass, unless another source is given."""
    length = {"interval": interval}
    asked = parameters(DRIVER, strategy="TimeSlicing", timeSlicingConfig=length)
    return {**asked, "source": "FromClass", **config}


def asking(interval: str, **claim: Any) -> Reservation:
    wanted = reservation_of(
        read_claim("gpu", config=[slicing(interval)], **claim), ledger_node("n1", GPU)
    )
    assert isinstance(wanted, Reservation)
    return wanted


def test_the_last_parameters_for_a_request_say_which_time_slices_its_lease_asks_for() -> None:
    """Those of its class come first."""
    of_class = slicing("Long")
    of_gpu = slicing("Short", requests=["gpu"])
    of_another = slicing("Medium", requests=["other"])
    without = parameters(DRIVER, strategy="TimeSlicing")

    asked = [
        leased(reserved("gpu", config=config)).time_slices
        for config in ([of_class], [of_class, of_gpu, of_another], [of_class, without])
    ]

    assert asked == [{GPU.uuid: "Long"}, {GPU.uuid: "Short"}, {}]


def test_an_interval_that_a_claim_names_for_a_part_of_a_gpu_is_refused() -> None:
    refusal = reserved("gpu", config=[slicing("Short", source="FromClaim")])

    assert "request gpu is for a part of a GPU, whose other users would have turns" in str(refusal)


def test_a_copy_of_a_lease_keeps_the_time_slices_that_it_asks_for() -> None:
    lease = leased(asking("Short"))

    read = load_lease(dump_lease(lease), namespace=lease.namespace, name="c")

    assert read.time_slices == lease.time_slices == {GPU.uuid: "Short"}


@pytest.mark.parametrize(
    ("first", "second", "refusal"),
    [
        ("Short", "Medium", "has Short time slices, and the claim asks for Medium: a GPU has one"),
        ("Short", "Default", "has Short time slices, and the claim asks for Default"),
        ("Short", "Short", ""),
    ],
)
def test_words_34_time_slices_of_another_length_are_refused_with_the_holder(
    first: str, second: str, refusal: str
) -> None:
    holder = leased(asking(first))
    wanted = asking(second, name="d", uid=f"{1:036}")

    text = slices_refusal(wanted, [holder])

    assert refusal in text
    assert bool(text) is bool(refusal)
    assert not text or text.endswith("asked for by claim a/c (100 MiB)")
    assert slices_refusal(asking(second), [holder]) == "", "its own lease is no other's"


def test_claims_that_ask_for_no_time_slices_share_a_gpu_of_any() -> None:
    plain = reserved("gpu")
    assert isinstance(plain, Reservation)

    assert slices_refusal(structs.replace(plain, pod=PodUid("p")), [leased(asking("Short"))]) == ""
    assert slices_refusal(asking("Short"), [leased(plain)]) == ""


def test_a_claim_that_asks_for_two_lengths_on_one_gpu_is_refused() -> None:
    claim = read_claim("gpu", results=2)
    [first, second] = claim.devices
    asked = (replace(first, interval="Short"), replace(second, request="more", interval="Long"))
    wanted = reservation_of(replace(claim, devices=asked), ledger_node("n1", GPU))
    assert isinstance(wanted, Reservation)

    assert "asks for time slices of two lengths on GPU" in slices_refusal(wanted, [])


@pytest.mark.parametrize(("interval", "fits"), [("Short", False), ("Default", True)])
def test_time_slices_of_a_gpu_are_refused_for_an_instance_of_mig(interval: str, fits: bool) -> None:
    profile = MigProfile(name="1g.5gb", memory_mib=4864, count=7)
    gpu = replace(GPU, mode=DeviceMode.MIG, layouts=(MigLayout(name="7", profiles=(profile,)),))

    wanted = reservation_of(
        read_claim("gpu", config=[slicing(interval)], mode="1g.5gb"), ledger_node("n1", gpu)
    )

    assert isinstance(wanted, Reservation) is fits
    assert fits or "request gpu has an instance of MIG, which has no time slices" in str(wanted)
