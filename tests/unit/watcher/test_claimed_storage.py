"""When pods with claims wait, are queued, and are queued again."""

from typing import Any

import msgspec
import pytest

from services.watcher import claimed_storage
from services.watcher.claimed_storage import (
    StorageChanges,
    StorageKind,
    StorageObject,
    unreadable_storage,
)
from services.watcher.node_trackers import NodeTracker
from services.watcher.pod_tracker import PodEvent, PodTracker
from shared.dialects.dialect import Rules
from shared.kubernetes.types import ApiPod
from shared.model.bounds import MOST
from shared.model.events.pod_events import PodQueued, PodRejected
from shared.model.names import NodeName
from shared.model.requests.request import NodeTerm, PodClaim, VolumeRule
from shared.pods.observed_pod import ObservedPod
from shared.pods.pod_parser import PodParser
from shared.pods.pod_volumes import ClaimUse
from shared.pods.storage import Claim, Volume
from tests.support.build import facts
from tests.support.storage import (
    HOSTNAME,
    NAMESPACE,
    ZONE,
    Manifest,
    capacity,
    claim,
    csi_node,
    driver,
    in_,
    storage_class,
    storage_of,
    volume,
)

LOCAL = "kubernetes.io/no-provisioner"
PARSER = PodParser(frozenset({"leasehold"}), Rules())


def pod(*claims: str, name: str = "train", **fields: Any) -> ObservedPod:
    volumes = [
        {"name": f"v{number}", "persistentVolumeClaim": {"claimName": claim_name}}
        for number, claim_name in enumerate(claims)
    ]
    annotations = fields.pop("annotations", {})
    spec = {
        "schedulerName": "leasehold",
        "containers": [{"name": "main"}],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *volumes, *fields.pop("volumes", ())],
        **fields,
    }
    metadata = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": f"uid-{name}",
        "annotations": annotations,
    }
    return PARSER.parse(msgspec.convert({"metadata": metadata, "spec": spec}, ApiPod))


def changes(*objects: Manifest, synced: bool = False, kind: StorageKind) -> StorageChanges:
    storage = storage_of(*objects)
    found: dict[StorageKind, dict[Any, StorageObject]] = {
        StorageKind.CLAIM: dict(storage.claims),
        StorageKind.VOLUME: {("", name): found for name, found in storage.volumes.items()},
        StorageKind.CLASS: {("", name): found for name, found in storage.classes.items()},
        StorageKind.DRIVER: {("", name): found for name, found in storage.drivers.items()},
        StorageKind.CAPACITY: dict(storage.capacities),
        StorageKind.CSI_NODE: {("", name): found for name, found in storage.limits.items()},
    }
    return StorageChanges(kind=kind, changed=tuple(found.get(kind, {}).items()), synced=synced)


def listed(*objects: Manifest) -> PodTracker:
    """Return a tracker after the lists of all kinds."""
    tracker = PodTracker()
    for kind in StorageKind:
        tracker.update_storage(changes(*objects, kind=kind, synced=True))
    tracker.update_claiming(1)
    return tracker


def reason(events: list[PodEvent]) -> str:
    [event] = events
    if isinstance(event, PodRejected):
        return event.reason
    assert isinstance(event, PodQueued)
    return event.request.node_requirements.waits_for


def queued(events: list[PodEvent]) -> PodQueued:
    [event] = events
    assert isinstance(event, PodQueued)
    return event


def test_claims_of_a_pod_are_its_volumes_by_name() -> None:
    scratch = {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}

    observed = pod("data", volumes=[scratch])

    assert observed.claims == (ClaimUse("data"), ClaimUse("train-scratch", ephemeral=True))
    assert pod().claims == ()


