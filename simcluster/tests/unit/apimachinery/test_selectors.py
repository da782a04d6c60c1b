"""Label and field selectors of the simulated API server."""

import pytest

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.selectors import (
    parse_label_selector,
    parse_selection,
    selector_requirements,
)
from simcluster.apiserver.kinds.builtin_resources import RESOURCES

LABELS = {"app": "web", "tier": "front", "gen": "7"}


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("", True),
        ("app=web", True),
        ("app==web,tier=front", True),
        ("app = web , tier != back", True),
        ("app=db", False),
        ("app!=web", False),
        ("zone!=a", True),
        ("app", True),
        ("!app", False),
        ("!zone", True),
        ("app in (web, db)", True),
        ("app notin (web, db)", False),
        ("zone notin (a)", True),
        ("zone in (a),app", False),
        ("gen>6", True),
        ("gen<7", False),
        ("app=", False),
        ("example.com/x!=1", True),
    ],
)
def test_label_selector_texts_match_as_in_kubernetes(text: str, selected: bool) -> None:
    assert all(holds(LABELS) for holds in parse_label_selector(text)) is selected


@pytest.mark.parametrize("text", ["app in web", "a=b=c", "=", "app in (", "gen>x", "a b"])
def test_malformed_label_selectors_are_refused(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_label_selector(text)

    assert refused.value.code == 400


def test_selector_objects_select_like_selector_texts() -> None:
    selector = {
        "matchLabels": {"app": "web"},
        "matchExpressions": [
            {"key": "tier", "operator": "In", "values": ["front", "back"]},
            {"key": "zone", "operator": "DoesNotExist"},
        ],
    }

    assert all(holds(LABELS) for holds in selector_requirements(selector))
    assert all(holds(LABELS) for holds in selector_requirements({}))
    assert not all(holds(LABELS) for holds in selector_requirements(None))


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("spec.nodeName=node-0", True),
        ("spec.nodeName=", False),
        ("status.phase!=Failed,status.phase!=Succeeded", True),
        ("metadata.name=web,metadata.namespace=default", True),
        ("spec.hostNetwork=false", False),
        ("spec.hostNetwork=true", True),
        ("status.nominatedNodeName=", True),
    ],
)
def test_field_selectors_match_as_in_kubernetes(text: str, selected: bool) -> None:
    pod = {
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"nodeName": "node-0", "hostNetwork": True},
        "status": {"phase": "Running"},
    }

    assert parse_selection(RESOURCES["pods"], "", "", text).matches(pod) is selected


@pytest.mark.parametrize("text", ["spec.containers=x", "nonsense", "metadata.namespace"])
def test_unsupported_fields_are_refused(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_selection(RESOURCES["pods"], "", "", text)

    assert refused.value.code == 400


def test_an_unset_flag_equals_false() -> None:
    chosen = parse_selection(RESOURCES["nodes"], "", "", "spec.unschedulable=false")

    assert chosen.matches({"metadata": {}, "spec": {}})
