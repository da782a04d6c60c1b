"""The store of the simulated cluster: versions, watches, graceful deletion, what survives."""

import asyncio
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.objects import Json, deep_copy
from simcluster.apimachinery.selectors import parse_selection
from simcluster.apiserver.kinds.builtin_resources import RESOURCES
from simcluster.apiserver.kinds.namespaces import NamespaceController, create_system_objects
from simcluster.apiserver.registry import open_store
from simcluster.apiserver.storage.persistence import SqliteBackend
from simcluster.apiserver.storage.store import ObjectStore


def a_pod(name: str = "web", **spec: object) -> Json:
    containers = [{"name": "main", "image": "example/image:1"}]
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": containers, **spec},
    }


def a_store(window: int = 100) -> ObjectStore:
    store = open_store(window=window)
    NamespaceController(store)
    create_system_objects(store)
    return store


def refusal(code: int, reason: str) -> AbstractContextManager[object]:
    return pytest.raises(ApiError, check=lambda error: (error.code, error.reason) == (code, reason))


def test_a_created_object_has_identity_and_version() -> None:
    store = a_store()

    pod = store.create("pods", a_pod())

    meta = pod["metadata"]
    assert meta["uid"]
    assert meta["creationTimestamp"].endswith("Z")
    assert meta["generation"] == 1
    assert int(meta["resourceVersion"]) == store.version
    assert list(pod)[:3] == ["apiVersion", "kind", "metadata"]


def test_names_are_unique_and_generated_names_differ() -> None:
    store = a_store()
    store.create("pods", a_pod())

    with refusal(409, "AlreadyExists"):
        store.create("pods", a_pod())
    generated = {**a_pod(), "metadata": {"generateName": "web-", "namespace": "default"}}
    names = {store.create("pods", generated)["metadata"]["name"] for _ in range(5)}

    assert len(names) == 5
    assert all(name.startswith("web-") for name in names)


def test_an_update_of_an_older_version_is_a_conflict() -> None:
    store = a_store()
    first = store.create("configmaps", {"metadata": {"name": "c", "namespace": "default"}})
    changed = {**deep_copy(first), "data": {"a": "1"}}
    store.update("configmaps", changed)

    with refusal(409, "Conflict"):
        store.update("configmaps", {**changed, "data": {"a": "2"}})
    unconditional = deep_copy(changed)
    del unconditional["metadata"]["resourceVersion"]
    store.update("configmaps", {**unconditional, "data": {"a": "3"}})

    assert store.read("configmaps", "default", "c")["data"] == {"a": "3"}


def test_an_update_that_changes_nothing_keeps_the_version() -> None:
    store = a_store()
    pod = store.create("pods", a_pod())

    assert store.update("pods", pod)["metadata"]["resourceVersion"] == str(store.version)
    assert store.version == int(pod["metadata"]["resourceVersion"])


def test_status_and_spec_are_written_separately() -> None:
    store = a_store()
    pod = deep_copy(store.create("pods", a_pod()))
    pod["status"] = {"phase": "Running"}
    pod["spec"]["activeDeadlineSeconds"] = 60

    after_main = store.update("pods", {**pod, "metadata": {**pod["metadata"]}})
    assert after_main["status"]["phase"] == "Pending"
    assert after_main["metadata"]["generation"] == 2
    patch = {"status": {"phase": "Running"}, "spec": {"activeDeadlineSeconds": 5}}
    after_status = store.patch("pods", "default", "web", patch, subresource="status")

    assert after_status["status"]["phase"] == "Running"
    assert after_status["spec"]["activeDeadlineSeconds"] == 60


def test_a_bound_pod_waits_for_its_kubelet_and_an_unbound_one_does_not() -> None:
    store = a_store()
    store.create("pods", a_pod("waiting"))
    bound = store.create("pods", a_pod("bound", nodeName="node-0"))

    store.delete("pods", "default", "waiting")
    marked = store.delete("pods", "default", "bound")

    assert store.find("pods", "default", "waiting") is None
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 30
    assert not store.is_gone("pods", bound)
    store.delete("pods", "default", "bound", grace_s=0, uid=bound["metadata"]["uid"])
    assert store.is_gone("pods", bound)


def test_deletion_preconditions_hold() -> None:
    store = a_store()
    store.create("pods", a_pod())

    with refusal(409, "Conflict"):
        store.delete("pods", "default", "web", uid="another")
    with refusal(409, "Conflict"):
        store.delete("pods", "default", "web", resource_version="1")


def test_finalizers_keep_an_object_until_they_are_gone() -> None:
    store = a_store()
    meta = {"name": "c", "namespace": "default", "finalizers": ["example.com/hold"]}
    store.create("configmaps", {"metadata": meta})

    store.delete("configmaps", "default", "c")
    assert store.read("configmaps", "default", "c")["metadata"]["deletionTimestamp"]
    store.patch("configmaps", "default", "c", {"metadata": {"finalizers": None}})

    assert store.find("configmaps", "default", "c") is None