def test_a_pod_with_a_claim_waits_for_the_lists_of_all_kinds() -> None:
    tracker = PodTracker()

    assert tracker.update(pod("data"), None) == []
    assert queued(tracker.update(pod(name="other"), None)).request.claims == ()
    for kind in StorageKind:
        assert tracker.update_claiming(1) == []
        tracker.update_storage(
            changes(claim("data", "pv"), volume("pv", in_(ZONE, "a")), kind=kind, synced=True)
        )

    request = queued(tracker.update_claiming(2)).request
    assert request.claims == (PodClaim(name="data", uid="uid-data", bound=True),)
    [requirement] = request.node_requirements.volumes
    assert requirement.rule is VolumeRule.NODE_AFFINITY


def test_a_pod_waits_for_a_claim_until_it_is_created() -> None:
    tracker = listed(storage_class())

    waits = reason(tracker.update(pod("data"), None))
    tracker.update_storage(changes(claim("home"), kind=StorageKind.CLAIM))
    unrelated = tracker.update_claiming(2)
    tracker.update_storage(changes(claim("data"), kind=StorageKind.CLAIM))
    created = tracker.update_claiming(3)

    assert waits.startswith('persistentvolumeclaim "data" not found')
    assert unrelated == []
    assert queued(created).request.claims == (
        PodClaim(name="data", uid="uid-data", provisions=True),
    )


