"""MIG layouts: their plans, and the instance at a position."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node_agent.mig.gpu_models import GPU_MODELS
from services.node_agent.mig.instances import (
    InUseError,
    MigInstance,
    find_layout,
    instance_at,
    is_laid_out,
)
from services.node_agent.mig.layout_plan import (
    CompleteInstance,
    CreateInstance,
    DestroyInstance,
    PlanStep,
    arrange,
    plan_layout,
)
from services.node_agent.mig.layouts import (
    KNOWN_GEOMETRIES,
    current_layouts,
    derive_layouts,
    layouts_for,
)
from shared.dialects.volcano.device_config import MigGeometries
from shared.model.devices.device import Device, MigLayout, MigProfile
from shared.model.errors import RequestError, UnavailableError
from shared.model.leases.lease import MigPlacement
from shared.model.names import DeviceUuid
from simcluster.node_agent.mig import SimulatedMig

GPU = DeviceUuid("GPU-m")
A100 = GPU_MODELS["A100-40GB"]
A30 = GPU_MODELS["A30"]
BY_NAME = {profile.name: profile for profile in A100.mig}


def layouts(model: str = "A100-40GB") -> dict[str, MigLayout]:
    found, warnings = layouts_for(
        GPU_MODELS[model].product, GPU_MODELS[model].mig, KNOWN_GEOMETRIES
    )
    assert warnings == ()
    return {layout.name: layout for layout in found}


PLACE = MigPlacement(layout="group2", position=3, profile="1g.5gb")
MIG_DEVICE = Device(
    uuid=GPU, index=0, model="A100", memory_mib=40960, slots=7, layouts=tuple(layouts().values())
)


def instance(profile: str, start: int, gi: int = 0, **changes: object) -> MigInstance:
    known = BY_NAME[profile]
    facts: dict[str, object] = {
        "gi": gi or 10 * known.memory_slices + start,
        "profile": profile,
        "start": start,
        "memory_slices": known.memory_slices,
        "compute_slices": known.compute_slices,
        "compute_ids": (0,),
        "uuid": f"MIG-{profile}-{start}",
    }
    return MigInstance(**(facts | changes))  # type: ignore[arg-type]


def hardware(path: Path, model: str = "A100-40GB") -> SimulatedMig:
    return SimulatedMig(path / "mig.json", {GPU: GPU_MODELS[model].mig})


def carry_out(device: SimulatedMig, steps: Sequence[PlanStep]) -> None:
    """Do as the partitioner does."""
    for step in steps:
        match step:
            case DestroyInstance(old):
                for compute in old.compute_ids:
                    device.destroy_compute(GPU, old.gi, compute)
                device.destroy_instance(GPU, old.gi)
            case CompleteInstance(old):
                device.create_compute(GPU, old.gi)
            case CreateInstance(profile, start):
                device.create_compute(GPU, device.create_instance(GPU, profile.id, start))


@pytest.mark.parametrize(
    ("wanted", "kept", "starts"),
    [
        ("3g.20gb 1g.5gb 1g.5gb 1g.5gb 1g.5gb", "", (4, 0, 1, 2, 3)),
        ("3g.20gb 1g.5gb 1g.5gb 1g.5gb 1g.5gb", "3g.20gb", None),
        ("4g.20gb 3g.20gb", "", (0, 4)),
        ("4g.20gb 3g.20gb 1g.5gb", "", None),  # compute slices run out although memory is left
    ],
)
def test_instances_are_arranged_where_all_fit(
    wanted: str, kept: str, starts: tuple[int, ...] | None
) -> None:
    there = [instance(name, 0) for name in kept.split()]

    assert arrange([BY_NAME[name] for name in wanted.split()], there, 7) == starts


@pytest.mark.parametrize("model", [name for name, profile in GPU_MODELS.items() if profile.mig])
def test_every_known_layout_can_be_made_after_every_other(model: str, tmp_path: Path) -> None:
    device = hardware(tmp_path, model)
    known = layouts(model)
    for first in known.values():
        for second in known.values():
            for layout in (first, second):
                there = device.instances(GPU)
                carry_out(device, plan_layout(layout, GPU_MODELS[model].mig, there))

                assert is_laid_out(layout, device.instances(GPU))
                assert plan_layout(layout, GPU_MODELS[model].mig, device.instances(GPU)) == ()


@given(
    st.lists(
        st.tuples(st.sampled_from([p.id for p in A100.mig]), st.integers(0, 7), st.booleans()),
        max_size=6,
    ),
    st.sampled_from(["group1", "group2", "group3", "group4"]),
    st.sets(st.integers(0, 13)),
)
def test_a_plan_reaches_the_layout_or_keeps_the_instances_in_use(
    tmp_path_factory: pytest.TempPathFactory,
    made: list[tuple[int, int, bool]],
    name: str,
    held: set[int],
) -> None:
    device = hardware(tmp_path_factory.mktemp("gpu"))
    for profile, start, complete in made:
        try:
            gi = device.create_instance(GPU, profile, start)
        except UnavailableError:
            continue
        if complete:
            device.create_compute(GPU, gi)
    before = {one for one in device.instances(GPU) if one.gi in held}
    layout = layouts()[name]

    try:
        carry_out(device, plan_layout(layout, A100.mig, device.instances(GPU), held))
    except InUseError:
        assert before
    else:
        after = device.instances(GPU)
        assert is_laid_out(layout, after)
        assert {(one.gi, one.start) for one in before} <= {(one.gi, one.start) for one in after}


def test_item_45_a_position_is_an_instance_by_placement_and_not_by_listing_order(
    tmp_path: Path,
) -> None:
    device = hardware(tmp_path)
    layout = layouts()["group2"]
    carry_out(device, plan_layout(layout, A100.mig, ()))
    listed = device.instances(GPU)

    found = [instance_at(layout, position, listed) for position in range(4)]

    assert [one.profile for one in found] == ["2g.10gb"] * 3 + ["1g.5gb"]
    assert [one.start for one in found] == [0, 2, 4, 6]
    assert [instance_at(layout, p, listed[::-1]) for p in range(4)] == found
    with pytest.raises(RequestError, match="has 4 positions, not 4"):
        instance_at(layout, 4, listed)
    with pytest.raises(RequestError, match="not laid out as group1"):
        instance_at(layouts()["group1"], 0, listed)


def test_item_46_an_instance_in_use_is_never_removed() -> None:
    there = [instance("1g.5gb", start) for start in range(7)]
    used = [*there[:3], instance("1g.5gb", 3, busy=True), *there[4:]]

    with pytest.raises(InUseError, match=r"1g.5gb at slice 3 of the device is in use"):
        plan_layout(layouts()["group3"], A100.mig, used)
    with pytest.raises(InUseError, match=r"1g.5gb at slice 0"):
        plan_layout(layouts()["group3"], A100.mig, there, {there[0].gi})
    assert len(plan_layout(layouts()["group3"], A100.mig, there)) == 7 + 2


def test_instances_that_both_layouts_have_are_kept() -> None:
    kept = instance("2g.10gb", 2, busy=True)

    steps = plan_layout(layouts()["group2"], A100.mig, [kept, instance("3g.20gb", 4)])

    assert [step.instance.profile for step in steps if isinstance(step, DestroyInstance)] == [
        "3g.20gb"
    ]
    created = [(s.profile.name, s.start) for s in steps if isinstance(s, CreateInstance)]
    assert created == [("2g.10gb", 0), ("2g.10gb", 4), ("1g.5gb", 6)]


def test_an_idle_instance_that_blocks_the_layout_is_moved() -> None:
    three = MigProfile(name="3g.20gb", memory_mib=1, count=1)
    ones = MigProfile(name="1g.5gb", memory_mib=1, count=4)
    layout = MigLayout(name="mixed", profiles=(three, ones))

    steps = plan_layout(layout, A100.mig, [instance("3g.20gb", 0)])

    assert isinstance(steps[0], DestroyInstance)
    assert [s.start for s in steps if isinstance(s, CreateInstance)] == [4, 0, 1, 2, 3]
    with pytest.raises(InUseError, match=r"do not fit beside 3g.20gb at slice 0"):
        plan_layout(layout, A100.mig, [instance("3g.20gb", 0, busy=True)])


def test_a_partial_layout_is_completed() -> None:
    half = instance("7g.40gb", 0, compute_ids=(), uuid="")

    assert plan_layout(layouts()["group4"], A100.mig, [half]) == (CompleteInstance(half),)


def test_a_layout_with_unknown_profiles_is_refused_with_the_supported_ones() -> None:
    layout = MigLayout(name="odd", profiles=(MigProfile(name="9g", memory_mib=1, count=1),))

    with pytest.raises(RequestError, match=r"needs 9g, and the device supports 1g.5gb"):
        plan_layout(layout, A100.mig, ())


def test_the_published_tables_are_offered_in_their_order() -> None:
    named = {
        layout.name: [(p.name, p.memory_mib, p.count) for p in layout.profiles]
        for layout in layouts("A100-80GB").values()
    }

    assert named == {
        "group1": [("1g.10gb", 9728, 7)],
        "group2": [("2g.20gb", 19968, 3), ("1g.10gb", 9728, 1)],
        "group3": [("3g.40gb", 40192, 2)],
        "group4": [("7g.80gb", 80896, 1)],
    }
    assert [p.name for one in layouts("A30").values() for p in one.profiles] == [
        "1g.6gb", "2g.12gb", "4g.24gb"
    ]  # fmt: skip


@pytest.mark.parametrize("model", ["A100-40GB", "H100-80GB", "H200", "B200"])
def test_devices_with_seven_slices_have_the_same_pattern_of_layouts(model: str) -> None:
    counts = [[p.count for p in layout.profiles] for layout in layouts(model).values()]

    assert counts == [[7], [3, 1], [2], [1]]


def test_nvml_takes_precedence_over_the_table() -> None:
    less = replace(BY_NAME["1g.5gb"], memory_mib=4864)
    real = [less, *(p for p in A100.mig if p.name not in {"1g.5gb", "3g.20gb"})]

    found, warnings = layouts_for(A100.product, real, KNOWN_GEOMETRIES)

    assert [layout.name for layout in found] == ["group1", "group2", "group4"]
    assert found[0].profiles[0].memory_mib == 4864
    assert len(warnings) == 1
    assert (
        "layout group3 of NVIDIA A100-SXM4-40GB has 3g.20gb, which NVML does not report"
        in warnings[0]
    )


def test_a_profile_with_another_name_and_a_similar_size_matches() -> None:
    known = GPU_MODELS["A100-80GB"]
    table = MigGeometries(
        models=("A100",),
        layouts=(
            MigLayout(
                name="whole", profiles=(MigProfile(name="7g.79gb", memory_mib=80896, count=1),)
            ),
        ),
    )

    (layout,), warnings = layouts_for(known.product, known.mig, (table,))

    assert layout.profiles[0].name == "7g.80gb"
    assert warnings == ("7g.79gb of NVIDIA A100-SXM4-80GB is called 7g.80gb by NVML",)


def test_a_layout_that_does_not_fit_is_not_offered() -> None:
    profiles = (MigProfile(name="3g.20gb", memory_mib=20480, count=3),)
    table = MigGeometries(models=("A100",), layouts=(MigLayout(name="much", profiles=profiles),))

    found, warnings = layouts_for(A100.product, A100.mig, (table,))

    assert found == derive_layouts(A100.mig)
    assert "layout much of NVIDIA A100-SXM4-40GB does not fit" in warnings[0]


def test_an_unknown_model_gets_layouts_from_nvmls_profiles() -> None:
    found, warnings = layouts_for("NVIDIA Something", A100.mig, KNOWN_GEOMETRIES)

    assert warnings == ()
    assert [[(p.name, p.count) for p in layout.profiles] for layout in found] == [
        [("1g.5gb", 7)],
        [("2g.10gb", 3), ("1g.5gb", 1)],
        [("3g.20gb", 2)],
        [("7g.40gb", 1)],
    ]
    assert [layout.name for layout in derive_layouts(A30.mig)] == ["group1", "group2", "group3"]


def test_without_partitioning_the_existing_instances_are_the_layout() -> None:
    known = tuple(layouts().values())
    pair = [instance("3g.20gb", 0), instance("3g.20gb", 4)]
    odd = [instance("3g.20gb", 0), instance("1g.5gb", 4)]

    assert current_layouts(pair, known, A100.mig) == (layouts()["group3"],)
    (there,) = current_layouts(odd, known, A100.mig)
    assert [(p.name, p.count) for p in there.profiles] == [("3g.20gb", 1), ("1g.5gb", 1)]
    assert current_layouts([], known, A100.mig) == ()


@pytest.mark.parametrize(
    ("place", "device"),
    [
        (replace(PLACE, layout="old"), MIG_DEVICE),
        (replace(PLACE, profile="2g.10gb"), MIG_DEVICE),
        (PLACE, replace(MIG_DEVICE, layouts=())),
        (PLACE, None),
    ],
)
def test_a_placement_whose_layout_the_device_does_not_have_is_refused(
    place: MigPlacement, device: Device | None
) -> None:
    with pytest.raises(RequestError, match=f"at position 3 of layout {place.layout} .*were the"):
        find_layout(place, GPU, device)


def test_a_placement_is_found_in_the_layouts_of_its_device() -> None:
    assert find_layout(PLACE, GPU, MIG_DEVICE).name == "group2"
