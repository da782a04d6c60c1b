"""Collects objects, settings, versions and events of a cluster into one file for support."""

import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml

from services.cli.api_client import ApiClient
from services.cli.bundle.redaction import (
    HIDDEN,
    Pseudonyms,
    cluster_of,
    layouts,
    loadable_pod,
    without_secrets,
)
from services.cli.commands import Bundle
from services.cli.pod_summary import summary_of
from services.node_agent.mig.gpu_models import GPU_MODELS
from shared.kubernetes.types import ApiPod, ObjectList
from shared.model.bounds import printable_lines
from shared.model.errors import UNDECODABLE, LeaseholdError, RequestError
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE

VIEWS = ("version", "state", "gpus", "leases", "preemptions", "budgets", "reports/idle")
"""Of the API; `state` has the problems, and the events that its replica has in memory."""
OBJECTS: Mapping[str, str] = {
    "nodes": "/api/v1/nodes",
    "gpubudgets": "/apis/leasehold.dev/v1beta1/gpubudgets",
    "gpuquotas": "/apis/leasehold.dev/v1beta1/gpuquotas",
    "workloads": f"/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/deployments",
    "agents": f"/apis/apps/v1/namespaces/{AGENTS_NAMESPACE}/daemonsets",
    "events": "/api/v1/events?limit=2000",
}
PODS = "/api/v1/pods"
SETTINGS = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/configmaps"
SECRET_WORDS = ("token", "secret", "password", "credential", "key", "url")
"""URLs may have passwords."""
README = """\
A support bundle of Leasehold {version}, of {at}.{names}

views/     what the API shows: devices, leases, waiting pods, problems, recent events, budgets
objects/   nodes, pods with GPUs, budgets, quotas, workloads and Events of the API server
settings/  the ConfigMaps of {system}; values that may be secret are hidden
errors.txt what could not be read, and why
load/      the same nodes and pods for a simulated cluster:

    leasehold up --headless --gpus {layouts}
    export KUBECONFIG=$PWD/.leasehold/kubeconfig
    kubectl apply -f load/cluster.yaml -f load/pods.yaml

GPUs are the nearest simulated models. Pods wait and run as the placer decides there; they sleep.
"""
Documents = dict[str, Any]


def bundle(flags: Bundle) -> int:
    api = ApiClient(flags)
    errors: dict[str, str] = {}
    documents = _documents(api, errors)
    if not any(name.startswith("views/") for name in documents):
        raise RequestError(f"nothing could be read: {next(iter(errors.values()))}")
    if not flags.names:
        documents = _renamed(documents)
    at = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())
    file = flags.out or Path(f"leasehold-bundle-{at}.tar.gz")
    try:
        _write(file, _texts(documents, errors, at, names=flags.names))
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error.strerror}") from error
    hidden = "" if flags.names else ", with other names in place of your own"
    count = len(documents)
    print(f"{file}: {count} documents without secrets{hidden}; look at it before you send it")
    for name, reason in errors.items():
        print(printable_lines(f"not in it: {name}: {reason}"))
    return 0


def _documents(api: ApiClient, errors: dict[str, str]) -> Documents:
    readers: dict[str, Callable[[], Any]] = {
        f"views/{view.replace('/', '-')}": partial(api.get, f"/api/v1/{view}", dict)
        for view in VIEWS
    }
    readers |= {f"objects/{name}": partial(_items, api, path) for name, path in OBJECTS.items()}
    readers["objects/pods"] = lambda: list(_gpu_pods(api))
    readers["settings/configmaps"] = lambda: _settings(_items(api, SETTINGS))
    documents: Documents = {}
    for name, read in readers.items():
        try:
            documents[name] = read()
        except (LeaseholdError, *UNDECODABLE) as error:
            errors[name] = str(error)
    return {
        name: document if name.startswith("settings/") else without_secrets(document)
        for name, document in documents.items()
    }


def _items(api: ApiClient, path: str) -> list[Any]:
    return list(api.server.read(path, ObjectList[Any]).items or ())


def _gpu_pods(api: ApiClient) -> Iterator[dict[str, Any]]:
    for item in _items(api, PODS):
        if summary_of(msgspec.convert(item, ApiPod)).requests_gpus:
            yield item


def _settings(config_maps: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    return {
        item["metadata"]["name"]: {
            key: HIDDEN if any(word in key.lower() for word in SECRET_WORDS) else value
            for key, value in item["data"].items()
            if key.startswith("LEASEHOLD_")
        }
        for item in config_maps
        if any(key.startswith("LEASEHOLD_") for key in item.get("data") or {})
    }


def _renamed(documents: Documents) -> Documents:
    pseudonyms = Pseudonyms()
    named = {name: text for name, text in documents.items() if not name.startswith("settings/")}
    for document in named.values():
        pseudonyms.learn(document)
    return {name: pseudonyms.of(document) for name, document in documents.items()}


def _texts(
    documents: Documents, errors: Mapping[str, str], at: str, *, names: bool
) -> Iterator[tuple[str, str]]:
    pods = documents.get("objects/pods", ())
    models = {name: model.memory_mib for name, model in GPU_MODELS.items()}
    gpus = ",".join(layouts(documents.get("views/gpus", {}).get("nodes", ()), models))
    yield (
        "README.txt",
        README.format(
            version=documents.get("views/version", {}).get("version", "of unknown version"),
            at=at,
            names="" if names else " Names are not those of the cluster.",
            system=SYSTEM_NAMESPACE,
            layouts=gpus or "4xT4",
        ),
    )
    for name, document in documents.items():
        yield f"{name}.json", json.dumps(document, indent=1, ensure_ascii=False)
    yield "errors.txt", "".join(f"{name}: {reason}\n" for name, reason in errors.items())
    yield "load/cluster.yaml", yaml.safe_dump_all(cluster_of(pods), sort_keys=False)
    yield "load/pods.yaml", yaml.safe_dump_all(map(loadable_pod, pods), sort_keys=False)


def _write(file: Path, texts: Iterable[tuple[str, str]]) -> None:
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(opened, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
        file.chmod(0o600)
        for path, text in texts:
            content = text.encode()
            entry = tarfile.TarInfo(f"leasehold-bundle/{path}")
            entry.size = len(content)
            entry.mtime = int(time.time())
            archive.addfile(entry, io.BytesIO(content))
