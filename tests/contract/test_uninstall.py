"""What `kubectl delete -k` deletes: no objects of users."""

from pathlib import Path

import pytest

from shared.dialects import DIALECTS
from shared.model.node import AGENT_ANNOTATION
from tests.support.packaging import (
    COMPONENTS,
    K8S,
    OVERLAYS,
    built,
    needs_kubectl,
    with_component,
)

ROOT = K8S.parent
WITH_USERS_OBJECTS = {"CustomResourceDefinition", "Namespace", "PersistentVolumeClaim"}
"""Kinds of objects whose deletion deletes objects or data of users."""

pytestmark = needs_kubectl


@pytest.mark.parametrize("name", OVERLAYS)
def test_deleting_an_overlay_deletes_no_objects_of_users(name: str) -> None:
    assert WITH_USERS_OBJECTS.isdisjoint(it["kind"] for it in built(K8S / "overlays" / name))


@pytest.mark.parametrize("name", COMPONENTS)
def test_deleting_a_component_deletes_no_objects_of_users(name: str, tmp_path: Path) -> None:
    assert WITH_USERS_OBJECTS.isdisjoint(it["kind"] for it in with_component(name, tmp_path))


def test_the_volume_of_redis_outlives_its_stateful_set_and_nats_has_none() -> None:
    sets = [it for it in built(K8S / "base") if it["kind"] == "StatefulSet"]
    with_volumes = [it for it in sets if "volumeClaimTemplates" in it["spec"]]
    policies = [it["spec"].get("persistentVolumeClaimRetentionPolicy") for it in with_volumes]

    assert [it["metadata"]["name"] for it in sets] == ["nats", "redis"]
    assert [it["metadata"]["name"] for it in with_volumes] == ["redis"]
    assert policies == [None], "the default is Retain"


def test_what_is_kept_has_a_directory_of_its_own_that_is_installed_first() -> None:
    kept = {(it["kind"], it["metadata"]["name"]) for it in built(K8S / "persistent")}
    install = (ROOT / "docs" / "install.md").read_text()

    assert kept == {
        ("Namespace", "leasehold-system"),
        ("Namespace", "leasehold-agents"),
        ("CustomResourceDefinition", "gpubudgets.leasehold.dev"),
        ("CustomResourceDefinition", "gpuquotas.leasehold.dev"),
    }
    assert install.index("apply -k k8s/persistent") < install.index("apply -k k8s/overlays/dev")


def test_the_page_removes_every_annotation_and_label_that_agents_write_to_nodes() -> None:
    uninstall = (ROOT / "docs" / "uninstall.md").read_text()
    written = {AGENT_ANNOTATION}.union(
        *(each.node_annotations | each.node_labels for each in DIALECTS.values())
    )

    assert [key for key in sorted(written) if f" {key}-" not in uninstall] == []
