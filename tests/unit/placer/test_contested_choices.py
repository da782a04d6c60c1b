"""While other placers take the same places, a placer chooses nodes that they have not just used."""

import pytest

from shared.model.devices.device import DeviceUse
from shared.model.leases.ledger import LedgerChange, LedgerNode
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.requests.placement import Placement
from shared.model.requests.request import NodeOrder, PodRequest
from shared.placing.index.ranked_nodes import RECENT_CHANGES
from shared.placing.placement import place
from tests.support.build import device, dice, gpu, lease, ledger_node, request, share, use
from tests.support.placer.placing import index_of

POD = request(gpu(memory=1000))


def node(name: str, used_mib: int = 0, cpu: int = 10_000) -> LedgerNode:
    gpu_of_node = device(f"GPU-{name}")
    return ledger_node(
        name,
        (gpu_of_node, use(used_mib)) if used_mib else gpu_of_node,
        allocatable={"cpu": cpu, "memory": 1 << 30, "pods": 100},
    )


def change(**uses: DeviceUse) -> LedgerChange:
    """A change of the ledger in which the devices of these nodes have these totals."""
    devices = {DeviceUuid(f"GPU-{name}"): total for name, total in uses.items()}
    return LedgerChange(position="2", cause="reserved", capacity=1, devices=devices)


class Choices:
    """A placer's choices on its mirror while choices are contested."""

    def __init__(self, *nodes: LedgerNode) -> None:
        self.index = index_of(*nodes)
        self.mirror = self.index.mirror
        self.seed = 0

    def choose(self, wanted: PodRequest = POD) -> Placement:
        self.seed += 1
        answer = place(wanted, self.index, dice(self.seed), contested=True)
        assert isinstance(answer, tuple)
        return answer[0]

    def nodes(self) -> set[str]:
        """Nodes of many choices."""
        return {self.choose().node for _ in range(20)}


def test_nodes_that_others_have_just_used_are_left_to_them() -> None:
    choices = Choices(node("n1", 4000), node("n2", 4000), node("n3", 4000))
    assert choices.nodes() == {"n1", "n2", "n3"}

    choices.mirror.apply([change(n1=use(5000, fence=2))])

    assert choices.nodes() == {"n2", "n3"}


def test_a_node_is_chosen_again_some_changes_after_others_used_it() -> None:
    choices = Choices(node("n1", 4000), node("n2", 4000))
    choices.mirror.apply([change(n1=use(5000, fence=2))])

    choices.mirror.apply([change() for _ in range(RECENT_CHANGES)])
    assert choices.nodes() == {"n2"}

    choices.mirror.apply([change()])
    assert choices.nodes() == {"n1", "n2"}


def test_a_node_whose_first_choice_was_taken_is_left_to_others() -> None:
    choices = Choices(node("n1", 4000), node("n2", 4000))

    choices.mirror.note_contention(NodeName("n1"))

    assert choices.nodes() == {"n2"}


@pytest.mark.parametrize("replied_first", [True, False])
def test_a_placer_stays_on_nodes_that_it_uses_itself(replied_first: bool) -> None:
    choices = Choices(node("n1", 4000), node("n2"))
    pod = PodUid("uid-1")
    choices.mirror.reserve(pod, choices.choose(), POD.resources)
    reply = lease("uid-1", "n1", share("GPU-n1", fence=2))
    totals = change(n1=use(5000, shares=2, fence=2))

    if replied_first:
        choices.mirror.confirm(reply)
    choices.mirror.apply([totals])
    choices.mirror.confirm(reply)

    assert choices.nodes() == {"n1"}


def test_an_idle_node_is_used_only_if_others_have_just_used_all_that_fit() -> None:
    choices = Choices(node("n1", 4000), node("n2", 4000), node("n3"), node("n4"))
    choices.mirror.apply([change(n1=use(5000, fence=2))])
    assert choices.nodes() == {"n2"}

    choices.mirror.apply([change(n2=use(5000, fence=2))])

    choices.mirror.reserve(PodUid("uid-1"), first := choices.choose(), POD.resources)

    assert first.node in {"n3", "n4"}
    assert choices.nodes() == {first.node}


def test_idle_nodes_are_used_that_fit_otherwise() -> None:
    choices = Choices(node("n1", 4000), node("n2", cpu=0), node("n3", cpu=0), node("n4"))
    choices.mirror.note_contention(NodeName("n1"))

    assert choices.nodes() == {"n4"}


def test_where_others_have_just_used_all_nodes_the_best_are_chosen() -> None:
    choices = Choices(node("n1", 4000), node("n2", 4000))
    choices.mirror.apply([change(n1=use(5000, fence=2), n2=use(4500, fence=2))])

    assert choices.nodes() <= {"n1", "n2"}


def test_pods_that_spread_stay_within_one_level_of_fullness() -> None:
    choices = Choices(node("n1"), node("n2", 20000))
    choices.mirror.note_contention(NodeName("n1"))

    spread = request(gpu(memory=1000), node_order=NodeOrder.SPREAD)

    assert {choices.choose(spread).node for _ in range(20)} == {"n1"}
