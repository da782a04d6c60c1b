"""A pod of the API server as its page shows it: nothing that may be secret, the latest Events."""

from datetime import UTC, datetime

import msgspec
import pytest

from services.api.projection.pod_object import HIDDEN, LAST_APPLIED, pod_object
from shared.kubernetes.pod_status import PodEvent

SECRET = "of-somebody"  # noqa: S105
ENV = [
    {"name": "PASSWORD", "value": SECRET},
    {"name": "USER", "valueFrom": {"secretKeyRef": {"name": "login", "key": "user"}}},
]
CREATED = datetime(2031, 5, 1, 10, tzinfo=UTC).timestamp()
POD = {
    "metadata": {
        "name": "train",
        "namespace": "ml",
        "uid": "uid-1",
        "creationTimestamp": "2031-05-01T10:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
        "annotations": {LAST_APPLIED: SECRET, "mine": "shown"},
        "ownerReferences": [
            {"kind": "ConfigMap", "name": "other", "uid": "2"},
            {"kind": "Job", "name": "fit", "uid": "1", "controller": True},
        ],
    },
    "spec": {
        "containers": [{"name": "main", "image": "a:1", "env": ENV}],
        "initContainers": [{"name": "first", "image": "b:1", "env": ENV}],
        "ephemeralContainers": [{"name": "debug", "env": ENV}],
        "priority": 7,
        "priorityClassName": "high",
        "nodeSelector": {"pool": "a"},
        "schedulingGates": [{"name": "later"}],
    },
    "status": {"phase": "Pending"},
}


def described(status: object, *events: PodEvent):  # type: ignore[no-untyped-def]
    return pod_object(msgspec.json.encode({**POD, "status": status}), events)


def test_values_of_variables_are_hidden_wherever_they_are() -> None:
    manifest = described({"phase": "Pending"}).manifest

    assert SECRET not in manifest
    assert manifest.count(HIDDEN) == 4
    assert "secretKeyRef" in manifest
    assert "mine: shown" in manifest
    assert "managedFields" not in manifest


def test_who_owns_it_and_what_it_asks_of_the_scheduler() -> None:
    view = described({"phase": "Pending"})

    assert (view.owner, view.priority, view.priority_class) == ("Job fit", 7, "high")
    assert (view.node_selector, view.gates) == ({"pool": "a"}, ("later",))
    assert [(container.name, container.init) for container in view.containers] == [
        ("first", True),
        ("main", False),
    ]
    assert (view.created, view.ended) == (CREATED, None)


@pytest.mark.parametrize(
    ("state", "text", "ended"),
    [
        ({"waiting": {"reason": "ImagePullBackOff"}}, "waiting: ImagePullBackOff", False),
        ({"running": {"startedAt": "2031-05-01T10:00:05Z"}}, "running", False),
        (
            {
                "terminated": {
                    "exitCode": 137,
                    "reason": "OOMKilled",
                    "startedAt": "2031-05-01T10:00:05Z",
                    "finishedAt": "2031-05-01T10:00:09Z",
                }
            },
            "ended with code 137: OOMKilled",
            True,
        ),
        ({}, "", False),
    ],
)
def test_a_container_says_what_it_does(state: object, text: str, ended: bool) -> None:
    done = {"terminated": {"exitCode": 0, "finishedAt": "2031-05-01T10:00:04Z"}}
    view = described(
        {
            "containerStatuses": [{"name": "main", "state": state, "restartCount": 2}],
            "initContainerStatuses": [{"name": "first", "state": done}],
        }
    )

    main = view.containers[1]
    assert (main.state, main.restarts) == (text, 2)
    assert (main.ended is not None, view.ended) == (ended, main.ended)


def test_the_latest_events_come_first_with_how_often_they_happened() -> None:
    old = msgspec.json.decode(
        b'{"reason": "A", "count": 3, "lastTimestamp": "2031-05-01T10:00:00Z", "eventTime": null,'
        b' "source": {"component": "kubelet"}, "reportingComponent": ""}',
        type=PodEvent,
    )
    new = msgspec.json.decode(
        b'{"reason": "B", "lastTimestamp": null, "eventTime": "2031-05-01T10:00:00.5Z", "series":'
        b' {"count": 4, "lastObservedTime": "2031-05-01T11:00:00.123456Z"},'
        b' "reportingComponent": "leasehold"}',
        type=PodEvent,
    )

    events = described({}, *[old] * 60, new).events

    assert len(events) == 50
    assert [(event.reason, event.count, event.source) for event in events[:2]] == [
        ("B", 4, "leasehold"),
        ("A", 3, "kubelet"),
    ]
