"""Objects of storage as API servers have them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kubernetes.storage_objects import ApiCsiNode
from shared.kubernetes.types import LabelSelector
from shared.pods.node_selectors import labelled_nodes
from shared.pods.storage import Capacity, NodeLimits, Storage, parse_limits


@pytest.mark.parametrize(
    ("spec", "limits"),
    [
        (b'{"drivers": null}', {}),  # as a kubelet without a driver writes it
        (b'{"drivers": [{"name": "disks", "allocatable": {"count": 25}}]}', {"disks": 25}),
        (b'{"drivers": [{"name": "files"}]}', {}),
    ],
)
def test_limits_of_a_node_are_those_of_its_drivers(spec: bytes, limits: dict[str, int]) -> None:
    node = msgspec.json.decode(b'{"metadata": {"name": "a"}, "spec": %b}' % spec, type=ApiCsiNode)

    assert parse_limits(node) == NodeLimits(limits)


CAPACITIES = st.builds(
    Capacity,
    storage_class=st.sampled_from(["disks", "files"]),
    largest=st.integers(0, 4),
    nodes=st.sampled_from([{}, {"zone": "a"}, {"zone": "b"}]).map(
        lambda labels: labelled_nodes(LabelSelector(match_labels=labels))
    ),
)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.none() | CAPACITIES)),
    st.integers(0, 4),
)
def test_the_nodes_for_a_size_are_those_of_capacities_with_room_the_largest_first(
    puts: list[tuple[str, Capacity | None]], size: int
) -> None:
    storage = Storage()
    kept: dict[str, Capacity] = {}
    for name, capacity in puts:
        storage.put_capacity(("kube-system", name), capacity)
        kept.pop(name, None)
        if capacity is not None:
            kept[name] = capacity

    nodes = storage.nodes_for("disks", size)

    with_room = sorted(
        (
            capacity
            for capacity in kept.values()
            if capacity.storage_class == "disks" and capacity.largest >= size
        ),
        key=lambda capacity: (-capacity.largest, capacity.nodes),
    )
    if all(capacity.nodes for capacity in with_room):
        assert nodes is not None
        assert list(nodes) == [capacity.nodes for capacity in with_room]
    else:
        assert nodes is None