def test_only_pods_whose_claims_have_changed_are_looked_at() -> None:
    tracker = listed(storage_class(), claim("data"), claim("home"))
    tracker.update(pod("data"), None)
    tracker.update(pod("home", name="other"), None)

    tracker.update_storage(
        changes(claim("data", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
                kind=StorageKind.CLAIM)
    )  # fmt: skip

    assert tracker.changed_claims == {(NAMESPACE, "data")}
    assert "is being deleted" in reason(tracker.update_claiming(2))
    assert tracker.update_claiming(3) == []


def test_nodes_for_which_no_volume_was_provisioned_come_last() -> None:
    on_n1 = {"annotations": {"volume.kubernetes.io/selected-node": "n1"}}
    tracker = listed(storage_class(), claim("data", metadata=on_n1))
    selected = queued(tracker.update(pod("data"), None))

    tracker.update_storage(changes(claim("data"), kind=StorageKind.CLAIM))
    given_up = queued(tracker.update_claiming(2))
    tracker.update_storage(
        changes(claim("data", "pv"), volume("pv"), kind=StorageKind.VOLUME),
    )
    tracker.update_storage(changes(claim("data", "pv"), kind=StorageKind.CLAIM))
    bound = queued(tracker.update_claiming(3))

    others = NodeTerm(key="metadata.name", operator="NotIn", values=("n1",), field=True)
    assert selected.request.node_requirements.preferred == ()
    assert given_up.request.node_requirements.preferred == ((100, (others,)),)
    assert bound.request.node_requirements.preferred == ()


def test_a_pod_is_published_again_when_a_volume_changes() -> None:
    tracker = listed(claim("data", "pv"), volume("pv", in_(ZONE, "a")))
    before = queued(tracker.update(pod("data"), None))

    tracker.update_storage(changes(volume("pv", in_(ZONE, "b")), kind=StorageKind.VOLUME))
    again = queued(tracker.update_claiming(2))
    tracker.update_storage(changes(volume("pv", in_(ZONE, "b")), kind=StorageKind.VOLUME))

    assert again.request.node_requirements != before.request.node_requirements
    assert again.requeue_number != before.requeue_number
    assert tracker.update_claiming(3) == []


def test_a_pod_that_has_a_node_is_not_published_again() -> None:
    tracker = listed(storage_class(), claim("data"))
    tracker.update(pod("data"), None)
    placed = msgspec.structs.replace(pod("data"), node=NodeName("a"))
    tracker.update(placed, pod("data"))

    tracker.update_storage(changes(claim("data", "pv"), kind=StorageKind.CLAIM))

    assert tracker.claiming_pods == 0
    assert tracker.update_claiming(2) == []


def test_a_pod_follows_those_that_use_its_claim() -> None:
    one_pod = claim("data", "pv", modes="ReadWriteOncePod")
    tracker = listed(one_pod, volume("pv", modes="ReadWriteOncePod"))
    user = msgspec.structs.replace(pod("data", name="user"), node=NodeName("a"))
    ended = msgspec.structs.replace(user, phase="Succeeded")

    free = queued(tracker.update(pod("data"), None))
    tracker.update(user, None)
    taken = tracker.update_claiming(2)
    tracker.update(user, user)
    unchanged = tracker.update_claiming(3)
    tracker.update(ended, user)
    released = tracker.update_claiming(4)
    tracker.remove(ended)

    assert free.request.claims
    assert "already in use by another pod, on node a" in reason(taken)
    assert unchanged == []
    assert queued(released).request == free.request
    assert tracker.storage.users == {}


def test_a_kind_that_cannot_be_read_is_the_reason_of_pods_with_claims_only() -> None:
    tracker = listed(storage_class(), claim("data"))
    tracker.update_storage(unreadable_storage(StorageKind.VOLUME, "403: not allowed"))

    waits = reason(tracker.update(pod("data"), None))
    others = tracker.update(pod(name="other"), None)
    tracker.update_storage(changes(kind=StorageKind.VOLUME, synced=True))

    assert waits == (
        "the pod has PersistentVolumeClaims, and PersistentVolumes cannot be read: 403: not "
        "allowed; apply the manifests of this version, by which the watcher may read them"
    )
    assert queued(others)
    assert queued(tracker.update_claiming(2)).request.claims


def test_requirements_that_are_too_large_are_a_reason() -> None:
    terms = [in_(ZONE, f"{'z' * 250}{number}") for number in range(1025)]
    tracker = listed(claim("data", "pv"), volume("pv", *terms))

    assert "what its volumes require has" in reason(tracker.update(pod("data"), None))


def test_what_cannot_be_parsed_is_the_reason_of_its_pods() -> None:
    tracker = listed(claim("data", "pv"), storage_class())
    unreadable = Claim(name="home", error="no quantity")

    tracker.update_storage(
        StorageChanges(kind=StorageKind.CLAIM, changed=(((NAMESPACE, "home"), unreadable),))
    )
    tracker.update_storage(
        StorageChanges(
            kind=StorageKind.VOLUME, changed=((("", "pv"), Volume(name="pv", error="no size")),)
        )
    )

    home = reason(tracker.update(pod("home", name="home"), None))
    data = reason(tracker.update(pod("data"), None))
    assert home == 'persistentvolumeclaim "home" cannot be read: no quantity'
    assert data == (
        'persistentvolume "pv", to which persistentvolumeclaim "data" is bound, cannot be read: '
        "no size"
    )


def test_claims_and_volumes_beyond_the_bound_are_not_kept_and_that_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claimed_storage, "MOST_STORED", 4)
    monkeypatch.setattr(claimed_storage, "MOST_OF_NAMESPACE", 3)
    names = [f"c{number}" for number in range(6)]
    elsewhere = {"namespace": "other", "uid": "uid"}
    tracker = listed(
        *(claim(name, f"pv-{name}") for name in names[:3]),
        *(volume(f"pv-{name}") for name in ("c0", "c1", "x", "y")),
    )

    tracker.update_storage(
        changes(claim("c3"), claim("c4"), claim("o", metadata=elsewhere), kind=StorageKind.CLAIM)
    )
    tracker.update_storage(changes(volume("pv-c2"), kind=StorageKind.VOLUME))
    kept = queued(tracker.update(pod("c1", name="kept"), None))
    unkept = reason(tracker.update(pod("c3", name="unkept"), None))
    without_volume = reason(tracker.update(pod("c2", name="without-volume"), None))
    tracker.update_storage(
        StorageChanges(kind=StorageKind.CLAIM, changed=(((NAMESPACE, "c0"), None),))
    )
    tracker.update_storage(changes(claim("c3"), kind=StorageKind.CLAIM))

    assert len(tracker.storage.storage.claims) == 4
    assert ("other", "o") in tracker.storage.storage.claims
    assert kept.request.claims
    assert unkept.startswith("its claim does not exist, or is not kept: the watcher keeps at most")
    assert without_volume.startswith("its volume does not exist, or is not kept: the watcher keeps")
    assert "unbound immediate" in reason(tracker.update_claiming(2)[:1])
    assert left_out(tracker) == {StorageKind.CLAIM: {NAMESPACE}, StorageKind.VOLUME: {""}}


