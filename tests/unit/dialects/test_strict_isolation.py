"""Strict isolation: what is parsed, refused and placed; and nodes without shares."""

from typing import Any

import pytest

from services.node_agent.gpus.inventory import (
    SharingConfig,
    devices_of,
)
from shared.dialects.dialect import Rules
from shared.dialects.strict_isolation import ISOLATION
from shared.model.device import DeviceMode, Isolation, MigLayout, MigProfile
from shared.model.errors import RequestError
from shared.model.names import NodeName
from shared.model.placement import Placement, Refusal
from shared.model.request import GpuRequest, PodRequest, SharingPolicy
from shared.placing.mirror.cluster_mirror import ClusterMirror
from simcluster.node_agent.gpus import SimulatedGpus
from tests.support.build import device, ledger_node, request, use
from tests.support.dialects import builders
from tests.support.placer.placing import Cluster
from tests.support.webhook import reviews
from tests.support.webhook.reviews import container, decided

NOTES = {ISOLATION: "strict"}
PART = {"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 3000}
ALL = {"volcano.sh/vgpu-number": 1}
LAYOUT = MigLayout(name="g", profiles=(MigProfile(name="1g.5gb", memory_mib=5120, count=7),))
STRICT = device("GPU-s", 0, isolation=Isolation.STRICT)
UNHELD = device("GPU-u", 0, isolation=Isolation.UNHELD)
SHARED = device("GPU-h", 0)
MIG = device("GPU-m", 0, memory_mib=40960, mode=DeviceMode.MIG, layouts=(LAYOUT,))


def read(
    *limits: dict[str, int], notes: dict[str, str] | None = None, rules: Rules | None = None
) -> PodRequest:
    return builders.read(*limits, notes=NOTES if notes is None else notes, rules=rules or Rules())


def strict_part() -> PodRequest:
    return request(
        GpuRequest(container="c", gpus=1, memory_units=3000, mig_allowed=True, strict=True)
    )


def answer(wanted: PodRequest, *cards: Any) -> Placement | Refusal:
    return Cluster(ledger_node("n", *cards)).place(wanted)


def test_a_part_of_a_gpu_may_only_be_an_instance() -> None:
    (parsed,) = read(PART).containers

    assert parsed.strict
    assert parsed.mig_allowed
    assert parsed.sharing is SharingPolicy.SHARED


def test_all_of_the_memory_means_all_of_the_gpu() -> None:
    (parsed,) = read(ALL).containers
    (usual,) = read(ALL, notes={}).containers

    assert parsed.sharing is SharingPolicy.EXCLUSIVE
    assert usual.sharing is SharingPolicy.SHARED


@pytest.mark.parametrize(
    ("rules", "strict"),
    [
        (Rules(), False),
        (Rules(strict_namespaces=("other",)), False),
        (Rules(strict_namespaces=("other", "ns")), True),
        (Rules(strict_namespaces=("*",)), True),
    ],
)
def test_a_namespace_may_be_strict(rules: Rules, strict: bool) -> None:
    assert read(PART, notes={}, rules=rules).containers[0].strict is strict


@pytest.mark.parametrize(
    ("limits", "notes"),
    [
        ([{"volcano.sh/gpu-memory": 1024}], {}),
        ([PART], {"volcano.sh/vgpu-mode": "hami-core"}),
        ([{"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 4}], {}),
    ],
    ids=["no instances in these words", "the other mode", "no instances there either"],
)
def test_a_part_that_cannot_be_an_instance_is_refused_with_what_to_do(
    limits: list[dict[str, int]], notes: dict[str, str]
) -> None:
    assert read(*limits, notes=notes)

    with pytest.raises(RequestError, match=r"container c requests a part of a GPU.*request whole"):
        read(*limits, notes={**NOTES, **notes})


@pytest.mark.parametrize(
    "limits",
    [{"volcano.sh/gpu-number": 1}, {"tencent.com/vcuda-core": 200}, {"nvidia.com/gpu": 2}],
)
def test_whole_gpus_are_not_changed(limits: dict[str, int]) -> None:
    (strict,), (usual,) = read(limits).containers, read(limits, notes={}).containers

    assert strict.whole
    assert (strict.gpus, strict.sharing) == (usual.gpus, usual.sharing)


def test_any_other_value_of_the_isolation_annotation_is_refused() -> None:
    with pytest.raises(RequestError, match=r"leasehold\.dev/isolation must be strict.*'none'"):
        read(PART, notes={ISOLATION: "none"})


def test_a_strict_part_goes_to_an_instance_where_a_share_would_be_tried_first() -> None:
    found = answer(strict_part(), SHARED, device(**_fields(MIG, index=1)))

    assert isinstance(found, Placement)
    assert [share.device for share in found.shares] == ["GPU-m"]
    assert found.shares[0].mig is not None


def test_without_instances_a_strict_part_is_refused_by_name_and_for_good() -> None:
    refusal = answer(strict_part(), SHARED)

    assert isinstance(refusal, Refusal)
    assert refusal.counts == (("GpuIsolationStrict", 1),)
    assert "can use only MIG instances and whole GPUs" in refusal.nearest_nodes[0].devices[0].reason
    assert "remove strict isolation from the pod" in refusal.hint
    assert refusal.permanent


def test_a_strict_whole_gpu_must_be_idle_and_is_exclusive() -> None:
    wanted = request(
        GpuRequest(
            container="c", gpus=1, strict=True, sharing=SharingPolicy.EXCLUSIVE, mig_allowed=True
        )
    )

    placed, refused = answer(wanted, SHARED), answer(wanted, (SHARED, use(100, 0, 1)))

    assert isinstance(placed, Placement)
    assert placed.shares[0].sharing is SharingPolicy.EXCLUSIVE
    assert isinstance(refused, Refusal)


PART_OF_IT = request(GpuRequest(container="c", gpus=1, memory_units=1000))
WHOLE = request(GpuRequest(container="c", gpus=1, whole=True))
UNLIMITED = request(GpuRequest(container="c", gpus=1, memory_units=1000, limited=False))


@pytest.mark.parametrize(
    ("card", "wanted", "code"),
    [
        (STRICT, PART_OF_IT, "GpuNotShared"),
        (STRICT, UNLIMITED, "GpuNotShared"),
        (STRICT, WHOLE, ""),
        (UNHELD, PART_OF_IT, "GpuNotIsolated"),
        (UNHELD, UNLIMITED, ""),
        (UNHELD, WHOLE, ""),
    ],
)
def test_a_node_gets_only_shares_that_its_isolation_allows(
    card: Any, wanted: PodRequest, code: str
) -> None:
    found = answer(wanted, card)

    if not code:
        assert isinstance(found, Placement)
    else:
        assert isinstance(found, Refusal)
        assert found.counts == ((code, 1),)
        assert found.hint


def test_the_index_offers_no_strict_node_for_a_part() -> None:
    mirror = ClusterMirror()
    mirror.reset([ledger_node(f"n{n}", STRICT) for n in range(3)])
    (node, *_) = mirror.nodes.values()

    assert node.shareable_devices == ()
    assert len(node.devices) == 1


async def test_an_agent_reports_what_its_operator_and_its_library_allow() -> None:
    gpus = await SimulatedGpus(NodeName("n"), "1xT4").discover()
    strict = SharingConfig(isolation=Isolation.STRICT)

    assert devices_of(gpus, strict)[0].isolation is Isolation.STRICT
    assert devices_of(gpus, strict.without_isolation())[0].isolation is Isolation.STRICT
    assert devices_of(gpus, SharingConfig().without_isolation())[0].isolation is Isolation.UNHELD


def admitted(limits: dict[str, Any], notes: dict[str, str], **policy: Any) -> tuple[bool, str]:
    decision = decided(reviews.pod(container("main", limits), notes=notes), **policy)
    return decision.allowed, decision.message


def test_the_webhook_admits_strict_isolation_and_denies_what_cannot_be_placed() -> None:
    part, share = {k: str(v) for k, v in PART.items()}, {"volcano.sh/gpu-memory": "1024"}
    strict = Rules(strict_namespaces=("team-a",))

    assert admitted(part, NOTES) == (True, "")
    assert admitted(share, {}) == (True, "")
    assert "isolation is strict" in admitted(share, NOTES)[1]
    assert "isolation is strict" in admitted(share, {}, rules=strict)[1]
    assert "must be strict" in admitted(part, {ISOLATION: "off"})[1]
    assert "written by Leasehold only" in admitted(part, {"leasehold.dev/lease": "x"})[1]


def _fields(card: Any, **changes: Any) -> dict[str, Any]:
    known = {name: getattr(card, name) for name in card.__dataclass_fields__}
    return known | changes
