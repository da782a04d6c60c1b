"""What the watcher makes of pods that name a group, and of PodGroups that come, change and go."""

from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from services.watcher import pod_groups
from services.watcher.pod_groups import KnownGroup, PodGroupChanges, known_group, unreadable_groups
from services.watcher.pod_tracker import PodEvent, PodTracker
from shared.dialects.gang_topologies import GangTopology
from shared.dialects.pod_groups import PodGroupKind, PodGroupReference, parse_pod_group
from shared.kubernetes.types import PodGroup
from shared.model.errors import RequestError
from shared.model.events.pod_events import PodQueued, PodRejected
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.requests.request import Gang, PodRequest
from shared.pods.observed_pod import ObservedPod

VOLCANO = PodGroupKind.VOLCANO
NS = Namespace("ns")
WAITING = ObservedPod(
    pod=PodUid("u1"),
    namespace=NS,
    name="p",
    resource_version="5",
    ours=True,
    request=PodRequest(priority=1),
    group=PodGroupReference(name="ns/g", kind=VOLCANO),
)
NONE_LISTED = PodGroupChanges(kind=VOLCANO, synced=True)


def group(size: int | None) -> PodGroupChanges:
    known = KnownGroup(min_member=size) if size is not None else None
    return PodGroupChanges(kind=VOLCANO, groups=(("ns/g", known),))


def apply(pods: PodTracker, changes: PodGroupChanges) -> list[PodEvent]:
    return pods.update_groups(changes, 7)


def gangs(events: list[PodEvent]) -> list[Gang | str | None]:
    return [e.request.gang if isinstance(e, PodQueued) else type(e).__name__ for e in events]


@pytest.mark.parametrize(
    ("annotations", "labels", "named"),
    [
        ({}, {}, None),
        ({"scheduling.k8s.io/group-name": "g"}, {}, PodGroupReference(name="ns/g", kind=VOLCANO)),
        (
            {"scheduling.volcano.sh/group-name": "g"},
            {},
            PodGroupReference(name="ns/g", kind=VOLCANO),
        ),
        (
            {},
            {"scheduling.x-k8s.io/pod-group": "g"},
            PodGroupReference(name="ns/g", kind=PodGroupKind.COSCHEDULING),
        ),
        (
            {},
            {"pod-group.scheduling.sigs.k8s.io": "g"},
            PodGroupReference(name="ns/g", kind=PodGroupKind.COSCHEDULING),
        ),
        (
            {
                "gang.scheduling.koordinator.sh/name": "k",
                "gang.scheduling.koordinator.sh/min-available": "3",
                "scheduling.k8s.io/group-name": "g",
            },
            {},
            PodGroupReference(name="ns/k", min_member=3),
        ),
        (
            {},
            {
                "pod-group.scheduling.sigs.k8s.io/name": "l",
                "pod-group.scheduling.sigs.k8s.io/min-available": "2",
            },
            PodGroupReference(name="ns/l", min_member=2),
        ),
    ],
)
def test_a_group_is_named_in_any_dialect(
    annotations: dict[str, str], labels: dict[str, str], named: PodGroupReference | None
) -> None:
    assert parse_pod_group(NS, annotations, labels) == named


