"""A change of settings replaces the pods that have them, by the name of their ConfigMap."""

import os
from pathlib import Path

import pytest
import yaml

from tests.contract.test_overlays import K8S, WORKLOADS, built, key, kustomized, one, with_component

pytestmark = pytest.mark.kubectl


def test_a_change_of_settings_replaces_the_pods_that_have_them(tmp_path: Path) -> None:
    patch = {
        "target": {"kind": "ConfigMap", "name": "leasehold"},
        "patch": "- {op: replace, path: /data/LEASEHOLD_LOG_LEVEL, value: debug}",
    }
    parts = {"resources": [os.path.relpath(K8S / "base", tmp_path)], "patches": [patch]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(parts))

    before, after = (kustomized(it) for it in (K8S / "base", tmp_path))

    replaced = {key(it) for it in after if it["kind"] in WORKLOADS and it not in before}
    assert replaced == {("Deployment", name) for name in SETTINGS_READERS}


SETTINGS_READERS = (
    *("auth", "binder", "dashboard", "operator", "placer", "timekeeper", "watcher", "webhook"),
)


def test_components_of_the_agents_change_the_template_of_their_pods(tmp_path: Path) -> None:
    before = one(built(K8S / "base"), "DaemonSet", "node-agent")["spec"]["template"]
    for name in ("cdi", "dra", "hami-core", "mig"):
        folder = tmp_path / name
        folder.mkdir()
        assert (
            one(with_component(name, folder), "DaemonSet", "node-agent")["spec"]["template"]
            != before
        )
