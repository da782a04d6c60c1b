"""What a pod requires of its node, by the rules of kube-scheduler."""

from typing import Any

import pytest

from shared.model.devices.node import CORDON_PREFIX, Taint
from shared.model.requests.request import (
    NodeRequirements,
    NodeTerm,
    Toleration,
    VolumeRequirement,
    VolumeRule,
)
from shared.placing.node_filters import (
    ATTACHABLE,
    UNSCHEDULABLE,
    NodeFilterFailure,
    check_all,
    check_node,
    check_resources,
    check_served,
    free_resources,
    has_no_node_constraints,
    has_too_little,
    matches_term,
    preference,
    reaches,
    tolerates,
)
from tests.support.build import facts, gpu, request

GPU_TAINT = Taint(key="gpu", value="yes", effect="NoSchedule")


def code_of(blocked: NodeFilterFailure | None) -> str | None:
    return None if blocked is None else blocked.code


@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        (Toleration(key="gpu", value="yes", effect="NoSchedule"), True),
        (Toleration(key="gpu", value="yes"), True),
        (Toleration(key="gpu", value="no"), False),
        (Toleration(key="gpu", operator="Exists"), True),
        (Toleration(key="gpu", operator="Exists", effect="NoExecute"), False),
        (Toleration(operator="Exists"), True),
        (Toleration(operator="Exists", effect="NoSchedule"), True),
        (Toleration(operator="Equal"), False),
        (Toleration(key="gpu", operator="", value="yes"), True),
        (Toleration(key="gpu", operator="Other", value="yes"), False),
        (Toleration(key="other", operator="Exists"), False),
    ],
)
def test_a_toleration_matches_a_taint(toleration: Toleration, covers: bool) -> None:
    assert tolerates(toleration, GPU_TAINT) == covers


@pytest.mark.parametrize(
    ("effect", "blocks"), [("NoSchedule", True), ("NoExecute", True), ("PreferNoSchedule", False)]
)
def test_only_hard_taints_block(effect: str, blocks: bool) -> None:
    node = facts(taints=(Taint(key="gpu", value="yes", effect=effect),))

    blocked = check_node(NodeRequirements(), node)

    assert (blocked is not None) == blocks
    if blocked is not None:
        assert blocked.message == "node(s) had untolerated taint {gpu: yes}"


def test_a_cordoned_node_is_a_tainted_node() -> None:
    node = facts(unschedulable=True)
    tolerant = NodeRequirements(tolerations=(Toleration(key=UNSCHEDULABLE.key, operator="Exists"),))

    assert code_of(check_node(NodeRequirements(), node)) == "NodeUnschedulable"
    assert check_node(tolerant, node) is None


def test_a_node_selector_must_match_every_label() -> None:
    node = facts(labels={"zone": "a", "gpu": "t4"})

    assert check_node(NodeRequirements(selector=(("gpu", "t4"), ("zone", "a"))), node) is None
    missed = check_node(NodeRequirements(selector=(("gpu", "t4"), ("zone", "b"))), node)
    assert missed == NodeFilterFailure(
        "NodeAffinity",
        "node(s) didn't match Pod's node affinity/selector",
        "zone=b is required, it has a",
    )


@pytest.mark.parametrize(
    ("operator", "values", "holds", "holds_without_label"),
    [
        ("In", ("4", "5"), True, False),
        ("In", ("5",), False, False),
        ("NotIn", ("5",), True, True),
        ("NotIn", ("4",), False, True),
        ("Exists", (), True, False),
        ("DoesNotExist", (), False, True),
        ("Gt", ("3",), True, False),
        ("Gt", ("4",), False, False),
        ("Lt", ("5",), True, False),
        ("Lt", ("4",), False, False),
        ("Gt", ("x",), False, False),
        *(("Gt", (text,), False, False) for text in ("0_1", "\uff11", " 1", "1.0", "0" * 5000)),
        ("Gt", ("+1",), True, False),
        ("Gt", (), False, False),
        ("Near", ("4",), False, False),
    ],
)
def test_node_affinity_matches_by_each_operator(
    operator: str, values: tuple[str, ...], holds: bool, holds_without_label: bool
) -> None:
    need = NodeTerm(key="cards", operator=operator, values=values)

    assert matches_term((need,), facts(labels={"cards": "4"})) == holds
    assert matches_term((need,), facts()) == holds_without_label