@pytest.mark.parametrize(
    ("notes", "reason"),
    [
        ({"min-available": "0"}, "a whole number from 1 to 999999, got '0'"),
        ({"min-available": "two"}, "a whole number from 1 to 999999, got 'two'"),
        ({"min-available": "-1"}, "a whole number from 1 to 999999, got '-1'"),
        ({"min-available": "9" * 500}, r"got .9{100}.\.\.\. with 500 characters"),
        ({"min-available": "٣"}, "a whole number from 1 to 999999"),
        ({"min-available": ""}, "a whole number from 1 to 999999, got ''"),
        ({"min-available": None}, "name needs .*/min-available beside it"),
        ({"name": None}, "min-available needs .*/name beside it"),
        ({"name": "k|x"}, "a name of at most 253 small letters"),
        ({"name": "K"}, "a name of at most 253 small letters"),
        ({"mode": "NonStrict"}, "NonStrict is not supported"),
        ({"mode": "strict"}, "Strict or NonStrict, got 'strict'"),
        ({"total-number": "1"}, "a whole number from 2 to 999999, got '1'"),
        ({"waiting-time": "soon"}, "a duration such as 90s"),
        ({"match-policy": "only-waiting"}, "waiting-and-running or once-satisfied"),
        ({"groups": '["ns/k","ns/other"]'}, "names ns/other"),
        ({"groups": "ns/k"}, "groups is not JSON"),
        ({"groups": "{}"}, "a JSON list of texts"),
        ({"network-topology-spec": "{}"}, "is not supported"),
    ],
)
def test_a_gang_that_cannot_be_is_refused_with_the_reason(
    notes: dict[str, str | None], reason: str
) -> None:
    whole = {"name": "k", "min-available": "2"} | notes
    prefix = "gang.scheduling.koordinator.sh/"
    annotations = {prefix + key: text for key, text in whole.items() if text is not None}

    with pytest.raises(RequestError, match=reason):
        parse_pod_group(NS, annotations, {})


def test_a_gang_may_have_what_changes_nothing_here() -> None:
    prefix = "gang.scheduling.koordinator.sh/"
    notes = {
        "name": "k",
        "min-available": "2",
        "total-number": "3",
        "mode": "Strict",
        "waiting-time": "1h30m",
        "match-policy": "once-satisfied",
        "groups": '["ns/k"]',
    }

    found = parse_pod_group(NS, {prefix + key: text for key, text in notes.items()}, {})

    assert found == PodGroupReference(name="ns/k", min_member=2)


def test_a_pod_is_not_published_until_pod_groups_have_been_listed() -> None:
    pods = PodTracker()

    first = pods.update(WAITING, None)
    listed = apply(pods, replace(group(4), synced=True))

    assert first == []
    assert gangs(listed) == [Gang(name="ns/g", min_member=4)]
    assert pods.update(structs.replace(WAITING, resource_version="6"), WAITING) == []


def test_a_pod_of_a_missing_group_is_rejected_and_queued_once_the_group_exists() -> None:
    pods = PodTracker()
    apply(pods, NONE_LISTED)

    (missing,) = pods.update(WAITING, None)

    assert isinstance(missing, PodRejected)
    assert "PodGroup g (scheduling.volcano.sh), which does not exist" in missing.reason
    [there] = apply(pods, group(2))
    assert gangs([there]) == [Gang(name="ns/g", min_member=2)]
    assert isinstance(there, PodQueued)
    assert there.requeue_number == -7


def test_where_the_kind_is_not_installed_pods_are_placed_one_by_one() -> None:
    pods = PodTracker()
    pods.update(WAITING, None)

    events = apply(pods, PodGroupChanges(kind=VOLCANO, absent=True))

    assert gangs(events) == [None]
    assert gangs(apply(pods, NONE_LISTED)) == ["PodRejected"]


def test_pods_of_an_unreadable_group_are_not_placed_one_by_one() -> None:
    pods = PodTracker()
    pods.update(WAITING, None)

    (event,) = apply(pods, unreadable_groups(VOLCANO, "403 Forbidden"))

    assert isinstance(event, PodRejected)
    assert event.reason.endswith("cannot be read: 403 Forbidden")


def test_a_changed_minimum_queues_the_waiting_members_again() -> None:
    pods = PodTracker()
    apply(pods, replace(group(4), synced=True))
    other = structs.replace(
        WAITING, pod=PodUid("u2"), group=PodGroupReference(name="ns/other", kind=VOLCANO)
    )
    for pod in (WAITING, structs.replace(WAITING, pod=PodUid("u3")), other):
        pods.update(pod, None)
    pods.update(structs.replace(WAITING, pod=PodUid("u3"), deleting=True), WAITING)

    events = apply(pods, group(2))

    assert [(getattr(e, "pod", ""), g) for e, g in zip(events, gangs(events), strict=True)] == [
        ("u1", Gang(name="ns/g", min_member=2))
    ]
    assert apply(pods, group(2)) == []


