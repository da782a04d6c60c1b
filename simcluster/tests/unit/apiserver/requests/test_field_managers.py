"""`metadata.managedFields` of nodes."""

from simcluster.apimachinery.objects import Json
from simcluster.apiserver.requests.field_managers import recorded_managers


def node(spec: Json | None = None, **annotations: str) -> Json:
    return {"metadata": {"annotations": annotations}, "spec": spec or {}}


def managed(before: Json, after: Json, manager: str, now: str = "t") -> Json:
    """Return `after` as the API server stores it."""
    entries = recorded_managers(before, after, manager, now)
    return {**after, "metadata": {**after["metadata"], "managedFields": entries}}


def managers(obj: Json) -> dict[str, Json]:
    return {entry["manager"]: entry["fieldsV1"] for entry in obj["metadata"]["managedFields"]}


def test_a_field_belongs_to_the_program_that_changed_it_last() -> None:
    first = managed(node(), node({"unschedulable": True}, a="1", b="1"), "kubectl")

    second = managed(first, node({"unschedulable": True}, a="2", b="1"), "leasehold:ada")

    assert managers(first) == {
        "kubectl": {
            "f:metadata": {"f:annotations": {"f:a": {}, "f:b": {}}},
            "f:spec": {"f:unschedulable": {}},
        }
    }
    assert managers(second) == {
        "kubectl": {
            "f:metadata": {"f:annotations": {"f:b": {}}},
            "f:spec": {"f:unschedulable": {}},
        },
        "leasehold:ada": {"f:metadata": {"f:annotations": {"f:a": {}}}},
    }


def test_fields_that_are_gone_belong_to_none_and_a_write_without_a_change_changes_nothing() -> None:
    first = managed(node(), node(a="1", b="1"), "kubectl", now="t1")
    second = managed(first, node(a="1"), "other", now="t2")

    same = managed(second, node(a="1"), "third", now="t3")

    assert managers(second) == {"kubectl": {"f:metadata": {"f:annotations": {"f:a": {}}}}}
    assert same == second