def test_terms_are_alternatives_and_their_requirements_go_together() -> None:
    here, there = (NodeTerm(key="zone", operator="In", values=(zone,)) for zone in "ab")
    fast = NodeTerm(key="fast", operator="Exists")
    node = facts(labels={"zone": "a"})

    assert check_node(NodeRequirements(required=((there,), (here,))), node) is None
    assert check_node(NodeRequirements(required=((here, fast),)), node) is not None
    assert check_node(NodeRequirements(required=((),)), node) is not None


def test_a_field_requirement_compares_the_name_of_the_node() -> None:
    need = NodeTerm(key="metadata.name", operator="In", values=("n1",), field=True)
    other = NodeTerm(key="spec.podCIDR", operator="Exists", field=True)

    assert matches_term((need,), facts("n1"))
    assert not matches_term((need,), facts("n2", labels={"metadata.name": "n1"}))
    assert not matches_term((other,), facts("n1"))


def test_the_preference_is_the_sum_of_weights_minus_soft_taints() -> None:
    liked = NodeTerm(key="zone", operator="Exists")
    demands = NodeRequirements(preferred=((30, (liked,)), (50, (liked,)), (7, ())))
    soft = (Taint(key="slow", effect="PreferNoSchedule"),)

    assert preference(demands, facts(labels={"zone": "a"})) == 80
    assert preference(demands, facts(labels={"zone": "a"}, taints=soft)) == 70
    assert preference(demands, facts()) == 0


def test_constraints_that_are_not_supported_are_refused_by_name() -> None:
    blocked = check_node(NodeRequirements(unsupported=("podAffinity",)), facts())

    assert blocked is not None
    assert blocked.code == "UnsupportedConstraint"
    assert "podAffinity" in blocked.message


def test_free_resources_exclude_leases_and_other_pods() -> None:
    node = facts(allocatable={"cpu": 4000, "pods": 3}, used_by_others={"cpu": 1000, "pods": 1})
    free = free_resources(node, {"cpu": 2500, "pods": 1})

    assert free == {"cpu": 500, "pods": 1}
    assert check_resources({"cpu": 500, "pods": 1}, free) is None
    assert not has_too_little(free, {"cpu": 500, "pods": 1})
    assert check_resources({"cpu": 501}, free) == NodeFilterFailure(
        "InsufficientCpu", "Insufficient cpu", "501m of cpu requested, 500m free"
    )
    assert has_too_little(free, {"cpu": 501})


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("memory", "InsufficientMemory", "Insufficient memory"),
        ("ephemeral-storage", "InsufficientEphemeralStorage", "Insufficient ephemeral-storage"),
        ("pods", "TooManyPods", "Too many pods"),
        ("example.com/fpga", "InsufficientExampleComFpga", "Insufficient example.com/fpga"),
    ],
)
def test_a_resource_that_a_node_does_not_list_counts_as_zero(
    name: str, code: str, text: str
) -> None:
    blocked = check_resources({name: 1}, {})

    assert blocked is not None
    assert (blocked.code, blocked.message) == (code, text)
    assert check_resources({name: 0}, {}) is None


def test_a_node_whose_agent_is_not_ready_is_refused_with_the_reason() -> None:
    blocked = check_served(
        ("volcano.sh/vgpu-number",), frozenset({f"{CORDON_PREFIX}its agent hangs"})
    )

    assert blocked is not None
    assert (blocked.code, blocked.numbers) == ("NodeAgentNotReady", "its agent hangs")
    assert check_served((), frozenset({f"{CORDON_PREFIX}its agent hangs"})) is None


def test_the_reason_of_a_closed_node_names_no_pod_to_those_who_wait() -> None:
    """They may be of another namespace."""
    why = "pod team-b/web-0 is bound to the node, and the kubelet has not requested its devices yet"
    blocked = check_served(("volcano.sh/vgpu-number",), frozenset({CORDON_PREFIX + why}))

    assert blocked is not None
    assert (blocked.code, blocked.numbers) == ("NodeAgentNotReady", "")