def left_out(tracker: PodTracker) -> dict[StorageKind, set[str]]:
    return {kind: room.left_out for kind, room in tracker.storage.rooms.items() if room.left_out}


def test_a_claim_that_is_missing_in_a_namespace_that_leaves_out_none_is_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claimed_storage, "MOST_OF_NAMESPACE", 1)
    elsewhere = {"namespace": "flood", "uid": "uid"}
    tracker = listed(*(claim(name, metadata=elsewhere) for name in ("a", "b", "c")))

    missing = reason(tracker.update(pod("data"), None))

    assert left_out(tracker) == {StorageKind.CLAIM: {"flood"}}
    assert "not found" in missing


def test_volumes_of_one_namespaces_claims_leave_those_of_others_their_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claimed_storage, "MOST_OF_NAMESPACE", 2)
    floods = [
        volume(f"pv{number}", claimRef={"namespace": "flood", "name": f"c{number}"})
        for number in range(4)
    ]
    own = volume("pv", claimRef={"namespace": NAMESPACE, "name": "data"})
    tracker = listed(storage_class(), claim("data", "pv"), *floods, own)

    assert queued(tracker.update(pod("data"), None)).request.claims
    assert left_out(tracker) == {StorageKind.VOLUME: {"flood"}}


def test_free_storage_beyond_the_bound_is_not_kept_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claimed_storage, "MOST_OF_NAMESPACE", 2)
    tracker = PodTracker()
    free = [capacity(f"c{number}", "10Gi", {ZONE: "a"}) for number in range(4)]

    tracker.update_storage(changes(*free, kind=StorageKind.CAPACITY))
    names = {name for _, name in tracker.storage.storage.capacities}
    tracker.update_storage(
        StorageChanges(kind=StorageKind.CAPACITY, changed=((("kube-system", "c0"), None),))
    )
    tracker.update_storage(changes(free[3], kind=StorageKind.CAPACITY))

    assert names == {"c0", "c1"}
    assert {name for _, name in tracker.storage.storage.capacities} == {"c1", "c3"}
    assert left_out(tracker) == {StorageKind.CAPACITY: {"kube-system"}}


def test_a_claim_that_grows_beyond_the_bound_is_not_kept_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claimed_storage, "MOST_OF_NAMESPACE", 3)
    tracker = listed(claim("data"), claim("other"))
    labels = {f"key-{number}": "value" for number in range(100)}

    tracker.update_storage(
        changes(claim("data", selector={"matchLabels": labels}), kind=StorageKind.CLAIM)
    )

    assert {name for _, name in tracker.storage.storage.claims} == {"other"}
    assert "is not kept" in reason(tracker.update(pod("data"), None))


def test_a_deleted_claim_is_missing() -> None:
    tracker = listed(storage_class(), claim("data"))
    tracker.update(pod("data"), None)

    deleted = StorageChanges(kind=StorageKind.CLAIM, changed=(((NAMESPACE, "data"), None),))
    tracker.update_storage(deleted)

    assert "not found" in reason(tracker.update_claiming(2))


def in_gang(name: str, *claims: str, least: int = 2) -> ObservedPod:
    return pod(
        *claims,
        name=name,
        annotations={
            "gang.scheduling.koordinator.sh/name": "train",
            "gang.scheduling.koordinator.sh/min-available": str(least),
        },
    )


