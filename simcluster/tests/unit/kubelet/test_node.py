"""The status of a node."""

from simcluster.kubelet.node import node_status
from simcluster.kubelet.settings import NodeSettings


def test_patched_capacity_stays_and_patched_allocatable_does_not() -> None:
    previous = {"capacity": {"example.com/mib": "5"}, "allocatable": {"example.com/other": "1"}}
    slot = "example.com/slot"
    status = node_status(
        "n", NodeSettings(), port=1, previous=previous, counts=({slot: 3}, {slot: 2}), now=0.0
    )

    assert (status["capacity"][slot], status["allocatable"][slot]) == ("3", "2")
    assert status["allocatable"]["example.com/mib"] == "5"
    assert "example.com/other" not in status["allocatable"]
