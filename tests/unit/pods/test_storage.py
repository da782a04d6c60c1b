"""Objects of storage as API servers have them."""

import msgspec
import pytest

from shared.kubernetes.storage_objects import ApiCsiNode
from shared.pods.storage import NodeLimits, parse_limits


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