def test_a_pod_with_its_own_min_member_needs_no_pod_group() -> None:
    own = structs.replace(WAITING, group=PodGroupReference(name="ns/k", min_member=3))

    assert gangs(PodTracker().update(own, None)) == [Gang(name="ns/k", min_member=3)]


def test_an_invalid_request_is_reported_before_a_missing_group() -> None:
    faulty = structs.replace(WAITING, request=None, request_error="cores 101")

    (event,) = PodTracker().update(faulty, None)

    assert isinstance(event, PodRejected)
    assert event.reason == "cores 101"


def test_an_absent_kind_is_requested_when_a_pod_names_its_group() -> None:
    pods = PodTracker()
    apply(pods, PodGroupChanges(kind=VOLCANO, absent=True))
    assert pods.groups.absent_kinds([WAITING, None]) == {VOLCANO}
    assert pods.groups.absent_kinds([structs.replace(WAITING, group=None)]) == frozenset()

    pods.groups.await_list(VOLCANO)

    assert pods.update(WAITING, None) == []
    assert gangs(apply(pods, replace(group(2), synced=True))) == [Gang(name="ns/g", min_member=2)]
    assert pods.groups.absent_kinds([WAITING]) == frozenset()


def test_a_group_of_more_pods_than_can_be_counted_is_refused() -> None:
    pods = PodTracker()
    apply(pods, NONE_LISTED)
    apply(pods, group(10**12))

    (rejected,) = pods.update(WAITING, None)

    assert isinstance(rejected, PodRejected)
    assert (
        "pod group ns/g: a field is out of its bounds: Expected `int` <= 999999" in rejected.reason
    )


def test_pods_that_another_scheduler_has_placed_count_until_they_fail_or_are_deleted() -> None:
    pods = PodTracker()
    apply(pods, NONE_LISTED)
    apply(pods, group(3))
    pods.update(WAITING, None)
    launcher = structs.replace(WAITING, pod=PodUid("u2"), ours=False, request=None)
    bound = structs.replace(launcher, node=NodeName("n1"))
    succeeded, failed = (structs.replace(bound, phase=each) for each in ("Succeeded", "Failed"))

    def gang_after(now: ObservedPod | None, before: ObservedPod | None) -> list[Gang | str | None]:
        if now is not None:
            pods.update(now, before)
        elif before is not None:
            pods.remove(before)
        return gangs(pods.update_members(8))

    two_more = Gang(name="ns/g", min_member=2, placed_elsewhere=1)
    assert gang_after(launcher, None) == []
    assert gang_after(bound, launcher) == [two_more]
    assert gang_after(succeeded, bound) == []
    assert gang_after(failed, succeeded) == [Gang(name="ns/g", min_member=3)]
    assert gang_after(bound, failed) == [two_more]
    assert gang_after(None, bound) == [Gang(name="ns/g", min_member=3)]
    by_kube_scheduler = structs.replace(bound, ours=True, by_kube_scheduler=True)
    assert gang_after(by_kube_scheduler, None) == [two_more]


KUBERNETES = PodGroupKind.KUBERNETES
KUBERNETES_POD = structs.replace(WAITING, group=PodGroupReference(name="ns/g", kind=KUBERNETES))


def kubernetes_group(**spec: object) -> PodGroupChanges:
    """Return the listed PodGroup ns/g of scheduling.k8s.io."""
    document = {"metadata": {"name": "g", "namespace": "ns"}, "spec": spec}
    known = known_group(KUBERNETES, msgspec.convert(document, PodGroup))
    return PodGroupChanges(kind=KUBERNETES, groups=(("ns/g", known),), synced=True)