def gangs_of(events: list[PodEvent]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return the required topology of each pod, and the claim for which one node is required."""
    gangs = {event.name: event.request.gang for event in events if isinstance(event, PodQueued)}
    return {
        name: (gang.required_topology, gang.one_node_claim) for name, gang in gangs.items() if gang
    }


ANYWHERE = ((), "")
ON_ONE_NODE = ((HOSTNAME,), "data")


def test_pods_of_a_gang_that_share_a_claim_of_one_node_have_to_be_on_one_node() -> None:
    tracker = listed(claim("data", "pv"), volume("pv"), claim("own", "pv2"), volume("pv2"))

    first = tracker.update(in_gang("a", "data"), None)
    second = tracker.update(in_gang("b", "data"), None)
    third = tracker.update(in_gang("c", "data", "own"), None)
    other = tracker.update(in_gang("d", "own"), None)

    assert gangs_of(first) == {"a": ANYWHERE}
    assert gangs_of(second) == {"a": ON_ONE_NODE, "b": ON_ONE_NODE}
    assert gangs_of(third) == {"c": ON_ONE_NODE}
    assert gangs_of(other) == {"d": ((HOSTNAME,), "own")}


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ([claim("data"), storage_class()], ON_ONE_NODE),
        ([claim("data", storage_class="local"), storage_class("local", LOCAL)], ON_ONE_NODE),
        ([claim("data", modes="ReadWriteMany"), storage_class()], ANYWHERE),
        ([claim("data"), storage_class(), driver(attachRequired=False)], ANYWHERE),
        ([claim("data", "pv"), volume("pv", modes="ReadWriteOnce ReadOnlyMany")], ANYWHERE),
        ([claim("data", "pv"), volume("pv"), driver(attachRequired=False)], ANYWHERE),
        ([claim("data", "pv"), volume("pv", driver="")], ANYWHERE),
        ([claim("data", "pv"), volume("pv", driver="", awsElasticBlockStore={"volumeID": "v"})],
         ON_ONE_NODE),
    ],
)  # fmt: skip
def test_claims_that_one_node_can_mount(
    objects: list[Manifest], expected: tuple[tuple[str, ...], str]
) -> None:
    tracker = listed(*objects)

    events = [event for name in "ab" for event in tracker.update(in_gang(name, "data"), None)]

    assert set(gangs_of(events).values()) == {expected}


def test_a_claim_of_one_pod_cannot_be_shared_by_a_gang_that_starts_together() -> None:
    tracker = listed(claim("data", modes="ReadWriteOncePod"), storage_class())

    tracker.update(in_gang("a", "data"), None)
    shared = tracker.update(in_gang("b", "data"), None)
    alone = listed(claim("data", modes="ReadWriteOncePod"), storage_class())
    one_by_one = [alone.update(in_gang(name, "data", least=1), None) for name in "ab"]

    texts = [reason([event]) for event in shared]
    assert len(texts) == 2
    assert all(text.endswith("claim of its own, or use ReadWriteMany") for text in texts)
    assert [reason(events) for events in one_by_one] == ["", ""]


def test_a_pod_that_shares_a_claim_with_none_is_not_bound_to_one_node_any_more() -> None:
    tracker = listed(claim("data", "pv"), volume("pv"))
    pods = [in_gang(name, "data", least=3) for name in "ab"]
    for waiting in pods:
        tracker.update(waiting, None)

    tracker.remove(pods[0])
    tracker.update_storage(changes(claim("data", "pv"), kind=StorageKind.CLAIM))

    assert gangs_of(tracker.update_claiming(2)) == {"b": ANYWHERE}


EBS = "attachable-volumes-csi-ebs.csi.aws.com"


def test_volumes_count_against_the_limits_of_their_driver_on_each_node() -> None:
    shared = claim("shared", "pv2")
    tracker = listed(claim("data", "pv"), volume("pv"), shared, volume("pv2"), csi_node("a", 25))
    nodes = NodeTracker(tracker)
    nodes.update(facts("a", allocatable={"pods": 10}), 1)
    nodes.update(facts("b", allocatable={"pods": 10}), 1)
    for number in range(2):
        user = pod("shared", name=f"user-{number}", schedulerName="other")
        tracker.update(msgspec.structs.replace(user, node=NodeName("a")), None)
    leased = msgspec.structs.replace(
        pod("shared", name="leased"), node=NodeName("a"), has_lease=True
    )
    tracker.update(leased, None)

    wanted = queued(tracker.update(pod("data"), None)).request.resources
    published = {change.node.name: change.node for change in nodes.update_usage()}

    assert wanted == {"pods": 1, EBS: 1}
    assert published[NodeName("a")].allocatable == {"pods": 10, EBS: 25}
    assert published[NodeName("a")].used_by_others == {"pods": 2, EBS: 1}
    assert nodes.observed[NodeName("b")].allocatable == {"pods": 10}


def test_a_driver_with_a_limit_on_one_node_has_none_on_the_others() -> None:
    tracker = listed()
    nodes = NodeTracker(tracker)
    nodes.update(facts("b", allocatable={"pods": 10}), 1)
    tracker.update_storage(changes(csi_node("a", 25), kind=StorageKind.CSI_NODE))

    [limited] = nodes.update_usage()
    again = nodes.update_usage()
    deleted = StorageChanges(kind=StorageKind.CSI_NODE, changed=((("", "a"), None),))
    tracker.update_storage(deleted)
    [unlimited] = nodes.update_usage()

    assert limited.node.allocatable == {"pods": 10, EBS: MOST}
    assert again == []
    assert unlimited.node.allocatable == {"pods": 10}


@pytest.mark.parametrize(
    "objects",
    [
        [claim("data", "pv"), volume("pv", driver="", awsElasticBlockStore={"volumeID": "v"})],
        [claim("data"), storage_class("standard", "kubernetes.io/aws-ebs")],
    ],
)
def test_disks_count_against_the_limits_of_the_driver_that_has_replaced_their_plugin(
    objects: list[Manifest],
) -> None:
    tracker = listed(*objects, csi_node("a", 25))

    assert queued(tracker.update(pod("data"), None)).request.resources == {"pods": 1, EBS: 1}


def leased_on(node: str, name: str, *claims: str, **counts: int) -> ObservedPod:
    """Return a pod on a node whose lease counts these volumes."""
    observed = pod(*claims, name=name)
    return msgspec.structs.replace(
        observed, node=NodeName(node), has_lease=True, leased_volumes=counts
    )


def test_a_volume_that_pods_of_a_node_share_counts_once() -> None:
    tracker = listed(
        claim("data", "pv", modes="ReadWriteMany"),
        volume("pv", modes="ReadWriteMany"),
        claim("own", "pv2"),
        volume("pv2"),
        csi_node("a", 25),
    )
    nodes = NodeTracker(tracker)
    nodes.update(facts("a", allocatable={"pods": 10}), 1)
    pods = [leased_on("a", f"p{number}", "data", **{EBS: 1}) for number in range(3)]
    before_the_limit = leased_on("a", "old", "own")
    unknown = leased_on("a", "unknown", "gone", **{EBS: 1})
    unleased = msgspec.structs.replace(
        pod("data", name="theirs", schedulerName="other"), node=NodeName("a")
    )

    tracker.update(pods[0], None)
    alone = nodes.update_usage()
    for other in (*pods[1:], unleased, unknown):
        tracker.update(other, None)
    [shared] = nodes.update_usage()
    tracker.update(before_the_limit, None)
    [uncounted] = nodes.update_usage()
    for one in pods[1:]:
        tracker.remove(one)
    [ended] = nodes.update_usage()

    assert alone == [], "its lease counts it"
    assert shared.node.used_by_others == {EBS: 1 - 3, "pods": 1}
    assert uncounted.node.used_by_others == {EBS: 2 - 3, "pods": 1}
    assert ended.node.used_by_others == {EBS: 2 - 1, "pods": 1}


def test_volumes_of_drivers_without_limits_do_not_count() -> None:
    tracker = listed(claim("data", "pv"), volume("pv"), csi_node("a", 5, "disks.example"))

    assert queued(tracker.update(pod("data"), None)).request.resources == {"pods": 1}