def test_the_first_reason_is_the_most_permanent_one() -> None:
    node = facts(taints=(GPU_TAINT,), allocatable={})

    assert code_of(check_all(request(gpu(memory=1)), node, {}, frozenset())) == "UntoleratedTaint"


def in_zone(*zones: str) -> tuple[NodeTerm, ...]:
    return (NodeTerm(key="topology.kubernetes.io/zone", operator="In", values=zones),)


def needs(*terms: tuple[NodeTerm, ...], rule: VolumeRule) -> VolumeRequirement:
    return VolumeRequirement(rule=rule, terms=terms)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (VolumeRule.NODE_AFFINITY, "node(s) didn't match PersistentVolume's node affinity"),
        (VolumeRule.ZONE, "node(s) had no available volume zone"),
        (VolumeRule.NO_VOLUME, "node(s) didn't find available persistent volumes to bind"),
        (VolumeRule.STORAGE, "node(s) did not have enough free storage"),
        (VolumeRule.IN_USE, "node(s) were not where the pod's ReadWriteOnce volume is in use"),
    ],
)
def test_a_node_that_does_not_reach_a_volume_is_refused_in_the_words_of_kube_scheduler(
    rule: VolumeRule, text: str
) -> None:
    node = facts(labels={"topology.kubernetes.io/zone": "a"})
    either = NodeRequirements(volumes=(needs(in_zone("b"), in_zone("a", "c"), rule=rule),))
    elsewhere = NodeRequirements(volumes=(needs(in_zone("b"), in_zone("c"), rule=rule),))
    nowhere = NodeRequirements(volumes=(needs(rule=rule),))

    assert check_node(either, node) is None
    assert check_node(elsewhere, node) == NodeFilterFailure(rule, text)
    assert check_node(nowhere, node) == NodeFilterFailure(rule, text)


def test_all_volumes_of_a_pod_must_be_reached() -> None:
    here = needs(in_zone("a"), rule=VolumeRule.ZONE)
    there = needs(in_zone("b"), rule=VolumeRule.STORAGE)
    node = facts(labels={"topology.kubernetes.io/zone": "a"})

    assert code_of(check_node(NodeRequirements(volumes=(here, there)), node)) == "NotEnoughStorage"
    assert not has_no_node_constraints(NodeRequirements(volumes=(here,)))


class CountedLabels(dict[str, str]):
    """Labels that count how often one of them is compared."""

    compared = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.compared += 1
        return super().get(key, default)


def test_a_node_is_compared_once_with_a_thousand_local_volumes() -> None:
    hosts = [(NodeTerm(key="host", operator="In", values=(f"n{n}",)),) for n in range(1000)]
    local = VolumeRequirement(rule=VolumeRule.NO_VOLUME, terms=tuple(hosts))
    demands = NodeRequirements(volumes=(local,))
    last, other = (facts(labels=CountedLabels(host=name)) for name in ("n999", "n1000"))

    assert code_of(check_node(demands, last)) is None
    assert code_of(check_node(demands, other)) == VolumeRule.NO_VOLUME
    for node in (last, other):
        assert isinstance(node.labels, CountedLabels)
        assert node.labels.compared == 1


def test_a_volume_without_node_affinity_is_reached_from_everywhere() -> None:
    node = facts(labels={"topology.kubernetes.io/zone": "a"})

    assert reaches(node, ())
    assert reaches(node, (in_zone("b"), in_zone("a")))
    assert not reaches(node, (in_zone("b"),))


def test_a_node_with_the_most_volumes_that_its_driver_attaches_is_refused() -> None:
    name = f"{ATTACHABLE}ebs.csi.aws.com"

    assert check_resources({name: 1}, {name: 1}) is None
    assert check_resources({name: 2}, {name: 1}) == NodeFilterFailure(
        "TooManyVolumes",
        "node(s) exceed max volume count",
        f"2 of {name} requested, 1 free",
    )


def test_no_node_fits_a_pod_that_waits_for_something_else() -> None:
    waits = NodeRequirements(waits_for='persistentvolumeclaim "home" not found: create it')

    assert check_node(waits, facts()) == NodeFilterFailure(
        "ClaimNotReady", 'persistentvolumeclaim "home" not found'
    )
    assert not has_no_node_constraints(waits)
