"""Free MIG instances: as many are found as are counted, in different places of one layout."""

from hypothesis import given
from hypothesis import strategies as st

from shared.model.devices.device import MigLayout, MigProfile
from shared.placing.mig_instances import count_free, find_instances, layout_shapes

SMALL = MigProfile(name="1g", memory_mib=10, count=7)
LARGE = MigProfile(name="3g", memory_mib=40, count=2)
LAYOUTS = (
    MigLayout(name="small", profiles=(SMALL,)),
    MigLayout(
        name="mixed",
        profiles=(
            MigProfile(name="3g", memory_mib=40, count=1),
            MigProfile(name="1g", memory_mib=10, count=3),
        ),
    ),
    MigLayout(name="large", profiles=(LARGE,)),
)
SHAPES = layout_shapes(LAYOUTS)
NAMES = ("small", "mixed", "large")
COUNTS = {"small": {"1g": 7}, "mixed": {"3g": 1, "1g": 3}, "large": {"3g": 2}}


def test_profiles_of_a_claim_are_found_in_the_first_layout_that_has_all() -> None:
    places = find_instances(SHAPES, "", 0, ["1g", "3g", "1g"])

    assert places is not None
    assert [(place.layout, place.position, place.profile) for place in places] == [
        ("mixed", 1, "1g"),
        ("mixed", 0, "3g"),
        ("mixed", 2, "1g"),
    ]
    assert find_instances(SHAPES, "", 0, ["3g", "3g", "1g"]) is None


def test_a_device_without_leases_has_the_instances_of_the_first_layout_with_each_profile() -> None:
    assert list(count_free(SHAPES, "", 0).items()) == [("1g", 7), ("3g", 1)]
    assert count_free(SHAPES, "large", 0b01) == {"3g": 1}
    assert count_free(SHAPES, "gone", 0) == {}


@given(layout=st.sampled_from(NAMES), taken=st.integers(0, 127), more=st.integers(0, 2))
def test_as_many_instances_of_a_leased_device_are_found_as_are_counted(
    layout: str, taken: int, more: int
) -> None:
    free = count_free(SHAPES, layout, taken)

    for profile in COUNTS[layout]:
        count = free.get(profile, 0)
        places = find_instances(SHAPES, layout, taken, [profile] * (count + more))
        if more:
            assert places is None
        else:
            assert places is not None
            positions = {place.position for place in places}
            assert len(positions) == count
            assert not any(taken >> position & 1 for position in positions)
