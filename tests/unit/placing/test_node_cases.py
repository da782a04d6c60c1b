"""Pods fit the nodes that kube-scheduler leaves for them."""

import msgspec
import pytest

from shared.kubernetes.types import ApiNode, ApiPod
from shared.model.names import Namespace
from tests.support.node_case_objects import NAMESPACE, fitting, node_manifests, pod_manifests
from tests.support.node_cases import NODE_CASES, NodeCase

NAMESPACES = {Namespace(NAMESPACE): {"team": "ml"}, Namespace("other"): {}}


@pytest.mark.parametrize("case", NODE_CASES.values(), ids=NODE_CASES)
def test_pods_fit_the_nodes_that_kube_scheduler_leaves(case: NodeCase) -> None:
    pods = [
        msgspec.convert(pod, ApiPod)
        for number, manifest in enumerate(pod_manifests(case))
        for pod in [{**manifest, "metadata": {**manifest["metadata"], "uid": f"uid-{number}"}}]
    ]
    nodes = [msgspec.convert(manifest, ApiNode) for manifest in node_manifests(case)]

    assert fitting(pods, nodes, NAMESPACES) == case.fits
