"""What a support bundle leaves out and renames, and what it loads."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.bundle.command import _write
from services.cli.bundle.redaction import (
    Pseudonyms,
    cluster_of,
    layouts,
    loadable_pod,
    without_secrets,
)

SECRET = "of-somebody"  # noqa: S105
POD = {
    "metadata": {
        "name": "train-7",
        "namespace": "research",
        "uid": "1",
        "managedFields": [{}],
        "labels": {"team": "nlp", "volcano.sh/queue-name": "research"},
    },
    "spec": {
        "schedulerName": "leasehold",
        "nodeName": "gpu-17.example.com",
        "priority": 7,
        "priorityClassName": "high",
        "nodeSelector": {"kubernetes.io/hostname": "gpu-17.example.com", "nvidia.com/gpu.x": "y"},
        "containers": [
            {
                "name": "fit",
                "image": "registry.example.com/nlp/fit:3",
                "env": [{"name": "PASSWORD", "value": SECRET}],
                "args": ["--token", SECRET],
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
            }
        ],
    },
}
VIEW = {
    "waiting": [{"namespace": "research", "name": "train-8", "reason": "after research/train-7"}],
    "events": [{"name": "GPU 3 of gpu-17.example.com", "namespace": "", "text": "gone"}],
    "nodes": [{"node": "gpu-17.example.com"}],
}


def test_variables_arguments_and_secrets_are_left_out() -> None:
    secret = {"kind": "Secret", "data": {"a": SECRET}, "metadata": {"managedFields": [SECRET]}}

    assert SECRET not in json.dumps(without_secrets([POD, secret]))


def test_names_are_replaced_alike_in_fields_and_in_texts() -> None:
    pseudonyms = Pseudonyms()
    documents = [without_secrets(POD), VIEW]
    for document in documents:
        pseudonyms.learn(document)

    pod, view = map(pseudonyms.of, documents)

    text = json.dumps([pod, view])
    for name in ("train-7", "train-8", "research", "gpu-17", "registry", "nlp", "fit"):
        assert name not in text
    waiting = view["waiting"][0]
    space = pod["metadata"]["namespace"]
    assert waiting["namespace"] == space
    assert waiting["reason"] == f"after {space}/{pod['metadata']['name']}"
    assert view["events"][0]["name"] == f"GPU 3 of {view['nodes'][0]['node']}"
    assert pod["metadata"]["labels"] == {"volcano.sh/queue-name": space}
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_a_pod_is_loaded_with_what_placing_depends_on() -> None:
    pod = loadable_pod(POD)

    assert pod["spec"]["nodeSelector"] == {"nvidia.com/gpu.x": "y"}
    assert "nodeName" not in pod["spec"]
    assert pod["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert [(it["kind"], it["metadata"]["name"]) for it in cluster_of([POD])] == [
        ("Namespace", "research"),
        ("PriorityClass", "high"),
    ]
    assert "priority" not in pod["spec"]


def test_gpus_stand_for_the_nearest_simulated_models() -> None:
    models = {"T4": 15_360, "A100-40GB": 40_960, "A100-80GB": 81_920}

    def gpu(model: str, mib: int, mode: str = "shared") -> dict[str, object]:
        return {"model": model, "memory_mib": mib, "mode": mode}

    nodes: list[dict[str, Any]] = [
        {"devices": [gpu("NVIDIA A100-SXM4-80GB", 81_920)] * 7 + [gpu("Tesla T4", 15_360)]},
        {"devices": [gpu("NVIDIA Unheard-Of", 44_000), gpu("A100-40GB", 40_000, "mig")]},
        {"devices": []},
    ]

    assert layouts(nodes, models) == ["7xA100-80GB+1xT4", "1xA100-40GB+1xA100-40GB:mig"]


@pytest.mark.parametrize("exists", [False, True])
def test_nobody_else_reads_a_bundle_while_it_is_written(tmp_path: Path, exists: bool) -> None:
    file = tmp_path / "bundle.tar.gz"
    if exists:
        file.touch(mode=0o644)
    modes: list[int] = []

    def texts() -> Iterator[tuple[str, str]]:
        modes.append(file.stat().st_mode & 0o777)
        yield "errors.txt", "none"

    _write(file, texts())

    assert modes == [0o600]
    with tarfile.open(file) as archive:
        assert archive.getnames() == ["leasehold-bundle/errors.txt"]