def test_a_namespace_is_removed_after_its_contents() -> None:
    store = a_store()
    store.create("namespaces", {"metadata": {"name": "team"}})
    pod = a_pod(nodeName="node-0")
    pod["metadata"]["namespace"] = "team"
    store.create("pods", pod)

    store.delete("namespaces", None, "team")

    assert store.read("namespaces", None, "team")["status"]["phase"] == "Terminating"
    with refusal(403, "Forbidden"):
        store.create("configmaps", {"metadata": {"name": "late", "namespace": "team"}})
    store.delete("pods", "team", "web", grace_s=0)
    assert store.find("namespaces", None, "team") is None
    with refusal(404, "NotFound"):
        store.create("pods", pod)


def test_a_watch_sees_objects_enter_and_leave_its_selection() -> None:
    store = a_store()
    chosen = parse_selection(RESOURCES["pods"], "default", "app=a", "")
    watched = store.subscribe("pods", chosen, store.version)
    store.create("pods", a_pod())

    for labels in ({"app": "a"}, {"app": "a", "b": "c"}, {"app": "b"}):
        store.patch("pods", "default", "web", {"metadata": {"labels": labels}})
    store.delete("pods", "default", "web")

    events = watched.poll()
    assert [event.type for event in events] == ["ADDED", "MODIFIED", "DELETED"]
    left = events[-1].object["metadata"]
    assert left["labels"]["app"] == "a"
    assert int(left["resourceVersion"]) == store.version - 1


async def test_a_watch_starts_with_the_present_objects_and_then_waits() -> None:
    store = a_store()
    store.create("pods", a_pod("first"))
    seen: list[str] = []

    async def follow() -> None:
        watch = store.watch("pods")
        while len(seen) < 2:
            await watch.wait()
            seen.extend(f"{e.type} {e.object['metadata']['name']}" for e in watch.poll())

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        while not seen:
            await asyncio.sleep(0)
        store.create("pods", a_pod("second"))

    assert seen == ["ADDED first", "ADDED second"]


def test_a_watch_that_falls_behind_the_window_gets_410() -> None:
    store = a_store(window=3)
    chosen = parse_selection(RESOURCES["pods"])
    watched = store.subscribe("pods", chosen, store.version)
    began_at = store.version

    for number in range(8):
        store.create("pods", a_pod(f"web-{number}"))

    with refusal(410, "Expired"):
        watched.poll()
    with refusal(410, "Expired"):
        store.subscribe("pods", chosen, began_at)


async def test_a_watch_of_a_quiet_object_does_not_fall_behind() -> None:
    store = a_store(window=20)
    seen: list[str] = []

    async def follow() -> None:
        watch = store.watch("pods", fields="metadata.name=quiet")
        while not seen:
            await watch.wait()
            seen.extend(event.type for event in watch.poll())

    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        for number in range(100):
            store.create("pods", a_pod(f"loud-{number}"))
            await asyncio.sleep(0)
        store.create("pods", a_pod("quiet"))

    assert seen == ["ADDED"]


def test_all_pages_show_the_version_of_the_first() -> None:
    store = a_store()
    for name in ("a", "b", "c", "d"):
        store.create("pods", a_pod(name))
    chosen = parse_selection(RESOURCES["pods"], "default")

    first = store.page("pods", chosen, limit=2)
    store.delete("pods", "default", "c")
    store.create("pods", a_pod("cc"))
    second = store.page("pods", chosen, start=first.rest or "", version=first.version)

    names = [record.obj["metadata"]["name"] for record in (*first.records, *second.records)]
    assert names == ["a", "b", "c", "d"]
    assert first.remaining == 2


def test_objects_on_disk_survive_a_restart(tmp_path: Path) -> None:
    store = open_store(SqliteBackend(tmp_path / "objects.sqlite"))
    create_system_objects(store)
    stored = store.create("pods", a_pod("kept"))
    store.create("pods", a_pod("deleted"))
    store.delete("pods", "default", "deleted")
    store.close()

    again = open_store(SqliteBackend(tmp_path / "objects.sqlite"))

    assert again.version == store.version
    assert again.read("pods", "default", "kept") == stored
    assert again.find("pods", "default", "deleted") is None
    with refusal(410, "Expired"):
        again.subscribe("pods", parse_selection(RESOURCES["pods"]), store.version - 1)
    again.close()


def test_a_dry_run_changes_nothing() -> None:
    store = a_store()
    version = store.version

    assert store.create("pods", a_pod(), dry_run=True)["metadata"]["uid"]

    assert store.version == version
    assert store.list("pods") == []
    assert store.writes.counts("pods", "default/web") == {}


def test_writes_are_counted_by_verb() -> None:
    store = a_store()
    store.create("pods", a_pod())
    store.patch("pods", "default", "web", {"status": {"phase": "Running"}}, subresource="status")

    assert store.writes.counts("pods", "default/web") == {"create": 1, "patch/status": 1}
