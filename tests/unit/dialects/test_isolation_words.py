"""The annotation by which pods and namespaces demand an enforcer: parsed, placed, denied."""

import time
from typing import Any

import pytest
from msgspec import structs

from shared.dialects.dialect import ContainerManifest, PodManifest, Rules
from shared.dialects.isolation_words import parse_isolation
from shared.dialects.pod_requests import parse_pod_request
from shared.model.devices.enforcers import (
    HAMI_CORE_ALONE,
    NOTHING_OFFERED,
    Enforcer,
    HeldBy,
    MissingEnforcer,
    Offer,
)
from shared.model.errors import RequestError
from shared.model.names import ISOLATION, Namespace
from shared.model.requests.placement import Placement
from shared.model.requests.request import GpuRequest, PodRequest
from tests.support.build import device, ledger_node, request, use
from tests.support.placer.placing import Cluster
from tests.support.webhook import reviews
from tests.support.webhook.reviews import container, decided

PART = {"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 3000, "volcano.sh/vgpu-cores": 30}
BOTH = Offer(memory=("driver", "hami-core"), compute=("time", "hami-core"))
MPS = Offer(memory=("mps", "hami-core"), compute=("mps", "hami-core"))
SERVER = Offer(memory=("mps-shared", "hami-core"), compute=("mps-shared", "hami-core"))
EVERY_MPS = Offer(memory=("mps", "mps-shared"), compute=("mps", "mps-shared"))
DRIVER_AND_SERVER = Offer(memory=("driver", "mps-shared"), compute=("mps-shared",))
ONLY_DRIVER = Offer(memory=("driver",), compute=())


@pytest.mark.parametrize(
    ("text", "memory", "compute"),
    [
        ("strict", None, None),
        ("driver", "driver", None),
        ("time", None, "time"),
        ("hami-core", "hami-core", "hami-core"),
        ("mps", "mps", "mps"),
        ("mps-shared", "mps-shared", "mps-shared"),
        ("mig", "mig", "mig"),
        ("none", "none", "none"),
        ("memory=driver", "driver", None),
        ("compute=time, memory=driver", "driver", "time"),
        ("memory=driver,compute=mps", "driver", "mps"),
        ("memory=driver,compute=mps-shared", "driver", "mps-shared"),
        ("memory=mps-shared", "mps-shared", None),
    ],
)
def test_words_demand_enforcers(text: str, memory: Any, compute: Any) -> None:
    assert parse_isolation(text) == HeldBy(memory=memory, compute=compute)


WORDS = "exclusive, mig, driver, mps, mps-shared, time, hami-core, none"


@pytest.mark.parametrize(
    ("text", "advice", "instead"),
    [
        ("", "write strict, or one of", ""),
        ("Driver", f"write strict, or one of {WORDS}", "driver"),
        ("mps_shared", "did you mean mps-shared?", "mps-shared"),
        ("memory=time", f"memory one of {WORDS.replace(' time,', '')}", ""),
        (
            "memory=driver,cores=time",
            "did you mean memory=driver,compute",
            "memory=driver,compute=time",
        ),
        ("mem:Driver; compute: none", "did you mean", "memory=driver,compute=none"),
        ("compute=50", "or memory=WORD,compute=WORD", ""),
        ("memory=mps,compute=hami", "or memory=WORD,compute=WORD", ""),
        ("memory=driver,compute", "or memory=WORD,compute=WORD", ""),
        ("memory=mig", "write mig", "mig"),
        ("memory=mps,compute=hami-core", "MPS holds memory it holds the cores: write mps", "mps"),
        (
            "memory=mps-shared,compute=time",
            "where a shared server of MPS holds memory it holds the cores: write mps-shared",
            "mps-shared",
        ),
        ("memory=mps-shared,compute=mps", "write mps-shared", "mps-shared"),
        ("memory=mps,compute=mps-shared", "write mps", "mps"),
        (
            "memory=hami-core,compute=mps",
            "write memory= with one of mps, driver, none",
            "memory=mps,compute=mps",
        ),
        (
            "memory=hami-core,compute=mps-shared",
            "beside compute=mps-shared write memory= with one of mps-shared, driver, none",
            "memory=mps-shared,compute=mps-shared",
        ),
    ],
)
def test_other_words_are_denied_with_what_to_write(text: str, advice: str, instead: str) -> None:
    with pytest.raises(RequestError, match=r"leasehold\.dev/isolation") as raised:
        parse_isolation(text)

    assert advice in str(raised.value)
    [change] = raised.value.changes
    assert change.value == instead
    assert not instead or parse_isolation(instead)


def part_of(text: str, limits: dict[str, int] = PART) -> PodRequest:
    pod = PodManifest(
        namespace=Namespace("ml"),
        containers=(ContainerManifest(name="main", limits=limits),),
        annotations={ISOLATION: text} if text else {},
    )
    return parse_pod_request(pod, Rules())


@pytest.mark.parametrize(
    ("offer", "demand", "held"),
    [
        (BOTH, "", ("driver", "hami-core", "driver")),
        (BOTH, "hami-core", ("hami-core", "hami-core", "hami-core")),
        (BOTH, "time", ("driver", "time", "time")),
        (BOTH, "compute=none", ("driver", "none", "driver")),
        (BOTH, "none", ("none", "none", "driver")),
        (MPS, "", ("hami-core", "hami-core", "hami-core")),
        (MPS, "mps", ("mps", "mps", "mps")),
        (MPS, "compute=mps", ("mps", "mps", "mps")),
        (SERVER, "", ("hami-core", "hami-core", "hami-core")),
        (SERVER, "mps-shared", ("mps-shared", "mps-shared", "mps-shared")),
        (SERVER, "memory=mps-shared", ("mps-shared", "mps-shared", "mps-shared")),
        (SERVER, "compute=mps-shared", ("mps-shared", "mps-shared", "mps-shared")),
        (SERVER, "memory=none,compute=mps-shared", ("none", "mps-shared", "mps-shared")),
        (DRIVER_AND_SERVER, "compute=mps-shared", ("driver", "mps-shared", "mps-shared")),
        (DRIVER_AND_SERVER, "mps-shared", ("mps-shared", "mps-shared", "mps-shared")),
    ],
)
def test_a_lease_says_what_holds_it(offer: Offer, demand: str, held: tuple[str, ...]) -> None:
    answer = Cluster(ledger_node("n", device(offer=offer))).place(part_of(demand))

    assert isinstance(answer, Placement)
    [share] = answer.shares
    assert (share.memory, share.compute, share.mode) == held


@pytest.mark.parametrize(
    ("memory", "compute"),
    [("mps", "none"), ("mps", "mps-shared"), ("mps-shared", "mps"), ("mps-shared", "none")],
)
def test_where_mps_holds_memory_the_same_server_holds_the_cores(memory: Any, compute: Any) -> None:
    demand = HeldBy(memory=memory, compute=compute)

    assert EVERY_MPS.holding(demand, mode="", capped=True) is None


@pytest.mark.parametrize(
    ("offer", "demand", "code", "reason"),
    [
        (MPS, "driver", "GpuEnforcerMissing", "demands memory=driver, and it offers mps, hami"),
        (BOTH, "mps", "GpuEnforcerMissing", "demands memory=mps,compute=mps"),
        (
            MPS,
            "mps-shared",
            "GpuEnforcerMissing",
            "demands memory=mps-shared,compute=mps-shared, and it offers mps, hami-core",
        ),
        (SERVER, "mps", "GpuEnforcerMissing", "and it offers mps-shared, hami-core"),
        (ONLY_DRIVER, "", "GpuNotIsolated", "limits would not be enforced"),
    ],
)
def test_a_pod_waits_where_nothing_holds_it_as_demanded(
    offer: Offer, demand: str, code: str, reason: str
) -> None:
    answer = Cluster(ledger_node("n", device(offer=offer))).place(part_of(demand))

    assert not isinstance(answer, Placement)
    assert answer.counts == ((code, 1),)
    assert reason in answer.nearest_nodes[0].devices[0].reason
    assert answer.hint


@pytest.mark.parametrize(
    ("offers", "demand", "hint"),
    [
        ((MPS, BOTH), "mps-shared", "mps-shared, only hami-core, driver, mps, time: write the "),
        ((MPS,), "driver", "driver, only hami-core, mps: write the "),
        ((SERVER, ONLY_DRIVER), "memory=mps,compute=mps", "mps, only hami-core, driver, mps-"),
        ((BOTH, MPS), "memory=driver,compute=mps", "memory=driver,compute=mps, only hami-core, "),
    ],
)
def test_what_no_node_offers_is_answered_with_what_is_offered(
    offers: tuple[Offer, ...], demand: str, hint: str
) -> None:
    cards = (device(f"GPU-{number}", 0, offer=offer) for number, offer in enumerate(offers))
    cluster = Cluster(*(ledger_node(card.uuid, card) for card in cards))

    answer = cluster.place(part_of(demand))

    assert not isinstance(answer, Placement)
    assert f"no node offers the isolation {hint}" in answer.hint
    assert answer.hint.endswith(f"{ISOLATION}: hami-core, as node GPU-0 has room for it now")


def test_a_pod_waits_for_the_only_node_that_offers_what_it_demands() -> None:
    offering = device("GPU-b", 0, offer=BOTH)
    full = ledger_node("b", (offering, structs.replace(use(16_000, 100, 1), mode="time")))

    answer = Cluster(ledger_node("a", device("GPU-a", 0)), full).place(part_of("time"))

    assert not isinstance(answer, Placement)
    assert "wait until pods on node b have ended" in answer.hint
    assert ISOLATION not in answer.hint


def test_without_a_demand_what_is_usual_is_missing_the_library_first() -> None:
    names: tuple[Enforcer, ...] = "driver", "mps", "time", "hami-core"
    missing = tuple(MissingEnforcer(name=name, reason=f"no {name}") for name in names)
    card = device(offer=NOTHING_OFFERED, missing=missing)

    answer = Cluster(ledger_node("n", card)).place(part_of(""))

    assert not isinstance(answer, Placement)
    assert answer.nearest_nodes[0].devices[0].reason == "no hami-core; no driver"


def test_with_a_demand_only_what_it_names_is_said_to_be_missing() -> None:
    names: tuple[Enforcer, ...] = "driver", "mps", "mps-shared", "time"
    missing = tuple(MissingEnforcer(name=name, reason=f"no {name}") for name in names)
    card = device(offer=HAMI_CORE_ALONE, missing=missing)

    answer = Cluster(ledger_node("n", card)).place(part_of("memory=driver,compute=mps-shared"))

    assert not isinstance(answer, Placement)
    [reason] = [shown.reason for shown in answer.nearest_nodes[0].devices]
    assert reason.endswith("it offers hami-core: no driver; no mps-shared")


@pytest.mark.parametrize(
    ("offer", "mode", "demand", "held"),
    [
        (BOTH, "hami-core", "", ("hami-core", "hami-core")),
        (BOTH, "driver", "", ("driver", "hami-core")),
        (BOTH, "driver", "hami-core", ("hami-core", "hami-core")),
        (BOTH, "time", "", "GpuSharingMode"),
        (BOTH, "time", "time", ("driver", "time")),
        (BOTH, "hami-core", "driver", "GpuSharingMode"),
        (BOTH, "driver", "none", ("none", "none")),
        (BOTH, "time", "none", "GpuSharingMode"),
        (SERVER, "mps-shared", "mps-shared", ("mps-shared", "mps-shared")),
        (SERVER, "mps-shared", "", "GpuSharingMode"),
        (SERVER, "mps-shared", "none", "GpuSharingMode"),
        (SERVER, "hami-core", "mps-shared", "GpuSharingMode"),
        (EVERY_MPS, "mps", "mps-shared", "GpuSharingMode"),
        (EVERY_MPS, "mps-shared", "mps", "GpuSharingMode"),
        (DRIVER_AND_SERVER, "mps-shared", "compute=mps-shared", ("driver", "mps-shared")),
        (DRIVER_AND_SERVER, "driver", "compute=mps-shared", "GpuSharingMode"),
    ],
)
def test_a_share_joins_the_mode_of_its_device_or_waits(
    offer: Offer, mode: Any, demand: str, held: Any
) -> None:
    card = device(offer=offer)
    shared = structs.replace(use(100, 0, 1), mode=mode)

    answer = Cluster(ledger_node("n", (card, shared))).place(part_of(demand))

    if isinstance(answer, Placement):
        [share] = answer.shares
        assert (share.memory, share.compute) == held
        assert share.mode == mode
    else:
        assert answer.counts == ((held, 1),)
        assert f"in mode {mode}" in answer.nearest_nodes[0].devices[0].reason


def test_placements_that_the_ledger_has_not_counted_decide_on_the_mode() -> None:
    cluster = Cluster(ledger_node("n", device(offer=BOTH)))

    first = cluster.place(part_of("time"))
    second = cluster.place(part_of(""))

    assert isinstance(first, Placement)
    assert not isinstance(second, Placement)
    assert second.counts == (("GpuSharingMode", 1),)


def test_whole_devices_are_exclusive_whatever_is_demanded() -> None:
    whole = request(GpuRequest(container="c", gpus=1, whole=True, held_by=HeldBy(memory="driver")))

    answer = Cluster(ledger_node("n", device())).place(whole)

    assert isinstance(answer, Placement)
    assert (answer.shares[0].memory, answer.shares[0].mode) == ("exclusive", "exclusive")


@pytest.mark.parametrize(
    ("limits", "demand", "advice"),
    [
        (PART, "exclusive", "request whole GPUs: in container main set volcano.sh/gpu-number: 1"),
        ({"nvidia.com/gpu": 1}, "mig", "request memory by resource names"),
    ],
)
def test_an_enforcer_that_cannot_apply_is_denied(
    limits: dict[str, int], demand: str, advice: str
) -> None:
    with pytest.raises(RequestError, match=advice):
        part_of(demand, limits)


@pytest.mark.parametrize(
    ("own", "of_namespace", "found"),
    [
        (None, "driver", "driver"),
        ("hami-core", "driver", None),
        ("gpu", "", "annotation leasehold.dev/isolation is 'gpu': write strict"),
        (None, "gpu", "namespace team-a: annotation leasehold.dev/isolation is 'gpu'"),
    ],
)
def test_a_pod_has_the_demand_of_its_namespace_unless_it_has_its_own(
    own: str | None, of_namespace: str, found: str | None
) -> None:
    notes = {ISOLATION: own} if own else {}
    limits = {name: str(amount) for name, amount in PART.items()}
    pod = reviews.pod(container("main", limits), notes=notes)

    decision = decided(pod, isolation=of_namespace)

    if decision.allowed:
        added = [patch.value for patch in decision.patches if "annotations" in patch.path]
        assert added == ([{ISOLATION: found}] if found else [])
    else:
        assert found is not None
        assert found in decision.message


def test_a_text_that_is_no_word_takes_no_time_to_compare() -> None:
    began = time.process_time()

    for text in ("a=" + "b" * 200_000 + "!", "memory" * 40_000):
        with pytest.raises(RequestError, match="write strict, or one of"):
            parse_isolation(text)

    assert time.process_time() - began < 1
