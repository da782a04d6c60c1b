"""Strict isolation: what is parsed, refused and placed; and nodes without shares."""

from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from services.node_agent.enforcers.table import enforcer_table
from services.node_agent.gpus.inventory import SharingConfig, devices_of
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.library import NodeLibrary
from shared.dialects.dialect import Rules
from shared.model.devices.device import DeviceMode, Isolation, MigLayout, MigProfile
from shared.model.devices.enforcers import HAMI_CORE_ALONE, NOTHING_OFFERED
from shared.model.errors import RequestError
from shared.model.names import ISOLATION, NodeName
from shared.model.requests.placement import Placement
from shared.model.requests.request import GpuRequest, PodRequest, SharingPolicy
from simcluster.node_agent.gpus import SimulatedGpus
from tests.support.build import device, ledger_node, request, use
from tests.support.dialects import builders
from tests.support.placer.placing import Cluster, refused
from tests.support.webhook import reviews
from tests.support.webhook.reviews import container, decided

NOTES = {ISOLATION: "strict"}
PART = {"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 3000}
ALL = {"volcano.sh/vgpu-number": 1}
LAYOUT = MigLayout(name="g", profiles=(MigProfile(name="1g.5gb", memory_mib=5120, count=7),))
STRICT = device("GPU-s", 0, isolation=Isolation.STRICT)
UNHELD = device("GPU-u", 0, offer=NOTHING_OFFERED)
SHARED = device("GPU-h", 0)
MIG = device("GPU-m", 1, memory_mib=40960, mode=DeviceMode.MIG, layouts=(LAYOUT,))


def read(
    *limits: dict[str, int], notes: dict[str, str] | None = None, rules: Rules | None = None
) -> PodRequest:
    return builders.read(*limits, notes=NOTES if notes is None else notes, rules=rules or Rules())


def part_of(**more: Any) -> PodRequest:
    return request(GpuRequest(container="c", gpus=1, **{"memory_units": 3000, **more}))


STRICT_NAMESPACE = Rules(strict_namespaces=("other", "ns"))
NO_INSTANCES = (
    {"volcano.sh/gpu-memory": 1024},
    {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 4},
)
WHOLE_GPUS = (
    {"volcano.sh/gpu-number": 1},
    {"tencent.com/vcuda-core": 200},
    {"nvidia.com/gpu": 2},
)


@pytest.mark.parametrize(
    ("limits", "notes", "rules", "strict", "sharing"),
    [
        (PART, NOTES, Rules(), True, SharingPolicy.SHARED),
        (ALL, NOTES, Rules(), True, SharingPolicy.EXCLUSIVE),
        (ALL, {}, Rules(), False, SharingPolicy.SHARED),
        (PART, {}, Rules(), False, SharingPolicy.SHARED),
        (PART, {}, Rules(strict_namespaces=("other",)), False, SharingPolicy.SHARED),
        (PART, {}, STRICT_NAMESPACE, True, SharingPolicy.SHARED),
        (PART, {}, Rules(strict_namespaces=("*",)), True, SharingPolicy.SHARED),
    ],
)
def test_a_pod_or_its_namespace_may_be_strict(
    limits: dict[str, int],
    notes: dict[str, str],
    rules: Rules,
    strict: bool,
    sharing: SharingPolicy,
) -> None:
    (parsed,) = read(limits, notes=notes, rules=rules).containers

    assert (parsed.strict, parsed.sharing) == (strict, sharing)


@pytest.mark.parametrize("limits", WHOLE_GPUS)
def test_whole_gpus_are_not_changed(limits: dict[str, int]) -> None:
    (strict,) = read(limits).containers
    (usual,) = read(limits, notes={}).containers

    assert strict.whole
    assert (strict.gpus, strict.sharing) == (usual.gpus, usual.sharing)


@pytest.mark.parametrize(
    ("limits", "notes", "text"),
    [
        *((limits, NOTES, r"requests a part of a GPU.*request whole") for limits in NO_INSTANCES),
        (PART, {**NOTES, "volcano.sh/vgpu-mode": "hami-core"}, r"part of a GPU.*request whole"),
        (PART, {ISOLATION: "off"}, r"leasehold\.dev/isolation is 'off': write strict, or one of"),
    ],
)
def test_a_part_that_cannot_be_an_instance_is_refused_with_what_to_do(
    limits: dict[str, int], notes: dict[str, str], text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        read(limits, notes=notes)


STRICT_PART = part_of(mig_allowed=True, strict=True)
STRICT_GPU = request(
    GpuRequest(
        container="c", gpus=1, strict=True, sharing=SharingPolicy.EXCLUSIVE, mig_allowed=True
    )
)
PART_OF_IT = part_of(memory_units=1000)
UNLIMITED = part_of(memory_units=1000, limited=False)
WHOLE = request(GpuRequest(container="c", gpus=1, whole=True))


@pytest.mark.parametrize(
    ("cards", "wanted", "found"),
    [
        ((SHARED, MIG), STRICT_PART, "GPU-m"),
        ((SHARED,), STRICT_PART, "GpuIsolationStrict"),
        ((SHARED,), STRICT_GPU, "GPU-h"),
        (((SHARED, use(100, 0, 1)),), STRICT_GPU, "InsufficientGpuMemory"),
        ((STRICT,), PART_OF_IT, "GpuNotShared"),
        ((STRICT,), UNLIMITED, "GpuNotShared"),
        ((STRICT,), WHOLE, "GPU-s"),
        ((UNHELD,), PART_OF_IT, "GpuNotIsolated"),
        ((UNHELD,), UNLIMITED, "GPU-u"),
        ((UNHELD,), WHOLE, "GPU-u"),
    ],
)
def test_a_node_gets_only_shares_that_both_sides_allow(
    cards: tuple[Any, ...], wanted: PodRequest, found: str
) -> None:
    answer = Cluster(ledger_node("n", *cards)).place(wanted)

    if isinstance(answer, Placement):
        assert [share.device for share in answer.shares] == [found]
        assert bool(answer.shares[0].mig) is (found == "GPU-m")
    else:
        assert answer.counts == ((found, 1),)
        assert answer.hint


def test_a_strict_part_without_instances_is_refused_for_good() -> None:
    refusal = refused(STRICT_PART, ledger_node("n", SHARED))

    assert "can use only MIG instances and whole GPUs" in refusal.nearest_nodes[0].devices[0].reason
    assert "volcano.sh/vgpu-cores: 100 and remove volcano.sh/vgpu-memory," in refusal.hint
    assert refusal.permanent


async def test_an_agent_reports_what_its_operator_and_its_library_allow(tmp_path: Path) -> None:
    gpus = await SimulatedGpus(NodeName("n"), "1xT4").discover()
    strict = SharingConfig(isolation=Isolation.STRICT)
    library = NodeLibrary(tmp_path / "library", None)
    enforcers = enforcer_table(ContainerFiles(PurePosixPath(tmp_path), library))

    usable = enforcers.offered(devices_of(gpus, strict), gpus, strict)[0]
    library.unusable_reason = "it does not exist"
    unusable = enforcers.offered(devices_of(gpus, strict), gpus, strict)[0]

    assert (usable.isolation, usable.offer) == (Isolation.STRICT, HAMI_CORE_ALONE)
    assert (unusable.isolation, unusable.offer) == (Isolation.STRICT, NOTHING_OFFERED)
    assert "HAMi-core's library is missing" in unusable.missing_text


def admitted(limits: dict[str, Any], notes: dict[str, str], **policy: Any) -> tuple[bool, str]:
    decision = decided(reviews.pod(container("main", limits), notes=notes), **policy)
    return decision.allowed, decision.message


def test_the_webhook_admits_strict_isolation_and_denies_what_cannot_be_placed() -> None:
    part = {k: str(v) for k, v in PART.items()}
    share = {"volcano.sh/gpu-memory": "1024"}
    strict = Rules(strict_namespaces=("team-a",))

    assert admitted(part, NOTES) == (True, "")
    assert admitted(share, {}) == (True, "")
    assert "isolation is strict" in admitted(share, NOTES)[1]
    assert "isolation is strict" in admitted(share, {}, rules=strict)[1]
    assert "write strict, or one of" in admitted(part, {ISOLATION: "off"})[1]
