"""The mirror applies changes that were read together."""

from shared.model.devices.device import DeviceUse
from shared.model.leases.ledger import LedgerChange, LedgerNode
from shared.model.names import DeviceUuid, NodeName
from shared.placing.mirror.cluster_mirror import ClusterMirror
from tests.support.build import device, ledger_node, use

GPU = DeviceUuid("GPU-a")
N1 = NodeName("n1")


def change(
    *nodes: LedgerNode, devices: dict[DeviceUuid, DeviceUse] | None = None, removed: bool = False
) -> LedgerChange:
    return LedgerChange(
        position="2",
        cause="test",
        capacity=1,
        nodes=nodes,
        devices=devices or {},
        removed=(N1,) if removed else (),
    )


def test_totals_that_are_read_together_change_a_node_once() -> None:
    mirror = ClusterMirror()
    mirror.reset([ledger_node("n1", device())])
    before = mirror.changes.end

    mirror.apply([change(devices={GPU: use(1_000 * n, fence=n)}) for n in range(1, 9)])

    assert mirror.nodes[N1].devices[0].used_mib == 8_000
    assert mirror.changes.end == before + 1


def test_totals_of_a_node_that_is_removed_and_added_again_are_those_that_follow() -> None:
    mirror = ClusterMirror()
    mirror.reset([ledger_node("n1", device())])

    mirror.apply(
        [
            change(devices={GPU: use(1_000, fence=5)}),
            change(removed=True),
            change(ledger_node("n1", device())),
        ]
    )

    assert mirror.nodes[N1].devices[0].used_mib == 0
