"""The decision that no node fits is data; its explanation is made from it, and remembered."""

from shared.model.devices.device import DeviceUse
from shared.model.names import DeviceUuid
from shared.placing.index.no_fit import NoFit
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.placement import place
from shared.placing.refusal.refusals import explain
from tests.support.build import device, dice, gpu, ledger_node, request
from tests.support.placer.placing import index_of

WANTED = request(gpu("c", 1, 40_000))


def small_nodes() -> NodeIndex:
    return index_of(ledger_node("n1", device("GPU-1")), ledger_node("n2", device("GPU-2")))


def test_a_refusal_is_data_until_it_is_explained() -> None:
    index = small_nodes()

    decision = place(WANTED, index, dice(1))

    assert isinstance(decision, NoFit)
    assert {code: nodes.bit_count() for (code, _), nodes in decision.excluded.items()} == {
        "InsufficientGpuMemory": 2
    }
    assert index.explanations == {}
    refusal = explain(WANTED, index, decision)
    assert refusal.reason == "0/2 nodes are available: 2 Insufficient GPU memory."
    assert dict(refusal.counts) == {"InsufficientGpuMemory": 2}


def test_an_equal_request_gets_the_same_words_until_something_changes() -> None:
    index = small_nodes()
    first = place(WANTED, index, dice(1))
    assert isinstance(first, NoFit)
    refusal = explain(WANTED, index, first)

    again = place(WANTED, index, dice(1))

    assert isinstance(again, NoFit)
    assert explain(WANTED, index, again) is refusal
    used = DeviceUse(memory_mib=1, shares=1, fence=1)
    index.mirror.update_device_use(DeviceUuid("GPU-1"), used)
    changed = place(WANTED, index, dice(1))
    assert isinstance(changed, NoFit)
    assert changed.excluded
    assert explain(WANTED, index, changed) is not refusal
    assert index.explanations.keys() == {placement_key(WANTED)}