@pytest.mark.parametrize(
    ("spec", "gang", "priority"),
    [
        (
            {"schedulingPolicy": {"gang": {"minCount": 3}}},
            Gang(name="ns/g", min_member=3),
            WAITING.request and WAITING.request.priority,
        ),
        (
            {"schedulingPolicy": {"gang": {"minCount": 3}}, "priority": 7},
            Gang(name="ns/g", min_member=3),
            7,
        ),
        ({"schedulingPolicy": {"basic": {}}, "priority": -5}, None, -5),
    ],
    ids=["gang", "gang with a priority", "basic"],
)
def test_a_pod_group_of_kubernetes_has_minimum_and_priority(
    spec: dict[str, object], gang: Gang | None, priority: int
) -> None:
    pods = PodTracker()
    pods.update(KUBERNETES_POD, None)

    (queued,) = apply(pods, kubernetes_group(**spec))

    assert isinstance(queued, PodQueued)
    assert (queued.request.gang, queued.request.priority) == (gang, priority)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            kubernetes_group(
                schedulingPolicy={"gang": {"minCount": 2}},
                schedulingConstraints={"distance": 2},
            ),
            "PodGroup g has spec.schedulingConstraints that Leasehold cannot obey (Object contains "
            "unknown field `distance`): create it without",
        ),
        (
            kubernetes_group(schedulingPolicy={"gang": {"minCount": 10**7}}),
            "pod group ns/g: a field is out of its bounds",
        ),
        (
            kubernetes_group(schedulingPolicy={"basic": {}}, priority=2**40),
            "pod group ns/g: a field is out of its bounds",
        ),
        (PodGroupChanges(kind=KUBERNETES, synced=True), "which does not exist in namespace ns"),
    ],
    ids=["constraints", "too many", "priority", "missing"],
)
def test_a_pod_of_a_pod_group_that_cannot_be_obeyed_waits_with_the_reason(
    changes: PodGroupChanges, reason: str
) -> None:
    pods = PodTracker()
    pods.update(KUBERNETES_POD, None)

    (rejected,) = apply(pods, changes)

    assert isinstance(rejected, PodRejected)
    assert reason in rejected.reason


RACK = "example.com/rack"
ZONE = "topology.kubernetes.io/zone"
IN_ONE_RACK = {"kueue.x-k8s.io/podset-required-topology": RACK}


@pytest.mark.parametrize(
    ("annotations", "topology"),
    [
        (IN_ONE_RACK, GangTopology(required=(RACK,))),
        ({"kueue.x-k8s.io/podset-preferred-topology": RACK}, GangTopology(preferred=(RACK,))),
        ({"kai.scheduler/topology-required-placement": ZONE}, GangTopology(required=(ZONE,))),
        (
            {
                "kai.scheduler/topology": "cluster",
                "kai.scheduler/topology-required-placement": ZONE,
                "kai.scheduler/topology-preferred-placement": "rack",
            },
            GangTopology((ZONE,), ("rack",)),
        ),
        ({"kueue.x-k8s.io/podset-unconstrained-topology": "true"}, GangTopology()),
    ],
)
def test_the_labels_that_a_gang_shares_are_named_in_any_dialect(
    annotations: dict[str, str], topology: GangTopology
) -> None:
    named = parse_pod_group(NS, {"scheduling.k8s.io/group-name": "g", **annotations}, {})

    assert named == PodGroupReference(name="ns/g", kind=VOLCANO, topology=topology)
    assert parse_pod_group(NS, annotations, {}) is None


