"""The manifests that code or another file determines: the webhook's lists, rules, dashboards."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import yaml

from shared.dialects import DIALECTS, RESOURCE_PREFIXES, SCHEDULERS, STATUS_RESOURCES
from shared.dialects.dialect import Dialect
from shared.dialects.gpu_names import RUNTIME_PATTERNS, TEXT_ANNOTATIONS
from shared.dialects.kai.elsewhere import MISTAKEN_PREFIXES
from shared.dialects.reserved import (
    AUTHOR_ANNOTATIONS,
    COMPLETED_ANNOTATIONS,
    CUDA_IMAGE_PREFIXES,
    CUDA_IMAGES,
    DENIED_ANNOTATIONS,
    EXEMPT,
    STRIPPED_ANNOTATIONS,
)
from shared.model.devices.node import AGENT_ANNOTATION
from shared.model.names import SYSTEM_NAMESPACE
from shared.model.requests.claim import EXTENDED_RESOURCES, RETRIED_AT
from tools.generate import grafana
from tools.generate.pages import ROOT

BASE = ROOT / "k8s" / "base"
WEBHOOK = ROOT / "services" / "webhook" / "manifests"
MARKED = re.compile(r"^( *)(//|#) generated: (.+)\n.*\n", re.MULTILINE)
"""A comment in CEL or YAML that names a list, and the line that the list replaces."""


def lists() -> dict[str, str]:
    """Return the text of each list that a manifest of the webhook may have."""
    dialects = DIALECTS.values()
    completed = (annotation for annotation in COMPLETED_ANNOTATIONS if annotation != EXEMPT)
    images = (
        _some("c.image", "startsWith", CUDA_IMAGE_PREFIXES),
        _some("c.image", "contains", CUDA_IMAGES),
    )
    return {
        "resources of GPUs": _some("k", "startsWith", RESOURCE_PREFIXES),
        "resources of claims": _some("k", "startsWith", EXTENDED_RESOURCES),
        "annotations of requests": _requests(dialects),
        "annotations of requests and what was meant to be one": " || ".join(
            (
                _requests(dialects),
                _some("k", "startsWith", [f"{prefix}gpu-" for prefix in MISTAKEN_PREFIXES]),
            )
        ),
        "annotations of Leasehold": _some("k", "startsWith", DENIED_ANNOTATIONS),
        "annotations of an assignment": _some(
            "k", "startsWith", (*DENIED_ANNOTATIONS, *STRIPPED_ANNOTATIONS)
        ),
        "annotations that no runtime reads": str(list(TEXT_ANNOTATIONS)),
        **{name: f"r'{pattern}'" for name, pattern in RUNTIME_PATTERNS.items()},
        "images of CUDA": " || ".join(images),
        "schedulers": str(list(SCHEDULERS)),
        "annotations of authors": str(list(AUTHOR_ANNOTATIONS)),
        "annotations of authors and of the webhook": str([*AUTHOR_ANNOTATIONS, *completed]),
        "labels of nodes": _sorted(it for dialect in dialects for it in dialect.node_labels),
        "annotations of nodes": _sorted(
            [AGENT_ANNOTATION, *(it for dialect in dialects for it in dialect.node_annotations)]
        ),
        "resources of nodes": _sorted(STATUS_RESOURCES),
        "annotations of pods": _sorted(
            [RETRIED_AT, *(it for dialect in dialects for it in dialect.agent_annotations)]
        ),
        "objects of nodes": _rule(it for dialect in dialects for it in dialect.node_objects),
    }


def _requests(dialects: Iterable[Dialect]) -> str:
    """Match the annotations by which pods request GPUs without any resource."""
    readers = [dialect for dialect in dialects if dialect.read_for]
    names = _sorted(name for dialect in readers for name in dialect.request_annotations)
    prefixes = [prefix for dialect in readers for prefix in dialect.request_prefixes]
    return f"k in {names} || {_some('k', 'startsWith', prefixes)}"


def _some(text: str, function: str, values: Iterable[str]) -> str:
    return " || ".join(f"{text}.{function}('{value}')" for value in values)


def _sorted(values: Iterable[str]) -> str:
    return str(sorted(set(values)))


def _rule(paths: Iterable[str]) -> str:
    """Return the rule for the objects at API paths `/apis/GROUP/VERSION/PLURAL`."""
    parts = [path.split("/") for path in sorted(set(paths))]
    groups = ", ".join(group for _, _, group, _, _ in parts)
    plurals = ", ".join(plural for *_, plural in parts)
    return (
        f"- {{operations: [CREATE, UPDATE], apiGroups: [{groups}], apiVersions: ['*'], "
        f"resources: [{plurals}]}}"
    )


def webhook_manifests() -> dict[Path, str]:
    """Return the webhook configuration and the admission policies, by path, with their lists."""
    rules = lists()
    return {
        path: MARKED.sub(
            lambda match: (
                f"{match[1]}{match[2]} generated: {match[3]}\n{match[1]}{rules[match[3]]}\n"
            ),
            path.read_text(),
        )
        for path in sorted(WEBHOOK.rglob("*-*.yaml"))
    }


KUBE_SCHEDULER = (
    ROOT / "k8s" / "components" / "kube-scheduler" / "kube-scheduler-configuration.yaml"
)
MONITORING = ROOT / "k8s" / "components" / "prometheus-operator"
RULES = MONITORING / "rules.yaml"
DASHBOARDS = MONITORING / "dashboards.yaml"


def dashboards() -> str:
    """Return the ConfigMap of the dashboards, labelled as Grafana's sidecar expects it."""
    labels = {"app.kubernetes.io/part-of": "leasehold", "grafana_dashboard": "1"}
    metadata = {
        "name": "leasehold-dashboards",
        "namespace": SYSTEM_NAMESPACE,
        "labels": labels,
        "annotations": {"grafana_folder": "Leasehold"},
    }
    data = {
        f"leasehold-{path.name}": json.dumps(json.loads(text))
        for path, text in grafana.dashboards().items()
    }
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    head = "# Generated from tools/generate/grafana.py: python -m tools.generate\n"
    return head + yaml.safe_dump(config_map, sort_keys=False, width=100_000)


def rules() -> str:
    """Return the PrometheusRule of the Prometheus Operator component."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "leasehold",
            "namespace": SYSTEM_NAMESPACE,
            "labels": {"app.kubernetes.io/part-of": "leasehold"},
        },
        "spec": yaml.safe_load((ROOT / "k8s" / "monitoring" / "rules.yaml").read_text()),
    }
    head = "# Generated from monitoring/rules.yaml: python -m tools.generate\n"
    return head + yaml.safe_dump(rule, sort_keys=False, width=1000)
