"""A change of settings replaces the pods that have them, by the name of their ConfigMap."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.packaging import K8S, WORKLOADS, built, kustomize, needs_kubectl, objects

pytestmark = needs_kubectl


def test_a_change_of_settings_replaces_the_pods_that_have_them(tmp_path: Path) -> None:
    patch = {
        "target": {"kind": "ConfigMap", "name": "leasehold-settings"},
        "patch": "- {op: replace, path: /data/LEASEHOLD_LOG_LEVEL, value: debug}",
    }
    parts = {"resources": [os.path.relpath(K8S / "base", tmp_path)], "patches": [patch]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(parts))

    before, after = (objects(kustomize(it)) for it in (K8S / "base", tmp_path))

    replaced = {
        (it["kind"], it["metadata"]["name"])
        for it in after
        if it["kind"] in WORKLOADS and it not in before
    }
    assert replaced == {("Deployment", name) for name in SETTINGS_READERS}


SETTINGS_READERS = {
    *("auth", "binder", "api", "operator", "placer", "timekeeper", "watcher", "webhook"),
}


def test_roles_name_their_objects_as_written() -> None:
    """Kustomize also replaces names of generated ConfigMaps in rules, whatever kind they name."""
    written = {
        name
        for path in K8S.rglob("*.yaml")
        if "chart" not in path.parts
        for role in yaml.safe_load_all(path.read_text())
        for name in _names(role)
    }

    for overlay in ("overlays/dev", "overlays/ha"):
        assert {name for role in built(K8S / overlay) for name in _names(role)} <= written


def _names(role: Any) -> Iterator[str]:
    if isinstance(role, dict) and role.get("kind") in {"Role", "ClusterRole"}:
        for rule in role.get("rules") or ():
            yield from rule.get("resourceNames", ())