@pytest.mark.parametrize(
    ("annotations", "reason"),
    [
        ({"kueue.x-k8s.io/podset-required-topology": "a b"}, "must be the key of a label of nodes"),
        ({"kueue.x-k8s.io/podset-preferred-topology": ""}, "must be the key of a label of nodes"),
        ({"kai.scheduler/topology-required-placement": "/rack"}, "the key of a label of nodes"),
        ({"kai.scheduler/topology-preferred-placement": "x/" + "y" * 64}, "the key of a label"),
        ({"kai.scheduler/segment-size": "4"}, "segment-size is not supported: make a gang of each"),
    ],
)
def test_a_topology_that_cannot_be_is_refused_with_the_reason(
    annotations: dict[str, str], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        parse_pod_group(NS, {"scheduling.k8s.io/group-name": "g", **annotations}, {})


def in_rack(pod: ObservedPod) -> ObservedPod:
    assert pod.group is not None
    return structs.replace(
        pod, group=replace(pod.group, topology=GangTopology(required=(RACK,), preferred=(ZONE,)))
    )


@pytest.mark.parametrize(
    ("changes", "min_member"),
    [
        (group(4), 4),
        (PodGroupChanges(kind=VOLCANO, absent=True), 1),
    ],
    ids=["with a PodGroup", "without the kind"],
)
def test_a_gang_has_the_topology_that_its_pods_name(
    changes: PodGroupChanges, min_member: int
) -> None:
    pods = PodTracker()
    pods.update(in_rack(WAITING), None)

    events = [*apply(pods, changes), *apply(pods, NONE_LISTED if min_member > 1 else changes)]

    assert gangs(events)[:1] == [
        Gang(
            name="ns/g",
            min_member=min_member,
            required_topology=(RACK,),
            preferred_topology=(ZONE,),
        )
    ]


@pytest.mark.parametrize(
    ("policy", "min_member"), [({"gang": {"minCount": 3}}, 3), ({"basic": {}}, 1)]
)
def test_a_pod_group_of_kubernetes_has_a_topology(
    policy: dict[str, object], min_member: int
) -> None:
    pods = PodTracker()
    pods.update(KUBERNETES_POD, None)

    (queued,) = apply(
        pods,
        kubernetes_group(
            schedulingPolicy=policy, schedulingConstraints={"topology": [{"key": RACK}]}
        ),
    )

    assert isinstance(queued, PodQueued)
    assert queued.request.gang == Gang(
        name="ns/g", min_member=min_member, required_topology=(RACK,)
    )


@pytest.mark.parametrize(
    ("topology", "error"),
    [
        (None, ""),
        ({"mode": "soft", "highestTierAllowed": 1}, ""),
        ({"mode": "hard", "highestTierAllowed": 1}, "Leasehold does not read HyperNodes"),
        ({"highestTierAllowed": 2}, "Leasehold does not read HyperNodes"),
    ],
)
def test_hyper_nodes_that_a_gang_requires_are_not_ignored(
    topology: dict[str, object] | None, error: str
) -> None:
    spec = {"minMember": 2, "networkTopology": topology}
    volcano = msgspec.convert({"metadata": {"name": "g"}, "spec": spec}, PodGroup)

    known = known_group(VOLCANO, volcano)

    assert known.min_member == 2
    assert error in known.error
    assert bool(error) == bool(known.error)


def test_a_namespace_with_too_many_groups_leaves_out_its_own_and_its_pods_have_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pod_groups, "MOST_OF_NAMESPACE", 2)
    pods = PodTracker()
    group = KnownGroup(min_member=3)
    many = tuple((f"flood/g{number}", group) for number in range(3))
    apply(pods, replace(NONE_LISTED, groups=(*many, ("ns/g", group))))

    in_flood = structs.replace(
        WAITING,
        pod=PodUid("u2"),
        namespace=Namespace("flood"),
        group=PodGroupReference(name="flood/g2", kind=VOLCANO),
    )
    (rejected,) = pods.update(in_flood, None)

    assert gangs(pods.update(WAITING, None)) == [Gang(name="ns/g", min_member=3)]
    assert isinstance(rejected, PodRejected)
    assert rejected.reason == (
        "the pod belongs to PodGroup g2 (scheduling.volcano.sh), which does not exist in namespace "
        "flood, or is not kept: the watcher keeps at most 100000 podgroups.scheduling.volcano.sh, "
        "and 2 of a namespace, large ones count as several: delete those that are not needed, and "
        "restart it"
    )
    apply(pods, PodGroupChanges(kind=VOLCANO, groups=(("flood/g0", None), ("flood/g2", group))))
    assert pods.groups.get(VOLCANO, "flood/g2") == group
